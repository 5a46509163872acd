"""Views: parts of tensors, made only where something is left out. Each costs the host some microseconds, in every
layer."""

import torch


def some_rows(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """`x[rows]`, or `x` itself if these are all rows."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else x[rows]
