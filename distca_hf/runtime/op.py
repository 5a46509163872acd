"""The operator: core attention as one `torch.library` operator with an explicit backward.

Its name contains `flash_attn`, and its log-sum-exp is an output. So selective activation checkpointing (torch's own,
and TRL's by name) saves both outputs, and recomputation neither exchanges nor attends again. The number of kept rows
is an `unknown_size`, which lets `torch.compile` trace the operator without a graph break.

Shape legend in `kernels.interface`.
"""

from typing import Any, Protocol

import torch

from distca_hf.errors import UnsupportedAttentionError
from distca_hf.kernels.interface import AttentionSpec, empty_gradients, empty_layer_outputs, spec_of
from distca_hf.kernels.rows import sink_gradients
from distca_hf.runtime.attention import Attended, attend, attend_backward
from distca_hf.runtime.custom_op import SavedForBackward, define_op, kept_in_regions, noted_in_tiles
from distca_hf.runtime.live_plan import LivePlan, find_plan, newest_plans
from distca_hf.runtime.regions import current_run, retaining_run
from distca_hf.runtime.retention import Kept
from distca_hf.torch_private import compiles_cuda_graphs, unknown_size


# Output, log-sum-exp, and kept rows of other ranks: keys and values; queries, outputs and log-sum-exps; slot.
OpOutputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# Number of fields of an `AttentionSpec`.
NUM_SPEC_NUMBERS = len(AttentionSpec._fields)


class _Context(SavedForBackward, Protocol):
    spec: list[float]
    handle: int
    plan: LivePlan | None  # kept alive until backward
    trains_sinks: bool


def _flash_attn(
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGV: torch.Tensor,
    spec: list[float],
    handle: int,
    layer: torch.Tensor | None,
    needs_gradients: bool,
    sinks_N: torch.Tensor | None,
) -> OpOutputs:
    """Computes output, log-sum-exp `[T, N]`, and the received rows that are kept for backward (see `Kept`)."""
    plan, how, run = newest_plans.get(handle) or find_plan(handle), spec_of(*spec), current_run()
    if run is not None:
        run = retaining_run(run)
    call = plan.forward_pass.calls + 1
    try:
        if layer is not None:
            plan.forward_pass.check_open()
        received = run.region.take() if run is not None and run.recomputes else None
        out, lse, kept = attend(q_TNH, k_TGH, v_TGV, how, plan, received, sinks_N, needs_gradients)
    except Exception as error:
        if plan.posted is None or not plan.posted.runs_again(error):
            _add_place(error, plan, call, "forward")
            raise
        # Until the end of the step all collectives of the framework must continue unchanged.
        (out, lse), kept = empty_layer_outputs(q_TNH, v_TGV), plan.retention(how).nothing(k_TGH)
        out.zero_()
        lse.zero_()
    if run is not None and not run.recomputes:
        waits = plan.retention(how).waits_for_recomputation(q_TNH, k_TGH, v_TGV)
        run.region.keep(kept.received() if waits else None)
    plan.forward_pass.note_call(layer, needs_gradients)
    return out, lse, kept.keys, kept.remote_q, kept.remote_out, kept.remote_lse, kept.slot


def _shapes(q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor, *others: object) -> OpOutputs:
    """Returns empty outputs for compiled graphs, where the number of kept rows is unknown. Raises
    UnsupportedAttentionError if a GPU would record the graph."""
    if q_TNH.device.type != "cpu" and compiles_cuda_graphs():
        raise UnsupportedAttentionError(
            'a batch with a plan arrived in layers compiled for CUDA graphs (mode="reduce-overhead"): how many rows '
            "come from other ranks differs from batch to batch, and torch cannot record that. Compile layers in the "
            'default mode, layer.compile(), or in "max-autotune-no-cudagraphs"'
        )
    out, lse = empty_layer_outputs(q_TNH, v_TGV)

    def some(like: torch.Tensor, dimensions: int) -> torch.Tensor:
        return like.new_empty([unknown_size() for _ in range(dimensions)])

    return out, lse, some(k_TGH, 2), some(q_TNH, 3), some(q_TNH, 3), some(lse, 2), some(k_TGH, 2)


