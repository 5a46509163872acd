"""Attention outputs that wait on the host, on a GPU: the same bits, and the device's memory is free meanwhile."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distca_hf.integrations import checkpointing
from distca_hf.integrations.checkpointing import HostCopy, OffloadedAttention
from distca_hf.kernels.interface import AttentionSpec, Spans
from distca_hf.runtime.local_attention import Documents, flash_attn_local


pytestmark = pytest.mark.gpu

LAYERS, TOKENS, HEADS, DIM = 6, 8192, 8, 64


def _layer(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    out, _ = flash_attn_local(x, x, x, Documents.of(Spans(offsets, offsets, TOKENS, TOKENS)), AttentionSpec(DIM**-0.5))
    return x + torch.tanh(out)


def _run(x: torch.Tensor, offsets: torch.Tensor, contexts: Callable[[], Any] | None) -> tuple[torch.Tensor, int]:
    """The gradient, and the device's bytes between forward and backward beyond those before."""
    before = torch.cuda.memory_allocated()
    out = x
    for _ in range(LAYERS):
        if contexts is None:
            out = _layer(out, offsets)
        else:
            out = checkpoint(_layer, out, offsets, use_reentrant=False, context_fn=contexts)
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


def test_outputs_come_back_with_the_same_bits() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(TOKENS, HEADS, DIM, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    offsets = torch.tensor([0, TOKENS], device="cuda", dtype=torch.int32)
    contexts = OffloadedAttention()

    expected, _ = _run(x, offsets, None)
    first, held = _run(x, offsets, contexts)
    others = [_run(x, offsets, contexts)[0] for _ in range(5)]  # pinned memory and device memory are used again

    assert torch.equal(first, expected)
    assert all(torch.equal(other, expected) for other in others)
    # Inputs of all layers are held, but none of the outputs of attention, each of which is as large.
    assert held < (LAYERS + 1) * x.nbytes


def test_pinned_memory_is_that_of_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five eighths of a power of two: in one piece torch would pin the whole of it."""
    monkeypatch.setattr(checkpointing, "PIECE_BYTES", 2**20)
    x = torch.randn(5 * 2**20 // 4, device="cuda")
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    copy = HostCopy(x)
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before

    assert taken <= x.nbytes
    assert torch.equal(copy.on_device(), x)
