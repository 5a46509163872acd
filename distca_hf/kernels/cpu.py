"""Torch's flash attention for CPUs, behind `kernels.interface.Kernel`.

It runs once per task, or twice for a causal task with more keys than queries. Operators:
`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward.

    keys    0 ........ prefix ....... end      The kernel's causal mask is aligned top-left, so it is only used where
    queries | no mask  | square, causal |      queries and keys are equally many. The prefix is attended without mask.
                                               Both parts are merged by their log-sum-exps.

Shape legend in `kernels.interface`.
"""

from collections.abc import Iterator

import torch

from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Outputs, Room, Saved, Spans
from distca_hf.torch_private import CPU_GROUPS_HEADS


class CpuKernel:
    """Torch's flash attention for CPUs over the tasks of a call."""

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        q_TNH, k_SGH, v_SGV = inputs
        out_TNV, lse_NT = room.made(inputs)
        attend, scale = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, spec.scale
        for rows, prefix, square in _tasks(spans, spec.causal):
            if rows.stop == rows.start:
                continue
            q = _batch(q_TNH[rows])
            k, v = _for_heads(q, k_SGH[square]), _for_heads(q, v_SGV[square])
            out, lse = attend(q, k, v, 0.0, spec.causal, scale=scale)
            if prefix.stop > prefix.start:
                k, v = _for_heads(q, k_SGH[prefix]), _for_heads(q, v_SGV[prefix])
                prefix_out, prefix_lse = attend(q, k, v, 0.0, False, scale=scale)
                total = torch.logaddexp(lse, prefix_lse)
                share, prefix_share = (x.sub(total).exp().unsqueeze(-1) for x in (lse, prefix_lse))
                out, lse = share * out + prefix_share * prefix_out, total
            out_TNV[rows] = out[0].transpose(0, 1).to(out_TNV.dtype)
            lse_NT[:, rows] = lse[0]
        return out_TNV, lse_NT

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        derive = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        q_TNH, k_SGH, v_SGV, out_TNV, lse_NT = saved
        dq_TNH, dk_SGH, dv_SGV = gradients
        for rows, prefix, square in _tasks(spans, spec.causal):
            if rows.stop == rows.start:  # keys without queries
                for keys in (prefix, square):
                    dk_SGH[keys], dv_SGV[keys] = 0, 0
                continue
            # Output and log-sum-exp of the whole row make each part's gradients parts of the whole.
            dout, q, out = _batch(dout_TNV[rows]), _batch(q_TNH[rows]), _batch(out_TNV[rows])
            lse = lse_NT[:, rows].unsqueeze(0).contiguous()
            parts = ((square, spec.causal), *([(prefix, False)] if prefix.stop > prefix.start else []))
            dq_parts = []
            for keys, causal in parts:
                k, v = _for_heads(q, k_SGH[keys]), _for_heads(q, v_SGV[keys])
                dq, dk, dv = derive(dout, q, k, v, out, lse, 0.0, causal, scale=spec.scale)
                dq_parts.append(dq[0].transpose(0, 1))
                dk_SGH[keys] = _of_groups(dk, k_SGH.shape[1])
                dv_SGV[keys] = _of_groups(dv, k_SGH.shape[1])
            dq_TNH[rows] = dq_parts[0] if len(dq_parts) == 1 else dq_parts[0] + dq_parts[1]


def _tasks(spans: Spans, causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Yields query rows, key rows before the causal square, and key rows of the square: all of them without a mask."""
    for task in range(len(spans.queries) - 1):
        start, stop = spans.queries[task], spans.queries[task + 1]
        key_start, key_stop = spans.keys[task], spans.keys[task + 1]
        border = key_stop - (stop - start) if causal else key_start
        yield slice(start, stop), slice(key_start, border), slice(border, key_stop)


def _for_heads(q_BNTH: torch.Tensor, x_SGD: torch.Tensor) -> torch.Tensor:
    """Returns keys or values as `_batch`; a copy for each query head `[1, N, S, D]` if torch's operator needs it."""
    x_BGSD = _batch(x_SGD)
    heads, groups = q_BNTH.shape[1], x_BGSD.shape[1]
    return x_BGSD if CPU_GROUPS_HEADS or heads == groups else x_BGSD.repeat_interleave(heads // groups, dim=1)


def _of_groups(dx_BNSD: torch.Tensor, groups: int) -> torch.Tensor:
    """Returns gradients `[S, G, D]` of keys or values: sums over the query heads of a group, if each had a copy."""
    dx_GSD = dx_BNSD[0] if dx_BNSD.shape[1] == groups else dx_BNSD[0].unflatten(0, (groups, -1)).sum(1)
    return dx_GSD.transpose(0, 1)


def _batch(x_TND: torch.Tensor) -> torch.Tensor:
    """Returns `[T, N, D]` as `[1, N, T, D]`, without a copy where elements of a row follow each other. Torch's
    operators for CPUs take that for granted. Hooks of saved tensors may bring one back that lies otherwise."""
    rows = x_TND if x_TND.stride(2) == 1 else x_TND.contiguous()
    return rows.transpose(0, 1).unsqueeze(0)