def _flash_attn_backward(
    dout_TNV: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGV: torch.Tensor,
    out_TNV: torch.Tensor,
    lse_TN: torch.Tensor,
    kept_keys: torch.Tensor,
    kept_q: torch.Tensor,
    kept_out: torch.Tensor,
    kept_lse: torch.Tensor,
    kept_slot: torch.Tensor,
    spec: list[float],
    handle: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes gradients of q, k and v.

    Args:
        spec: numbers of an `AttentionSpec`, and one more if there are sinks. Torch caches compiled graphs on disk by
            only their forward: with another argument here, cached graphs of an earlier version would no longer run.
    """
    plan = newest_plans.get(handle) or find_plan(handle)
    call = plan.forward_pass.backward_calls + 1
    attended = Attended(q_TNH, k_TGH, v_TGV, out_TNV, lse_TN)
    kept = Kept(kept_keys, kept_q, kept_out, kept_lse, kept_slot)
    numbers, has_sinks = spec[:NUM_SPEC_NUMBERS], len(spec) > NUM_SPEC_NUMBERS
    try:
        return attend_backward(dout_TNV, attended, kept, spec_of(*numbers), plan, has_sinks)
    except Exception as error:
        if plan.posted is not None and plan.posted.runs_again(error):
            return torch.zeros_like(q_TNH), torch.zeros_like(k_TGH), torch.zeros_like(v_TGV)
        _add_place(error, plan, call, "backward")
        raise


flash_attn_backward = define_op(_flash_attn_backward, empty_gradients)


def _save(ctx: _Context, inputs: tuple[Any, ...], output: OpOutputs) -> None:
    q, k, v, spec, handle, _, _, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, sinks)
    ctx.spec, ctx.handle = spec, handle
    ctx.trains_sinks = sinks is not None and sinks.requires_grad
    # A traced handle is a symbol.
    ctx.plan = newest_plans.get(handle) or find_plan(handle) if isinstance(handle, int) else None


def _backward(ctx: _Context, dout: torch.Tensor | None, *others: None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, keys, remote_q, remote_out, remote_lse, slot, sinks = ctx.saved_tensors
    kept = keys, remote_q, remote_out, remote_lse, slot
    spec = ctx.spec if sinks is None else [*ctx.spec, 1.0]
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    gradients = flash_attn_backward(dout, q, k, v, out, lse, *kept, spec, ctx.handle)
    return *gradients, *[None] * 4, sink_gradients(dout, out, lse, sinks) if ctx.trains_sinks else None


_planned = noted_in_tiles(define_op(kept_in_regions(_flash_attn), _shapes, _backward, _save))


def flash_attn(
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGV: torch.Tensor,
    spec: AttentionSpec,
    handle: int,
    layer: torch.Tensor | None = None,
    sinks_N: torch.Tensor | None = None,
) -> OpOutputs:
    """Returns the operator's outputs, the first one differentiable. Raises UnsupportedAttentionError if no kernel
    supports this; names the option.

    Args:
        handle: number of the live plan, by which the operator finds it.
        layer: number of the layer, on the host. It is a tensor because `torch.compile` makes a graph for each value of
            a number attribute, but one for all tensors.
        sinks_N: scores of the heads' sinks, differentiable.
    """
    needs_gradients = torch.is_grad_enabled() and (
        q_TNH.requires_grad
        or k_TGH.requires_grad
        or v_TGV.requires_grad
        or (sinks_N is not None and sinks_N.requires_grad)
    )
    return _planned(q_TNH, k_TGH, v_TGV, [*spec], handle, layer, needs_gradients, sinks_N)


def _add_place(error: Exception, plan: LivePlan, call: int, phase: str) -> None:
    error.add_note(
        f"distca: {plan.transport.grid.name}, micro-batch {plan.micro_batch}, {phase} call {call} of attention"
    )
