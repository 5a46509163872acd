"""Sliding windows and softcap of CUDA kernels against fp32: no more than twice the error of bf16 PyTorch.

Every kernel of the table that claims an option is tested with it, also with windows that only the left side ends and
tasks of fewer keys than queries.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Room, Saved, Spans
from distca_hf.kernels.registry import KERNELS, Operands, choose_kernel, options_of


pytestmark = pytest.mark.gpu

GENERATION = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
CUDA_KERNELS = [name for name, entry in KERNELS.items() if entry.capabilities.device_type == "cuda"]
# Query and key rows of each task. The last queries of a document beside the keys before them, also beside few.
CAUSAL_TASKS = [(1, 1), (113, 113), (1024, 1024), (257, 2000), (3, 2048)]
OTHER_TASKS = [(127, 300), (1023, 1023), (700, 64), (1000, 1), (5, 999)]
# Query heads, KV heads, head dimension, value dimension.
GQA, MHA, LARGE, LATENT = (8, 2, 128, 128), (8, 8, 64, 64), (8, 4, 256, 256), (16, 16, 192, 128)
MANY = 128, 64, 64, 64
CASES = {
    "window": (GQA, AttentionSpec(0.09, window_tokens=128)),
    "window of one tile and a half": (GQA, AttentionSpec(0.09, window_tokens=200)),
    "window of one key": (GQA, AttentionSpec(0.09, window_tokens=1)),
    "window longer than all": (GQA, AttentionSpec(0.09, window_tokens=4096)),
    "window, MHA of 64": (MHA, AttentionSpec(0.125, window_tokens=128)),
    "window at 256": (LARGE, AttentionSpec(0.06, window_tokens=200)),
    "window, 192 and 128": (LATENT, AttentionSpec(0.07, window_tokens=200)),
    "window, many heads": (MANY, AttentionSpec(0.125, window_tokens=128)),
    "one side": (GQA, AttentionSpec(0.09, False, 128)),
    "one side, one key": (GQA, AttentionSpec(0.09, False, 1)),
    "one side, longer than all": (GQA, AttentionSpec(0.09, False, 4096)),
    "one side at 256": (LARGE, AttentionSpec(0.06, False, 200)),
    "one side, many heads": (MANY, AttentionSpec(0.125, False, 128)),
    "softcap at 256": (LARGE, AttentionSpec(0.5, softcap=50.0)),
    "softcap without a mask": (GQA, AttentionSpec(0.5, False, softcap=50.0)),
    "softcap, many heads": (MANY, AttentionSpec(0.5, softcap=50.0)),
    "window and softcap at 256": (LARGE, AttentionSpec(0.5, window_tokens=200, softcap=50.0)),
    "one side and softcap": (GQA, AttentionSpec(0.5, False, 200, 30.0)),
    "many heads": (MANY, AttentionSpec(0.125)),
}


def _operands(heads: tuple[int, int, int, int]) -> Operands:
    return Operands("cuda", GENERATION, torch.bfloat16, *heads)


def _cases() -> list[Any]:
    """Each kernel with each case that it claims; marked to be left out where its package is not installed, or the GPU
    is of another generation than its own."""
    cases = []
    for name in CUDA_KERNELS:
        entry = KERNELS[name]
        for case, (heads, spec) in CASES.items():
            claims = entry.capabilities.options.issuperset(options_of(spec))
            refusal = entry.capabilities.refusal(_operands(heads), spec)
            if claims and not (refusal and "value dimensions" in refusal):
                absent = entry.missing() or refusal
                mark = pytest.mark.skipif(absent is not None, reason=f"{name} {absent}")
                cases.append(pytest.param(name, heads, spec, marks=mark, id=f"{name}-{case}"))
    return cases


def _spans(tasks: list[tuple[int, int]]) -> Spans:
    offsets = [torch.tensor([0, *rows]).cumsum(0).to("cuda", torch.int32) for rows in zip(*tasks, strict=True)]
    return Spans(*offsets, *(max(rows) for rows in zip(*tasks, strict=True)))


def _by_definition(
    inputs: Inputs, dout: torch.Tensor, spans: Spans, spec: AttentionSpec, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Results from a dense mask, computed in `dtype`, gradients by autograd."""
    q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
    shared = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for task in range(len(spans.queries) - 1):
        rows, keys = (slice(*offsets[task : task + 2]) for offsets in (spans.queries, spans.keys))
        key, value = (x[keys].repeat_interleave(shared, dim=1) for x in (k, v))
        scores = torch.einsum("tnh,snh->nts", q[rows], key) * spec.scale
        scores = spec.softcap * (scores / spec.softcap).tanh() if spec.softcap else scores
        queries, columns = scores.shape[1:]
        place = torch.arange(queries, device="cuda")[:, None] + columns - queries
        column = torch.arange(columns, device="cuda")
        hidden = (column > place) & spec.causal
        hidden |= (column <= place - spec.window_tokens) & (spec.window_tokens > 0)
        scores = scores.masked_fill(hidden, float("-inf"))
        outs.append(torch.einsum("nts,snh->tnh", scores.softmax(-1), value))
        lses.append(scores.float().logsumexp(-1))
    out = torch.cat(outs)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
    return {"out": out.detach(), "lse": torch.cat(lses, 1).detach(), "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize(("name", "heads", "spec"), _cases())
def test_error_is_at_most_twice_that_of_bf16_pytorch(
    name: str,
    heads: tuple[int, int, int, int],
    spec: AttentionSpec,
    record_property: Callable[[str, object], None],
) -> None:
    tasks = CAUSAL_TASKS if spec.causal else OTHER_TASKS
    (num_heads, groups, dim, value_dim), (queries, keys) = heads, (sum(rows) for rows in zip(*tasks, strict=True))
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (queries, num_heads, dim), (keys, groups, dim), (keys, groups, value_dim), (queries, num_heads, value_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    inputs, spans, kernel = Inputs(q, k, v), _spans(tasks), choose_kernel(name, _operands(heads), spec)
    out, lse = torch.full_like(dout, torch.nan), torch.full((num_heads, queries), torch.nan, device="cuda")
    kernel.forward(inputs, spans, spec, Room(out, lse))
    gradients = Gradients(*(torch.full_like(x, torch.nan) for x in (q, k, v)))
    kernel.backward(dout, Saved(q, k, v, out, lse), gradients, spans, spec)

    exact, rounded = (_by_definition(inputs, dout, spans, spec, dtype) for dtype in (torch.float32, torch.bfloat16))
    for result, (part, truth) in zip((out, lse, *gradients), exact.items(), strict=True):
        error = (result.float() - truth).abs().max().item()
        allowed = 2 * (rounded[part].float() - truth).abs().max().item() + 1e-4  # zero where a row has one key
        if part == "lse":
            allowed = max(1e-3, spec.softcap * 1e-3)  # some kernels approximate tanh to a thousandth
        record_property(f"{part} error / allowed", error / allowed)
        assert error <= allowed, f"{part}: {error} against {allowed}"


@pytest.mark.parametrize("name", [name for name in CUDA_KERNELS if KERNELS[name].missing() is None])
def test_kernels_that_are_installed_are_right_on_their_first_tokens(name: str) -> None:
    """Or they would give way without a failed test."""
    for heads, spec in CASES.values():
        if KERNELS[name].capabilities.refusal(_operands(heads), spec) is None:
            choose_kernel(name, _operands(heads), spec)
