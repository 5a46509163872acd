"""Rows: copied by an index, added by an index, merged by log-sum-exps, and completed by sinks.

`copy_rows` and `merge_rows` inspect their tensors in each call, which takes the host longer than the device needs.
`prepare_copy`, `prepare_add` and `prepare_merge` inspect them once, and return a function for all tensors of the same
device, dtypes, shapes and strides. It does not check: with other tensors a GPU would write to wrong places.

A sink is a learned score for each head, without a key and a value. It is one more term of every row's softmax.

    lse' = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse')

Kernels know nothing of sinks. A row's owner rank adds them once its output and log-sum-exp are complete, after all
parts are merged. Backward needs nothing else: kernels read out' and lse', and derive their part of the whole. The
gradient of sinks needs no kernel.

On a GPU, one Triton kernel does each of these, and reads and writes every element once (`kernels.rows_triton`).
Elsewhere torch does the same step by step. Shape legend in `kernels.interface`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from distca_hf.kernels.interface import (
    AddRows,
    CopyRows,
    MergeRows,
    accumulation_dtype,
    has_fused_kernels,
    kinds_of_rows,
    widths_of_parts,
)


def copy_rows(
    sources: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    targets: Sequence[torch.Tensor],
    places: torch.Tensor | None,
) -> None:
    """Copies rows of one or two tensors. Two tensors on one side may be one on the other, with rows side by side.

    Args:
        sources, targets: need not be contiguous, but the elements of a row must be.
        rows: int64 `[n]`, rows of the sources to read; None for all in order.
        places: int64 `[n]`, rows of the targets to write, none of them twice; None for all in order.

    Raises:
        ValueError: rows and places are not equally many; rows of sources and targets differ in shape (side by side:
            in width) or dtype; or neither rows nor places are given.
    """
    prepare_copy(sources, rows, targets, places)(sources, targets)


def prepare_copy(
    sources: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    targets: Sequence[torch.Tensor],
    places: torch.Tensor | None,
) -> CopyRows:
    """Returns a function that does `copy_rows` with these rows and places, on tensors like these. Raises the errors of
    `copy_rows`."""
    if rows is None and places is None:
        raise ValueError("neither rows nor places were given: copy whole tensors with copy_")
    count = _num_rows(sources, rows)
    if count != _num_rows(targets, places):
        raise ValueError(f"cannot copy {count} rows to {_num_rows(targets, places)} places")
    if targets[0].is_cuda:
        from distca_hf.kernels.rows_triton import prepare_copy_on_gpu

        return prepare_copy_on_gpu(sources, rows, targets, places, count)
    # On a CPU each part is copied by itself: keys into the left columns of rows, values into the right ones.
    widths = widths_of_parts(kinds_of_rows(sources), kinds_of_rows(targets))

    def copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        for source, target in zip(_parts(sources, widths), _parts(targets, widths), strict=True):
            chosen = (source if rows is None else source.index_select(0, rows)).reshape(count, *target.shape[1:])
            if places is None:
                target.copy_(chosen)
            else:
                target.index_copy_(0, places, chosen)

    return copy


def _num_rows(tensors: Sequence[torch.Tensor], chosen: torch.Tensor | None) -> int:
    """Returns how many rows are read or written: the chosen ones, or the rows of all tensors."""
    if chosen is not None:
        return chosen.shape[0]
    count = tensors[0].shape[0]
    if tensors[-1].shape[0] != count:
        raise ValueError(f"cannot copy rows of two tensors together that have {count} and {tensors[-1].shape[0]} rows")
    return count


def _parts(tensors: Sequence[torch.Tensor], widths: Sequence[int]) -> list[torch.Tensor]:
    """Returns the tensors to copy, separated if they are side by side."""
    return [*tensors] if len(tensors) == len(widths) else [*tensors[0].flatten(1).split(list(widths), dim=1)]


@dataclass(frozen=True, eq=False)
class RowSums:
    """Which rows to add to which. No row occurs twice within one part."""

    rows: torch.Tensor  # `[shared]` rows to add to
    # `[own]` rows of the first part, and the places in `rows` to add them to.
    own_rows: torch.Tensor
    own_in_shared: torch.Tensor
    returned_in_shared: torch.Tensor  # `[returned]` the place in `rows` to add each returned row to
    parts: tuple[slice, ...]  # consecutive returned rows of each rank; added by rank, after the first part

    @cached_property
    def order(self) -> torch.Tensor:
        """`[returned]` returned rows, sorted by the row they are added to, then by rank."""
        return torch.argsort(self.returned_in_shared, stable=True)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """`[shared + 1]` beginnings in `order` of the returned rows of each row."""
        offsets = self.rows.new_zeros(len(self.rows) + 1)
        offsets.index_add_(0, self.returned_in_shared + 1, torch.ones_like(self.returned_in_shared))
        return offsets.cumsum(0)

    @cached_property
    def own_of_shared(self) -> torch.Tensor:
        """`[shared]` row of the first part, or -1."""
        own = torch.full_like(self.rows, -1)
        own[self.own_in_shared] = self.own_rows
        return own


def prepare_add(target: torch.Tensor, own: torch.Tensor, returned: torch.Tensor, sums: RowSums) -> AddRows:
    """Returns a function of tensors like these that adds own rows, then returned ones, to rows of `target`, in
    max(fp32, dtype). All are `[rows, ...]` with rows of one shape. They need not be contiguous, but each row must be.
    Raises ValueError if a row on a GPU is not contiguous."""
    if not sums.rows.shape[0]:
        return lambda target, own, returned: None
    if has_fused_kernels(target):
        from distca_hf.kernels.rows_triton import prepare_add_on_gpu

        return prepare_add_on_gpu(target, own, returned, (sums.rows, sums.own_of_shared, sums.order, sums.offsets))

    def add(target: torch.Tensor, own: torch.Tensor, returned: torch.Tensor) -> None:
        # A fixed order, rank by rank: sums are bit-equal from run to run.
        total = target.index_select(0, sums.rows).to(accumulation_dtype(target.dtype))
        total.index_add_(0, sums.own_in_shared, own.index_select(0, sums.own_rows).to(total.dtype))
        for part in sums.parts:
            total.index_add_(0, sums.returned_in_shared[part], returned[part].to(total.dtype))
        target.index_copy_(0, sums.rows, total.to(target.dtype))

    return add


def merge_rows(
    out_TNV: torch.Tensor,
    lse_TN: torch.Tensor,
    other_out_RNV: torch.Tensor,
    other_lse_NR: torch.Tensor,
    start: int = 0,
) -> None:
    """Adds attention over other keys, for R rows from `start` on, to `out_TNV` and `lse_TN` in place. Sums are in the
    dtype of the log-sum-exps: max(fp32, dtype).

    Each row of outputs must be contiguous, and each head's rows of `other_lse_NR`, as kernels return it.

    Raises:
        ValueError: there are fewer rows to add to.
    """
    prepare_merge(out_TNV, lse_TN, other_out_RNV, other_lse_NR, start)(out_TNV, lse_TN, other_out_RNV, other_lse_NR)


def prepare_merge(
    out_TNV: torch.Tensor, lse_TN: torch.Tensor, other_out_RNV: torch.Tensor, other_lse_NR: torch.Tensor, start: int
) -> MergeRows:
    """Returns a function that does `merge_rows` from row `start` on, on tensors like these. Raises the errors of
    `merge_rows`."""
    stop = start + other_out_RNV.shape[0]
    if stop > out_TNV.shape[0]:
        raise ValueError(f"cannot add attention of rows {start} to {stop} to that of {out_TNV.shape[0]} rows")
    if has_fused_kernels(out_TNV):
        from distca_hf.kernels.rows_triton import prepare_merge_on_gpu

        return prepare_merge_on_gpu(out_TNV, lse_TN, other_out_RNV, other_lse_NR, start)

    def merge(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse_NR: torch.Tensor) -> None:
        # Shares of both in the softmax over all keys: exp(lse - total) and exp(other - total), which add up to one.
        out, lse, other_lse = out[start:stop], lse[start:stop], other_lse_NR.t()
        total = torch.logaddexp(lse, other_lse)
        share, other_share = (x.sub(total).exp().unsqueeze(-1) for x in (lse, other_lse))
        out.copy_(share * out + other_share * other_out)
        lse.copy_(total)

    return merge


def add_sinks(out_TNV: torch.Tensor, lse_TN: torch.Tensor, sinks_N: torch.Tensor) -> None:
    """Adds sinks, in any floating dtype, to complete rows in place. Sums are in the dtype of log-sum-exps."""
    total_TN = torch.logaddexp(lse_TN, sinks_N.to(lse_TN.dtype))
    scale_rows(out_TNV, lse_TN, total_TN, out_TNV)
    lse_TN.copy_(total_TN)


def scale_rows(out_TNV: torch.Tensor, lse_TN: torch.Tensor, total_TN: torch.Tensor, target_TNV: torch.Tensor) -> None:
    """Writes outputs as parts of a softmax with more terms: out * exp(lse - total).

    Args:
        lse_TN, total_TN: log-sum-exps without these terms and with them, fp32 or fp64.
        target_TNV: receives the outputs; may be `out_TNV`.
    """
    if has_fused_kernels(out_TNV):
        from distca_hf.kernels.rows_triton import scale_rows_on_gpu

        scale_rows_on_gpu(out_TNV, lse_TN, total_TN, target_TNV)
        return
    target_TNV.copy_(out_TNV * (lse_TN - total_TN).exp().unsqueeze(-1))


def sink_gradients(
    dout_TNV: torch.Tensor, out_TNV: torch.Tensor, lse_TN: torch.Tensor, sinks_N: torch.Tensor
) -> torch.Tensor:
    """Returns `[N]` gradients of sinks, whichever kernels attended.

    A sink has no value. Its share of a row, exp(sink - lse), only reduces the output: by out * share for each unit of
    its score. Output and log-sum-exp are of whole rows, with sinks, so each row counts once.

    Raises:
        NotImplementedError: autograd records this (`create_graph`). It would miss the part of the log-sum-exps.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError("gradients of sinks cannot be differentiated: no gradients of gradients")
    # A row that is not a token has a log-sum-exp of 0 and no output: an infinite share would make it NaN.
    share_TN = (sinks_N.to(lse_TN.dtype) - lse_TN).clamp(max=0).exp()
    if has_fused_kernels(dout_TNV):
        from distca_hf.kernels.rows_triton import dot_rows_on_gpu

        # Hooks of saved tensors may return outputs with other strides.
        products_TN = dot_rows_on_gpu(dout_TNV.contiguous(), out_TNV.contiguous())
    else:
        products_TN = (dout_TNV.to(lse_TN.dtype) * out_TNV.to(lse_TN.dtype)).sum(-1)
    return -(share_TN * products_TN).sum(0).to(sinks_N.dtype)
