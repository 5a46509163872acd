"""bf16: prefixes attended apart and in chunks, and sums of parts, are at most twice as wrong as bf16 attention is."""

import random

import pytest
import torch

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.layout import Layout
from distca_hf.placement.place import place
from distca_hf.planning.plan import plan_in_place
from distca_hf.runtime.op import flash_attn
from distca_hf.testing import attend_documents, rows_of_rank, run_ranks
from support.layouts import padding_rows, random_plan
from support.parity import SCALE, SPEC, live_plan


NUM_RANKS = 4
LENGTHS = [1000, 300, 90, 90, 90, 30]
HEADS, KV_HEADS, DIM = 8, 4, 32
NAMES = "output", "query gradient", "key gradient", "value gradient"

Tensors = list[torch.Tensor]


def _attend_whole(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Output and gradients of unsplit attention in `dtype`; `tensors` are q, k, v and the output's gradient."""
    *inputs, dout = (x.to(dtype) for x in tensors)
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = attend_documents(*inputs, LENGTHS, SCALE)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def _mean_square_error(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.double() - right.double()).square().mean())


@pytest.mark.parametrize("num_chunks", [1, 4])
@pytest.mark.parametrize("kind", ["placed", "queries move"])
def test_error_is_at_most_twice_that_of_whole_attention_in_bf16(kind: str, num_chunks: int) -> None:
    layout: Layout = place(LENGTHS, NUM_RANKS)
    moved = kind == "queries move"
    plan = random_plan(random.Random(3), layout, KV_HEADS) if moved else plan_in_place(layout, KV_HEADS)
    generator = torch.Generator().manual_seed(0)
    widths = HEADS, KV_HEADS, KV_HEADS, HEADS
    tensors = [torch.randn(sum(LENGTHS), heads, DIM, generator=generator).bfloat16() for heads in widths]
    exact, half = _attend_whole(tensors, torch.float64), _attend_whole(tensors, torch.bfloat16)

    def run(transport: Transport) -> Tensors:
        live = live_plan(layout, transport, DistCAConfig(), plan=plan, num_chunks=num_chunks)
        rows, padding = rows_of_rank(layout, transport.rank), int(padding_rows(layout)[transport.rank])
        *inputs, dout = (torch.cat([x[rows], x.new_zeros((padding, *x.shape[1:]))]) for x in tensors)
        inputs = [x.requires_grad_() for x in inputs]
        out, *_ = flash_attn(*inputs, SPEC, live.handle)
        return [x[: len(rows)].detach() for x in (out, *torch.autograd.grad(out, inputs, dout))]

    parts = run_ranks(NUM_RANKS, run)
    rows = torch.cat([torch.as_tensor(rows_of_rank(layout, rank)) for rank in range(NUM_RANKS)])
    for at, name in enumerate(NAMES):
        ours = torch.cat([part[at] for part in parts])
        error, allowed = _mean_square_error(ours, exact[at][rows]), _mean_square_error(half[at][rows], exact[at][rows])
        assert 0 < error <= 2**2 * allowed, name
