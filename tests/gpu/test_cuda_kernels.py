"""CUDA kernels against fp32: no more than twice the error of the same attention written in bf16 PyTorch.

The rule is FlashAttention's own (tests/test_flash_attn.py upstream): the kernel may not be further from the fp32
result than twice what bf16 arithmetic costs anyway, plus what rounding the fp32 result costs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distca_hf.kernels.choose import KERNELS, choose_kernel
from distca_hf.kernels.interface import Job, Kernel, Spans


pytestmark = pytest.mark.gpu

GENERATION = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


def _unless_absent(name: str) -> Any:
    """A kernel's name, marked to be left out where its package is not installed or the GPU is of another generation
    than its own. Whatever else keeps it from running fails its tests."""
    entry = KERNELS[name]
    generations = entry.capabilities.compute_capability
    absent = entry.missing()
    if GENERATION is not None and generations is not None and GENERATION not in generations:
        absent = f"{name} needs compute capability {generations}, the GPU has {GENERATION}"
    return pytest.param(name, marks=pytest.mark.skipif(absent is not None, reason=absent or ""))


CUDA_KERNELS = [name for name, entry in KERNELS.items() if entry.capabilities.device_type == "cuda"]
each_kernel = pytest.mark.parametrize("name", [_unless_absent(name) for name in CUDA_KERNELS])
# (queries, keys) of the tasks of one call: whole documents, shards with a prefix, single tokens, odd lengths.
TASKS = {
    "whole documents": [(1, 1), (113, 113), (1024, 1024), (1023, 1023), (2, 2)],
    "shards": [(128, 4096), (1, 333), (257, 258), (1000, 3000)],
    "mixed": [(64, 64), (3, 2048), (1, 1), (777, 1554)],
}
HEADS = [(8, 8, 128), (8, 2, 128), (8, 1, 128), (8, 2, 64)]
SCALE = 0.09


def _tensors(tasks: list[tuple[int, int]], heads: int, groups: int, dim: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    queries, keys = (sum(lengths) for lengths in zip(*tasks, strict=True))
    shapes = ((queries, heads, dim), (keys, groups, dim), (keys, groups, dim), (queries, heads, dim))
    return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def _spans(tasks: list[tuple[int, int]]) -> Spans:
    offsets = [np.cumsum([0, *lengths]) for lengths in zip(*tasks, strict=True)]
    cu_seqlens = [torch.from_numpy(offset.astype(np.int32)).cuda() for offset in offsets]
    longest = [max(lengths) for lengths in zip(*tasks, strict=True)]
    return Spans(*cu_seqlens, *longest)


def _run(kernel: Kernel, q, k, v, dout, spans: Spans, deterministic: bool = False) -> list[torch.Tensor]:
    out, lse = torch.empty_like(dout), torch.empty(q.shape[1], q.shape[0], device="cuda")
    kernel.forward(q, k, v, spans, SCALE, out, lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    kernel.backward(dout, q, k, v, out, lse, spans, SCALE, deterministic, dq, dk, dv)
    return [out, lse, dq, dk, dv]


def _reference(q, k, v, dout, spans: Spans, dtype: torch.dtype, top_left: bool = False) -> list[torch.Tensor]:
    """Output, log-sum-exp and gradients by definition, computed in `dtype`, by autograd."""
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    outputs, lses = [], []
    for task in range(len(spans.queries) - 1):
        rows = slice(spans.queries[task], spans.queries[task + 1])
        keys = slice(spans.keys[task], spans.keys[task + 1])
        key, value = (x[keys].repeat_interleave(shared, dim=1) for x in (k, v))
        scores = torch.einsum("tnh,snh->nts", q[rows], key) * SCALE
        offset = 0 if top_left else scores.shape[2] - scores.shape[1]
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device="cuda").tril(offset)
        scores = scores.masked_fill(~visible, float("-inf"))
        outputs.append(torch.einsum("nts,snh->tnh", scores.softmax(-1), value))
        lses.append(scores.float().logsumexp(-1))
    out = torch.cat(outputs)
    gradients = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
    return [out.detach(), torch.cat(lses, dim=1), *gradients]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("tasks", TASKS)
@each_kernel
def test_error_is_at_most_twice_that_of_bf16_pytorch(
    name: str, tasks: str, heads: tuple[int, int, int], record_property: Callable[[str, object], None]
) -> None:
    q, k, v, dout = _tensors(TASKS[tasks], *heads)
    spans = _spans(TASKS[tasks])
    results = _run(choose_kernel(name, Job.of(q, k, v)), q, k, v, dout, spans)
    exact = _reference(q, k, v, dout, spans, torch.float32)
    rounded = _reference(q, k, v, dout, spans, torch.bfloat16)

    for what, result, truth, bf16 in zip(("out", "lse", "dq", "dk", "dv"), results, exact, rounded, strict=True):
        error = (result.float() - truth).abs().max().item()
        if what == "lse":
            assert result.shape == (q.shape[1], q.shape[0])
            assert error <= 1e-3
            continue
        allowed = 2 * (bf16.float() - truth).abs().max().item()
        record_property(f"{what} error / bf16 error", 2 * error / allowed)
        assert error <= allowed, f"{what}: {error} against {allowed}"


@each_kernel
def test_causal_mask_is_aligned_bottom_right(name: str) -> None:
    tasks = TASKS["shards"]
    q, k, v, dout = _tensors(tasks, 8, 2, 128)
    spans = _spans(tasks)
    out = _run(choose_kernel(name, Job.of(q, k, v)), q, k, v, dout, spans)[0].float()
    bottom_right = _reference(q, k, v, dout, spans, torch.float32)[0]
    top_left = _reference(q, k, v, dout, spans, torch.float32, top_left=True)[0]

    assert (out - bottom_right).abs().max() < 0.02
    assert (out - top_left).abs().max() > 0.1


@each_kernel
def test_deterministic_backward_is_bit_equal(name: str) -> None:
    tasks = [(2048, 2048), (1024, 4096)]
    q, k, v, dout = _tensors(tasks, 8, 2, 128)
    kernel, spans = choose_kernel(name, Job.of(q, k, v)), _spans(tasks)
    first = _run(kernel, q, k, v, dout, spans, deterministic=True)

    for _ in range(10):
        for again, before in zip(_run(kernel, q, k, v, dout, spans, deterministic=True), first, strict=True):
            assert torch.equal(again, before)


@each_kernel
def test_strided_keys_and_outputs_are_written_in_place(name: str) -> None:
    """Keys of the store are strided views, and results go into slices of larger tensors."""
    tasks = TASKS["mixed"]
    q, k, v, dout = _tensors(tasks, 8, 2, 128)
    kernel, spans = choose_kernel(name, Job.of(q, k, v)), _spans(tasks)
    expected = _run(kernel, q, k, v, dout, spans, deterministic=True)

    rows = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
    width = k.shape[1] * k.shape[2]
    store_k, store_v = rows[:, :width].unflatten(1, k.shape[1:]), rows[:, width:].unflatten(1, v.shape[1:])
    larger_out = torch.zeros(q.shape[0] + 8, *q.shape[1:], device="cuda", dtype=q.dtype)
    larger_lse = torch.zeros(q.shape[1], q.shape[0] + 8, device="cuda")
    out, lse = larger_out[4:-4], larger_lse[:, 4:-4]
    kernel.forward(q, store_k, store_v, spans, SCALE, out, lse)
    gradient_rows = torch.zeros_like(rows)
    dk, dv = gradient_rows[:, :width].unflatten(1, k.shape[1:]), gradient_rows[:, width:].unflatten(1, v.shape[1:])
    dq = torch.zeros_like(larger_out)[4:-4]
    kernel.backward(dout, q, store_k, store_v, out, lse, spans, SCALE, True, dq, dk, dv)

    for result, whole in zip((out, lse, dq, dk, dv), expected, strict=True):
        assert torch.equal(result, whole)
    assert not larger_out[:4].any()
    assert not larger_out[-4:].any()


def test_auto_takes_the_first_kernel_that_is_installed() -> None:
    q, k, v, _ = _tensors([(4, 4)], 8, 2, 128)
    installed = [name for name in CUDA_KERNELS if KERNELS[name].missing() is None]

    assert type(choose_kernel("auto", Job.of(q, k, v))) is type(choose_kernel(installed[0], Job.of(q, k, v)))
