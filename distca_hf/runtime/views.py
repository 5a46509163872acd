"""Views: parts of tensors, made only where something is left out. Each costs the host microseconds in every layer.

All are made by `as_strided`: between kernel functions, which fill the processor's caches, the second use of any of
torch's functions takes half the time of the first use of another one.
"""

import torch


def some_rows(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """`x[rows]`, or `x` itself if these are all rows."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else part(x, rows)


def part(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """`x[rows]` of rows that there are."""
    strides = x.stride()
    first = x.storage_offset() + rows.start * strides[0]
    return x.as_strided((rows.stop - rows.start, *x.shape[1:]), strides, first)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """`x.t()` of `[rows, columns]`."""
    (rows, columns), (of_row, of_column) = x.shape, x.stride()
    return x.as_strided((columns, rows), (of_column, of_row))
