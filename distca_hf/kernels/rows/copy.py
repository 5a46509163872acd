"""Copies of rows: what leaves for other ranks is gathered, and what came from them is put where it is read.

On a GPU one Triton kernel copies whole rows of up to two tensors: torch's `index_copy_` reaches a third of the
memory's rate, and every operator costs the host more than the device.
"""

from collections.abc import Sequence

import torch

from distca_hf.kernels.rows.formats import kinds_of_rows, widths_of_parts


def copy_rows(
    sources: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    targets: Sequence[torch.Tensor],
    places: torch.Tensor | None,
) -> None:
    """Writes rows `rows` `[n]` of the sources to rows `places` `[n]` of the targets; None, for one of the two, means
    all of them in order. No place occurs twice. Rows may lie apart; elements of a row follow each other.

    One or two tensors are copied. Two on one side may be one on the other, in which their rows lie side by side.

    Raises:
        ValueError: there are more rows than places or fewer, or others: another shape (side by side: width) or
            dtype; or neither is given.
    """
    if rows is None and places is None:
        raise ValueError("neither rows nor places were given: copy whole tensors with copy_")
    count = _count(sources, rows)
    if count != _count(targets, places):
        raise ValueError(f"cannot copy {count} rows to {_count(targets, places)} places")
    if targets[0].is_cuda:
        from distca_hf.kernels.rows.copy_triton import copy_rows_on_gpu

        copy_rows_on_gpu(sources, rows, targets, places, count)
        return
    widths = widths_of_parts(kinds_of_rows(sources), kinds_of_rows(targets))
    for source, target in zip(_parts(sources, widths), _parts(targets, widths), strict=True):
        chosen = (source if rows is None else source.index_select(0, rows)).reshape(count, *target.shape[1:])
        if places is None:
            target.copy_(chosen)
        else:
            target.index_copy_(0, places, chosen)


def _count(tensors: Sequence[torch.Tensor], chosen: torch.Tensor | None) -> int:
    """Rows that are read or written: chosen ones, or those of all tensors."""
    if chosen is not None:
        return chosen.shape[0]
    count = tensors[0].shape[0]
    if tensors[-1].shape[0] != count:
        raise ValueError(f"cannot copy rows of tensors with {count} and {tensors[-1].shape[0]} of them together")
    return count


def _parts(tensors: Sequence[torch.Tensor], widths: Sequence[int]) -> list[torch.Tensor]:
    """What is copied, apart."""
    return [*tensors] if len(tensors) == len(widths) else [*tensors[0].flatten(1).split(list(widths), dim=1)]
