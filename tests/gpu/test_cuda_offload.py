"""Attention outputs that wait on the host, on a GPU: the same bits, and the device's memory is free meanwhile."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distca_hf.integrations import offload
from distca_hf.integrations.offload import OffloadedLayers
from distca_hf.kernels.interface import AttentionSpec, Spans
from distca_hf.runtime.local_attention import Documents, flash_attn_local


pytestmark = pytest.mark.gpu

LAYERS, TOKENS, HEADS, DIM = 6, 8192, 8, 64


def _layer(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    out, _ = flash_attn_local(x, x, x, Documents.of(Spans(offsets, offsets, TOKENS, TOKENS)), AttentionSpec(DIM**-0.5))
    return x + torch.tanh(out)


def _run(x: torch.Tensor, offsets: torch.Tensor, layers: OffloadedLayers | None) -> tuple[torch.Tensor, int]:
    """The gradient, and the device's bytes between forward and backward beyond those before."""
    before = torch.cuda.memory_allocated()
    out = x
    for _ in range(LAYERS):
        if layers is None:
            out = _layer(out, offsets)
        else:
            out = layers.run(partial(checkpoint, use_reentrant=False), _layer, out, offsets)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return gradient, held


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Gradients of queries are summed in one order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_what_waits_comes_back_with_the_same_bits() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(TOKENS, HEADS, DIM, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    offsets = torch.tensor([0, TOKENS], device="cuda", dtype=torch.int32)
    layers = OffloadedLayers()

    expected, _ = _run(x, offsets, None)
    first, held = _run(x, offsets, layers)
    others = [_run(x, offsets, layers)[0] for _ in range(5)]  # pinned memory and device memory are used again

    assert torch.equal(first, expected)
    assert all(torch.equal(other, expected) for other in others)
    # The last layer's input, its attention's output and log-sum-exps, and its output.
    assert held < 4 * x.nbytes


def test_the_peak_is_that_of_a_few_layers_however_far_the_host_is_ahead() -> None:
    x = torch.randn(TOKENS, HEADS, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_()
    offsets = torch.tensor([0, TOKENS], device="cuda", dtype=torch.int32)
    layers, peaks = OffloadedLayers(), []
    for number in (4, 16):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda._sleep(10**9)  # kernels and copies wait: everything is queued before the first one runs
        out = x
        for _ in range(number):
            out = layers.run(partial(checkpoint, use_reentrant=False), _layer, out, offsets)
        torch.autograd.grad(out, x, torch.ones_like(out))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())

    assert peaks[1] <= peaks[0] + x.nbytes


def test_pinned_memory_is_that_of_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five eighths of a power of two: in one piece torch would pin the whole of it."""
    monkeypatch.setattr(offload, "PIECE_BYTES", 2**20)
    x = torch.randn(5 * 2**20 // 4, device="cuda")
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    copy = OffloadedLayers().send(x)
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before

    assert taken <= x.nbytes
    assert torch.equal(copy.take(), x)
