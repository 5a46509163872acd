"""Views that cost the host little.

Each layer makes many views, and each costs microseconds. So one is made only where something is left out. All are made
by `as_strided`: kernel functions fill the processor's caches, and behind one a function of torch that was just used
takes half the time of another one.
"""

from collections.abc import Callable

import torch


def some_rows(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns `x[rows]`, or `x` itself if these are all rows."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else part(x, rows)


def part(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns `x[rows]`, of rows that there are."""
    strides = x.stride()
    first = x.storage_offset() + rows.start * strides[0]
    return x.as_strided((rows.stop - rows.start, *x.shape[1:]), strides, first)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Returns `x.t()` of `[rows, columns]`."""
    (rows, columns), (of_row, of_column) = x.shape, x.stride()
    return x.as_strided((columns, rows), (of_column, of_row))


def view_of(part: torch.Tensor, whole: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that gets tensors like `whole`, in shape and strides, and returns the part of each that
    `part` is of `whole`."""
    if part is whole:
        return lambda x: x
    shape, strides, first = part.shape, part.stride(), part.storage_offset() - whole.storage_offset()
    return lambda x: x.as_strided(shape, strides, x.storage_offset() + first)
