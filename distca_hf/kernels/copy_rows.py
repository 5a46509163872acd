"""Copies of rows: what leaves for other ranks is gathered, and what came from them is put where it is read.

On a GPU one Triton kernel copies whole rows of up to two tensors: torch's `index_copy_` reaches a third of the
memory's rate, and every operator costs the host more than the device.
"""

from collections.abc import Sequence

import torch


def copy_rows(
    sources: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    targets: Sequence[torch.Tensor],
    places: torch.Tensor | None,
) -> None:
    """Writes rows `rows` `[n]` of each source to rows `places` `[n]` of its target; None, for one of the two, means
    all of them in order. No place occurs twice. Rows may lie apart; elements of a row follow each other, in both.

    Raises:
        ValueError: there are more rows than places or fewer, or others: another shape or dtype; or neither is given.
    """
    for source, target in zip(sources, targets, strict=True):
        count, room = (source if rows is None else rows).shape[0], (target if places is None else places).shape[0]
        if count != room or source.dtype is not target.dtype or source.shape[1:] != target.shape[1:]:
            shapes = f"{(count, *source.shape[1:])} of {source.dtype} to {(room, *target.shape[1:])} of {target.dtype}"
            raise ValueError(f"cannot copy rows {shapes}")
    index = places if rows is None else rows
    if index is None:
        raise ValueError("neither rows nor places were given: copy whole tensors with copy_")
    if not index.shape[0]:
        return
    if targets[0].is_cuda:
        from distca_hf.kernels.copy_rows_triton import copy_rows_on_gpu

        copy_rows_on_gpu(sources, rows, targets, places, index)
        return
    for source, target in zip(sources, targets, strict=True):
        chosen = source if rows is None else source.index_select(0, rows)
        if places is None:
            target.copy_(chosen)
        else:
            target.index_copy_(0, places, chosen)
