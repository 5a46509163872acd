"""Kinds of rows: what tensors whose rows are copied have in common, from layer to layer and from batch to batch."""

from collections.abc import Sequence

import torch


# Shape of one row of a tensor, strides of the tensor, dtype.
KindOfRows = tuple[torch.Size, tuple[int, ...], torch.dtype]


def kinds_of_rows(tensors: Sequence[torch.Tensor]) -> tuple[KindOfRows, ...]:
    """What a kernel is made for."""
    return tuple([(x.shape[1:], x.stride(), x.dtype) for x in tensors])


def widths_of_parts(sources: Sequence[KindOfRows], targets: Sequence[KindOfRows]) -> list[int]:
    """Elements of a row of each tensor that is copied.

    Raises:
        ValueError: rows of sources and targets are not the same.
    """
    rows, places = ([shape for shape, *_ in kinds] for kinds in (sources, targets))
    widths, room = ([shape.numel() for shape in shapes] for shapes in (rows, places))
    same = rows == places if len(rows) == len(places) else sum(widths) == sum(room)
    if not same or len({dtype for *_, dtype in (*sources, *targets)}) > 1:
        told = (" and ".join(f"{tuple(row)} of {dtype}" for row, _, dtype in kinds) for kinds in (sources, targets))
        raise ValueError(f"cannot copy rows {' to '.join(told)}")
    return max(widths, room, key=len)
