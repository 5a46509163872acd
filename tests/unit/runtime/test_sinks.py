"""Sinks and softcap through the operators; over several ranks in `tests/property/test_sink_parity.py`."""

import pytest
import torch

from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.kernels.interface import AttentionSpec, Spans
from distca_hf.layout import Layout
from distca_hf.runtime.local_attention import Documents, flash_attn_local
from distca_hf.runtime.op import flash_attn
from distca_hf.testing import attend_documents
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
    """Output, and gradients of queries, keys, values and sinks."""
    *inputs, dout = tensors(layout)
    q, k, v, sinks = (x.requires_grad_() for x in inputs)
    out = attend_documents(q, k, v, layout.document_tokens.tolist(), SPEC.scale, softcap=softcap, sinks_N=sinks)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), dout)]


@pytest.mark.parametrize("compiled", [False, True])
def test_local_attention_takes_sinks(compiled: bool) -> None:
    layout = Layout.from_packs([[5, 3]])
    *inputs, dout = tensors(layout)
    inputs = [x.requires_grad_() for x in inputs]
    offsets = torch.tensor([0, 5, 8], dtype=torch.int32)
    documents = Documents.of(Spans(offsets, offsets, 5, 5))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return flash_attn_local(q, k, v, documents, SPEC, "auto", sinks)[0]

    out = (torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend)(*inputs)
    results = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    torch.testing.assert_close(results, expected(layout), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_sinks", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_may_be_of_another_dtype(dtype: torch.dtype, of_sinks: torch.dtype) -> None:
    """Results are in the tensors' own, the gradient of sinks in theirs."""
    layout = Layout.from_packs([[5, 3]])
    *of_tokens, sinks, dout = tensors(layout)
    inputs = [*(x.to(dtype).requires_grad_() for x in of_tokens), sinks.to(of_sinks).requires_grad_()]
    offsets = torch.tensor([0, 5, 8], dtype=torch.int32)
    documents = Documents.of(Spans(offsets, offsets, 5, 5))
    out, _ = flash_attn_local(*inputs[:3], documents, SPEC, "auto", inputs[3])
    results = [out.detach(), *torch.autograd.grad(out, inputs, dout.to(dtype))]

    assert [x.dtype for x in results] == [dtype] * 4 + [of_sinks]
    tolerance = 1e-5 if dtype == of_sinks == torch.float32 else 0.1
    for got, right in zip(results, expected(layout), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=0, atol=tolerance)


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
    out, _ = flash_attn_local(q, k, v, Documents.of(Spans(offsets, offsets, 4, 4), rows, rows), SPEC, "auto", sinks)

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
        out, _ = flash_attn_local(*of_tokens, Documents.of(Spans(offsets, offsets, 5, 5)), SPEC, "auto", sinks)

    with pytest.raises(NotImplementedError, match="no gradients of gradients"):
        torch.autograd.grad(out.square().sum(), sinks, create_graph=True)
