"""Sum of rows: gradients that came home from several servers are added to those that are there.

On a GPU one Triton kernel reads and writes every element once; elsewhere the same in torch. The order is fixed, so
that the sum is the same bit by bit each time.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from distca_hf.kernels.interface import accumulation_dtype, has_fused_kernels


@dataclass(frozen=True, eq=False)
class RowSums:
    """Which rows are added to which. Within one part no row comes twice.

    Attributes:
        rows: `[shared]` rows that something is added to.
        own_rows, own_in_shared: `[own]` rows of the first part, and the place in `rows` that they are added to.
        returned_in_shared: `[returned]` the same of each returned row.
        parts: consecutive returned rows of each server; added by rank, after the first part.
    """

    rows: torch.Tensor
    own_rows: torch.Tensor
    own_in_shared: torch.Tensor
    returned_in_shared: torch.Tensor
    parts: tuple[slice, ...]

    @cached_property
    def order(self) -> torch.Tensor:
        """`[returned]` returned rows by the row they are added to, and by server."""
        return torch.argsort(self.returned_in_shared, stable=True)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """`[shared + 1]` where the returned rows of each row begin in `order`."""
        offsets = self.rows.new_zeros(len(self.rows) + 1)
        offsets.index_add_(0, self.returned_in_shared + 1, torch.ones_like(self.returned_in_shared))
        return offsets.cumsum(0)

    @cached_property
    def own_of_shared(self) -> torch.Tensor:
        """`[shared]` row of the first part, or -1."""
        own = torch.full_like(self.rows, -1)
        own[self.own_in_shared] = self.own_rows
        return own


def add_rows(target_RD: torch.Tensor, own_RD: torch.Tensor, returned_RD: torch.Tensor, sums: RowSums) -> None:
    """Adds own rows, then returned ones, to rows of `target`, in max(fp32, dtype); elements of a row follow each
    other."""
    if not len(sums.rows):
        return
    if has_fused_kernels(target_RD):
        from distca_hf.kernels.rows.add_triton import add_rows_on_gpu

        add_rows_on_gpu(target_RD, own_RD, returned_RD, sums.rows, sums.own_of_shared, sums.order, sums.offsets)
        return
    total = target_RD.index_select(0, sums.rows).to(accumulation_dtype(target_RD.dtype))
    total.index_add_(0, sums.own_in_shared, own_RD.index_select(0, sums.own_rows).to(total.dtype))
    for part in sums.parts:
        total.index_add_(0, sums.returned_in_shared[part], returned_RD[part].to(total.dtype))
    target_RD.index_copy_(0, sums.rows, total.to(target_RD.dtype))
