"""The same attention again and again: how often all results are equal bit by bit."""

import torch

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan
from distca_hf.runtime.op import flash_attn
from support.parity import SPEC, live_plan


CPU = torch.device("cpu")


def equal_repeats(
    transport: Transport,
    layout: Layout,
    plan: Plan,
    config: DistCAConfig,
    num_chunks: int,
    widths: tuple[int, int, int],
    repeats: int,
    device: torch.device = CPU,
) -> int:
    """Repeats whose bf16 output, log-sum-exps and gradients on this rank are those of the first one, itself included.

    Args:
        widths: query heads, KV heads, head dimension.
    """
    live = live_plan(layout, transport, config, device, plan, num_chunks)
    tokens = live.kinds.num_rows
    generator = torch.Generator().manual_seed(transport.rank)
    heads, kv_heads, dim = widths
    q, k, v, dout = (
        torch.randn(tokens, number, dim, generator=generator).to(device, torch.bfloat16)
        for number in (heads, kv_heads, kv_heads, heads)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    first: list[torch.Tensor] | None = None
    equal = 0
    for _ in range(repeats):
        out, lse, *_ = flash_attn(*inputs, SPEC, live.handle)
        results = [out.detach(), lse, *torch.autograd.grad(out, inputs, dout)]
        first = results if first is None else first
        equal += all(torch.equal(now, before) for now, before in zip(results, first, strict=True))
    return equal
