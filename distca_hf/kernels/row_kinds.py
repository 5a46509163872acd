"""Kinds of rows, and views of some rows of a tensor.

A function of `kernels.rows` that is prepared for some tensors knows the kind of their rows. Each layer makes many
views, and each costs microseconds. So one is made only where something is left out. All are made by `as_strided`:
kernel functions fill the processor's caches, and after one a function of torch that was just used takes half the time
of another one.
"""

from collections.abc import Callable, Sequence

import torch


# Functions that `kernels.rows` prepares for tensors of one device, dtype, shape and strides.
# Of sources and targets:
CopyRows = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
# Of the target, own and returned rows:
AddRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
# Of outputs and log-sum-exps, and of those over other keys:
MergeRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

# Shape of one row of a tensor, strides of the tensor, dtype: alike from layer to layer and from batch to batch.
KindOfRows = tuple[torch.Size, tuple[int, ...], torch.dtype]


def kinds_of_rows(tensors: Sequence[torch.Tensor]) -> tuple[KindOfRows, ...]:
    """Returns the kind of each tensor's rows."""
    return tuple([(x.shape[1:], x.stride(), x.dtype) for x in tensors])


def widths_of_parts(sources: Sequence[KindOfRows], targets: Sequence[KindOfRows]) -> list[int]:
    """Returns the elements of a row of each tensor that is copied.

    Raises:
        ValueError: rows of sources and targets are not the same.
    """
    rows, places = ([shape for shape, *_ in kinds] for kinds in (sources, targets))
    widths, room = ([shape.numel() for shape in shapes] for shapes in (rows, places))
    same = rows == places if len(rows) == len(places) else sum(widths) == sum(room)
    if not same or len({dtype for *_, dtype in (*sources, *targets)}) > 1:
        words = (" and ".join(f"{tuple(row)} of {dtype}" for row, _, dtype in kinds) for kinds in (sources, targets))
        raise ValueError(f"cannot copy rows {' to '.join(words)}")
    return max(widths, room, key=len)


def some_rows(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns `x[rows]`, or `x` itself if these are all rows."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else part(x, rows)


def part(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns `x[rows]`, of rows that there are."""
    strides = x.stride()
    first = x.storage_offset() + rows.start * strides[0]
    return x.as_strided((rows.stop - rows.start, *x.shape[1:]), strides, first)
