"""Scatter of rows: what came from other ranks is put where it is read.

On a GPU one Triton kernel copies whole rows: torch's `index_copy_` reaches a third of the memory's rate.
"""

import torch

from distca_hf.kernels.interface import has_fused_kernels


def scatter_rows(target: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes `rows` `[n, ...]` to rows `places` `[n]` of `target`, none of them twice. Rows may lie apart; what is
    within a row follows each other."""
    if not len(places):
        return
    if has_fused_kernels(target):
        from distca_hf.kernels.scatter_rows_triton import scatter_rows_on_gpu

        scatter_rows_on_gpu(target.view(len(target), -1), places, rows.view(len(rows), -1))
        return
    target.index_copy_(0, places, rows)
