"""The reference kernel in fp64 against a dense mask: windows on both sides and on one, softcap, and any block."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.kernels import reference
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Room, Saved, Spans
from distca_hf.kernels.reference import ReferenceKernel


@dataclass(frozen=True)
class Call:
    """Tasks (query rows, key rows) and how they attend."""

    tasks: list[tuple[int, int]]
    heads: tuple[int, int]
    spec: AttentionSpec

    @property
    def spans(self) -> Spans:
        queries, keys = zip(*self.tasks, strict=True)
        offsets = [torch.tensor([0, *rows]).cumsum(0).to(torch.int32) for rows in (queries, keys)]
        return Spans(*offsets, max(queries), max(keys))


def seen(queries: int, keys: int, spec: AttentionSpec) -> torch.Tensor:
    """Which key each query attends to, one by one from the definition of the masks."""
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    for query in range(queries):
        place = keys - queries + query  # the last query stands at the last key
        for key in range(keys):
            is_in_window = spec.window_tokens == 0 or key > place - spec.window_tokens
            mask[query, key] = is_in_window and (not spec.causal or key <= place)
    return mask


def expected(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    """Output, log-sum-exp and gradients by autograd."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    spec, shared = call.spec, call.heads[0] // call.heads[1]
    outs, lses, query, key = [], [], 0, 0
    for queries, keys in call.tasks:
        rows, columns = slice(query, query + queries), slice(key, key + keys)
        scores = torch.einsum("tnh,snh->nts", q[rows], k[columns].repeat_interleave(shared, 1)) * spec.scale
        scores = spec.softcap * (scores / spec.softcap).tanh() if spec.softcap else scores
        scores = scores.masked_fill(~seen(queries, keys, spec), float("-inf"))
        outs.append(torch.einsum("nts,snv->tnv", scores.softmax(-1), v[columns].repeat_interleave(shared, 1)))
        lses.append(scores.logsumexp(-1))
        query, key = query + queries, key + keys
    out = torch.cat(outs)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    return [out.detach(), torch.cat(lses, 1).detach(), *gradients]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    causal = draw(st.booleans())
    tasks = []
    for _ in range(draw(st.integers(1, 3))):
        queries, others = draw(st.integers(1, 20)), draw(st.integers(0 if causal else 1, 20))
        tasks.append((queries, queries + others if causal else others))
    window_tokens = draw(st.sampled_from([0, 1, 2, 3, 7, 16, 40]))
    softcap = draw(st.sampled_from([0.0, 0.5, 30.0]))
    heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    return Call(tasks, heads, AttentionSpec(0.7, causal, window_tokens, softcap))


@given(call=calls(), block_rows=st.sampled_from([1, 3, 8, 1024]), seed=st.integers(0, 99))
def test_reference_is_exact_with_every_mask(call: Call, block_rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (sum(rows) for rows in zip(*call.tasks, strict=True))
    (num_heads, groups), dim, value_dim = call.heads, 3, 2
    shapes = (queries, num_heads, dim), (keys, groups, dim), (keys, groups, value_dim), (queries, num_heads, value_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    out, lse = torch.full_like(dout, torch.nan), q.new_full((num_heads, queries), torch.nan)
    gradients = Gradients(*(torch.full_like(x, torch.nan) for x in (q, k, v)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "BLOCK_ROWS", block_rows)
        ReferenceKernel().forward(Inputs(q, k, v), call.spans, call.spec, Room(out, lse))
        ReferenceKernel().backward(dout, Saved(q, k, v, out, lse), gradients, call.spans, call.spec)

    for got, right in zip((out, lse, *gradients), expected(call, q, k, v, dout), strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False], ids=["both sides", "left alone"])
def test_keys_left_of_the_window_are_not_read(causal: bool) -> None:
    """Work grows with the window, not with the document: of keys left of it not even a NaN comes through."""
    spans = Call([(4, 4000)], (1, 1), AttentionSpec(1.0)).spans
    q, k = torch.randn(4, 1, 8), torch.randn(4000, 1, 8)
    k[:3900] = torch.nan
    spec = AttentionSpec(0.3, causal, window_tokens=90)
    out, lse = ReferenceKernel().forward(Inputs(q, k, k), spans, spec)
    gradients = Gradients(torch.empty_like(q), torch.empty_like(k), torch.empty_like(k))
    ReferenceKernel().backward(out, Saved(q, k, k, out, lse), gradients, spans, spec)

    assert all(x.isfinite().all() for x in (out, lse, *gradients))
    assert not gradients.dk_SGH[:3900].any()


def test_windows_make_a_difference() -> None:
    """Or the tests above would show nothing; one as long as its task makes none."""
    spans = Call([(9, 9)], (1, 1), AttentionSpec(1.0)).spans
    q, k, v = (torch.randn(9, 1, 4, generator=torch.Generator().manual_seed(x), dtype=torch.float64) for x in range(3))

    def out(window_tokens: int, causal: bool) -> torch.Tensor:
        spec = AttentionSpec(1.0, causal, window_tokens)
        return ReferenceKernel().forward(Inputs(q, k, v), spans, spec)[0]

    for causal in (True, False):
        assert torch.equal(out(9, causal), out(0, causal))
        assert (out(8, causal) - out(0, causal)).abs().max() > 1e-3
        assert (out(3, causal) - out(4, causal)).abs().max() > 1e-3
    assert (out(3, True) - out(3, False)).abs().max() > 1e-3
