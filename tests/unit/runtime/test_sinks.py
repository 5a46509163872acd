"""Sinks and softcap through the operators: over ranks, head groups and chunks as in one plain softmax."""

import random
from functools import partial

import pytest
import torch

from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.config import DistCAConfig, KernelName
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.kernels.interface import AttentionSpec, Spans
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.runtime.local_attention import Documents, flash_attn_local
from distca_hf.runtime.op import flash_attn
from distca_hf.testing import rows_of_rank, run_ranks
from support.layouts import random_layout, random_plan
from support.parity import live_plan


HEADS, KV_HEADS, DIM = 6, 3, 4
SPEC = AttentionSpec(0.4, softcap=0.7)


def tensors(layout: Layout) -> list[torch.Tensor]:
    """Queries, keys, values, sinks and output gradients of all documents, one after the other."""
    generator = torch.Generator().manual_seed(0)
    tokens = int(layout.document_tokens.sum())
    shapes = [(tokens, HEADS, DIM), (tokens, KV_HEADS, DIM), (tokens, KV_HEADS, DIM), (HEADS,), (tokens, HEADS, DIM)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def expected(layout: Layout, softcap: float = SPEC.softcap) -> list[torch.Tensor]:
    """Output, and gradients of queries, keys, values and sinks, from a softmax with one more column."""
    *inputs, dout = tensors(layout)
    q, k, v, sinks = (x.requires_grad_() for x in inputs)
    outputs, start = [], 0
    for tokens in layout.document_tokens.tolist():
        rows, start = slice(start, start + tokens), start + tokens
        keys, values = (x[rows].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("tnh,snh->nts", q[rows], keys) * SPEC.scale
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), float("-inf"))
        column = sinks[:, None, None].expand(-1, tokens, 1)
        shares = torch.cat([scores, column], dim=2).softmax(-1)[:, :, :-1]
        outputs.append(torch.einsum("nts,snv->tnv", shares, values))
    out = torch.cat(outputs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), dout)]


def of_rank(
    transport: Transport, plan: Plan, num_chunks: int = 1, spec: AttentionSpec = SPEC, kernel: KernelName = "reference"
) -> list[torch.Tensor]:
    """The same results of one rank, the last one its part of the sum."""
    layout, rank = plan.layout, transport.rank
    live = live_plan(layout, transport, DistCAConfig(kernel=kernel), plan=plan, num_chunks=num_chunks)
    *of_tokens, sinks, dout = tensors(layout)
    rows, padding = rows_of_rank(layout, rank), int(layout.padding_rows[rank])
    *held, dout = (torch.cat([x[rows], x.new_zeros(padding, *x.shape[1:])]) for x in (*of_tokens, dout))
    inputs = [x.requires_grad_() for x in (*held, sinks)]
    out, *_ = flash_attn(*inputs[:3], spec, live.handle, sinks_N=sinks)
    *gradients, of_sinks = torch.autograd.grad(out, inputs, dout)
    return [*(x.detach()[: len(rows)] for x in (out, *gradients)), of_sinks]


@pytest.mark.parametrize("softcap", [0.0, SPEC.softcap])
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_sinks_count_once_on_all_ranks_together(num_ranks: int, num_chunks: int, softcap: float) -> None:
    """With "auto", and no softcap, another kernel than that of forward computes backward: it reads log-sum-exps."""
    plan, spec = plan_in_place(random_layout(random.Random(num_ranks), num_ranks)), SPEC._replace(softcap=softcap)
    of_ranks = run_ranks(num_ranks, partial(of_rank, plan=plan, num_chunks=num_chunks, spec=spec, kernel="auto"))

    *whole, of_sinks = expected(plan.layout, softcap)
    for rank, results in enumerate(of_ranks):
        rows = rows_of_rank(plan.layout, rank)
        torch.testing.assert_close(results[:-1], [x[rows] for x in whole], rtol=0, atol=1e-10)
    torch.testing.assert_close(sum(results[-1] for results in of_ranks), of_sinks, rtol=0, atol=1e-10)


def test_sinks_are_refused_where_queries_move() -> None:
    rng = random.Random(3)
    plan = random_plan(rng, random_layout(rng, 2))
    assert plan.pieces.moved.any()

    with pytest.raises(UnsupportedAttentionError, match="sinks of 6 heads are not computed where queries move"):
        run_ranks(2, partial(of_rank, plan=plan))


@pytest.mark.parametrize("compiled", [False, True])
def test_local_attention_takes_sinks(compiled: bool) -> None:
    layout = Layout.from_packs([[5, 3]])
    *inputs, dout = tensors(layout)
    inputs = [x.requires_grad_() for x in inputs]
    offsets = torch.tensor([0, 5, 8], dtype=torch.int32)
    documents = Documents.of(Spans(offsets, offsets, 5, 5))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return flash_attn_local(q, k, v, documents, SPEC, "reference", sinks)[0]

    out = (torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend)(*inputs)
    results = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    torch.testing.assert_close(results, expected(layout), rtol=0, atol=1e-10)


def test_sinks_alone_may_need_gradients() -> None:
    layout = Layout.from_packs([[5, 3]])
    live = live_plan(layout, LocalTransport(), DistCAConfig(kernel="reference"))
    *of_tokens, sinks, dout = tensors(layout)
    out, *_ = flash_attn(*of_tokens, SPEC, live.handle, sinks_N=sinks.requires_grad_())

    [of_sinks] = torch.autograd.grad(out, [sinks], dout)
    torch.testing.assert_close(of_sinks, expected(layout)[-1], rtol=0, atol=1e-10)


def test_rows_that_are_no_tokens_leave_gradients_of_large_sinks_finite() -> None:
    """Their log-sum-exps are 0, and exp(100) is more than fp32 holds."""
    *inputs, dout = (x.float() for x in tensors(Layout.from_packs([[5, 3]])))
    q, k, v, sinks = inputs[0], inputs[1], inputs[2], torch.full((HEADS,), 100.0, requires_grad=True)
    rows, offsets = torch.arange(1, 8), torch.tensor([0, 4, 7], dtype=torch.int32)
    out, _ = flash_attn_local(
        q, k, v, Documents.of(Spans(offsets, offsets, 4, 4), rows, rows), SPEC, "reference", sinks
    )

    assert torch.autograd.grad(out, sinks, dout)[0].isfinite().all()


@pytest.mark.parametrize("planned", [True, False])
def test_gradients_of_gradients_of_sinks_are_refused(planned: bool) -> None:
    """They would miss a part without a word: log-sum-exps are not differentiable."""
    *of_tokens, sinks, _ = tensors(Layout.from_packs([[5, 3]]))
    sinks.requires_grad_()
    if planned:
        live = live_plan(Layout.from_segments([5, 3], [[(0, 0, 5), (1, 0, 3)]]), LocalTransport(), DistCAConfig())
        out, *_ = flash_attn(*of_tokens, SPEC, live.handle, sinks_N=sinks)
    else:
        offsets = torch.tensor([0, 5, 8], dtype=torch.int32)
        out, _ = flash_attn_local(*of_tokens, Documents.of(Spans(offsets, offsets, 5, 5)), SPEC, "reference", sinks)

    with pytest.raises(NotImplementedError, match="no gradients of gradients"):
        torch.autograd.grad(out.square().sum(), sinks, create_graph=True)
