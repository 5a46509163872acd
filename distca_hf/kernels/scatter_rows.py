"""Scatter of rows: what came from other ranks is put where it is read.

On a GPU one Triton kernel copies whole rows: torch's `index_copy_` reaches a third of the memory's rate.
"""

import torch


def scatter_rows(target: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes `rows` `[n, ...]` to rows `places` `[n]` of `target`; no place occurs twice. Rows may lie apart; elements
    of a row are contiguous, in both.

    Raises:
        ValueError: there are more rows than places or fewer, or another dtype.
    """
    if rows.dtype != target.dtype or len(rows) != len(places):
        raise ValueError(f"{len(rows)} rows of {rows.dtype} for {len(places)} places of {target.dtype}")
    if not len(places):
        return
    if target.is_cuda:
        from distca_hf.kernels.scatter_rows_triton import scatter_rows_on_gpu

        scatter_rows_on_gpu(target.view(len(target), -1), places, rows.view(len(rows), -1))
        return
    target.index_copy_(0, places, rows)
