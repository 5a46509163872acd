"""CUDA kernels against fp32: no more than twice the error of the same attention written in bf16 PyTorch.

The rule is FlashAttention's own (tests/test_flash_attn.py upstream): the kernel may not be further from the fp32
result than twice what bf16 arithmetic costs anyway, plus what rounding the fp32 result costs.
"""

import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distca_hf.config import KernelName
from distca_hf.kernels.flash4 import HOPPER, Flash4Kernel
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Room, Saved, Spans
from distca_hf.kernels.registry import KERNELS, Operands, choose_kernel


pytestmark = pytest.mark.gpu

GENERATION = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


def _unless_absent(name: KernelName) -> Any:
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
# The same without a mask: prefixes of which every query sees all keys, also fewer keys than queries.
WITHOUT_MASK = {
    "prefixes": [(128, 3968), (1, 332), (257, 1), (1000, 2000)],
    "whole documents": [(1, 1), (113, 113), (1024, 1024), (1023, 1023), (2, 2)],
    "few keys": [(2048, 64), (3, 1), (777, 129)],
}
CALLS = [(causal, name) for causal, tasks in ((True, TASKS), (False, WITHOUT_MASK)) for name in tasks]
HEADS = [(8, 8, 128), (8, 2, 128), (8, 1, 128), (8, 2, 64), (8, 8, 512), (8, 1, 512), (8, 2, 320), (8, 2, 448)]


def _takes(name: KernelName, dim: int) -> bool:
    able = KERNELS[name].capabilities
    return able.min_head_dim <= dim <= (able.max_head_dim or dim)


HEADS_OF_KERNELS = [
    pytest.param(*_unless_absent(name).values, heads, marks=_unless_absent(name).marks, id=f"{name}-{heads}")
    for name in CUDA_KERNELS
    for heads in HEADS
    if _takes(name, heads[2])
]
SCALE = 0.09
SPEC = AttentionSpec(SCALE)


def _tensors(tasks: list[tuple[int, int]], heads: int, groups: int, dim: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    queries, keys = (sum(lengths) for lengths in zip(*tasks, strict=True))
    shapes = ((queries, heads, dim), (keys, groups, dim), (keys, groups, dim), (queries, heads, dim))
    return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def _dim(name: KernelName) -> int:
    """A head dimension that the kernel takes."""
    return 128 if _takes(name, 128) else 512


def _tasks(causal: bool, name: str) -> list[tuple[int, int]]:
    return TASKS[name] if causal else WITHOUT_MASK[name]


def _spans(tasks: list[tuple[int, int]]) -> Spans:
    offsets = [np.cumsum([0, *lengths]) for lengths in zip(*tasks, strict=True)]
    cu_seqlens = [torch.from_numpy(offset.astype(np.int32)).cuda() for offset in offsets]
    longest = [max(lengths) for lengths in zip(*tasks, strict=True)]
    return Spans(*cu_seqlens, *longest)


def _run(kernel: Kernel, q, k, v, dout, spans: Spans, spec: AttentionSpec = SPEC) -> list[torch.Tensor]:
    out, lse = torch.empty_like(dout), torch.empty(q.shape[1], q.shape[0], device="cuda")
    kernel.forward(Inputs(q, k, v), spans, spec, Room(out, lse))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    kernel.backward(dout, Saved(q, k, v, out, lse), Gradients(dq, dk, dv), spans, spec)
    return [out, lse, dq, dk, dv]


def _reference(
    q, k, v, dout, spans: Spans, dtype: torch.dtype, causal: bool = True, top_left: bool = False
) -> list[torch.Tensor]:
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
        scores = scores.masked_fill(~visible, float("-inf")) if causal else scores
        outputs.append(torch.einsum("nts,snh->tnh", scores.softmax(-1), value))
        lses.append(scores.float().logsumexp(-1))
    out = torch.cat(outputs)
    gradients = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
    return [out.detach(), torch.cat(lses, dim=1), *gradients]


@pytest.mark.parametrize(("causal", "tasks"), CALLS)
@pytest.mark.parametrize(("name", "heads"), HEADS_OF_KERNELS)
def test_error_is_at_most_twice_that_of_bf16_pytorch(
    name: KernelName,
    causal: bool,
    tasks: str,
    heads: tuple[int, int, int],
    record_property: Callable[[str, object], None],
) -> None:
    q, k, v, dout = _tensors(_tasks(causal, tasks), *heads)
    spans = _spans(_tasks(causal, tasks))
    results = _run(choose_kernel(name, Operands.of(q, k, v), SPEC), q, k, v, dout, spans, AttentionSpec(SCALE, causal))
    exact = _reference(q, k, v, dout, spans, torch.float32, causal)
    rounded = _reference(q, k, v, dout, spans, torch.bfloat16, causal)

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
def test_causal_mask_is_aligned_bottom_right(name: KernelName) -> None:
    tasks = TASKS["shards"]
    q, k, v, dout = _tensors(tasks, 8, 2, _dim(name))
    spans = _spans(tasks)
    out = _run(choose_kernel(name, Operands.of(q, k, v), SPEC), q, k, v, dout, spans)[0].float()
    bottom_right = _reference(q, k, v, dout, spans, torch.float32)[0]
    top_left = _reference(q, k, v, dout, spans, torch.float32, top_left=True)[0]

    assert (out - bottom_right).abs().max() < 0.02
    assert (out - top_left).abs().max() > 0.1


@pytest.mark.skipif(GENERATION != HOPPER, reason="calls are made in their own way only on Hopper GPUs")
@pytest.mark.parametrize(
    ("causal", "kv_heads", "calls_of_backward"),
    [(False, 8, 8), (False, 32, 1), (True, 8, 1)],
    ids=["no mask", "no mask, each head its own KV head", "causal"],
)
@pytest.mark.parametrize("name", [_unless_absent("flash4")])
def test_long_prefixes_have_the_results_of_the_packages_own_calls(
    name: str, causal: bool, kv_heads: int, calls_of_backward: int
) -> None:
    """Heads apart in forward, and in backward without a mask several calls, if KV heads have several query heads."""
    package, calls = importlib.import_module("flash_attn.cute.interface"), list[tuple[str, bool | None]]()

    def noted(function: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            calls.append((function, named.get("pack_gqa")))
            return getattr(package, function)(*given, **named)

        return call

    functions = SimpleNamespace(**{name: noted(name) for name in ("_flash_attn_fwd", "_flash_attn_bwd")})
    tasks = [(40_000, 80_000), (1000, 70_000)]
    tensors, spans, spec = _tensors(tasks, 32, kv_heads, 128), _spans(tasks), AttentionSpec(SCALE, causal)
    ours = _run(Flash4Kernel(functions), *tensors, spans, spec)  # type: ignore[arg-type]
    by_itself = _run(Flash4Kernel(package, lambda device: 0), *tensors, spans, spec)

    assert calls == [("_flash_attn_fwd", False), *[("_flash_attn_bwd", None)] * calls_of_backward]
    for what, result, right in zip(("out", "lse", "dq", "dk", "dv"), ours, by_itself, strict=True):
        if what == "dq":  # blocks of keys add to it in any order
            assert (result - right).abs().max() <= 2**-7 * right.abs().max()
        else:
            assert torch.equal(result, right), what


@pytest.mark.parametrize(
    "spec",
    [SPEC, SPEC._replace(causal=False), SPEC._replace(window_tokens=40), SPEC._replace(deterministic=True)],
    ids=["causal", "no mask", "window", "deterministic"],
)
@pytest.mark.parametrize("tasks", [[(64, 64), (3, 2048), (777, 1554)], [(9, 11)] * 300], ids=["few", "300 documents"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("name", [_unless_absent("flash4")])
def test_alike_calls_repeat_what_the_package_launched_for_the_first(
    name: str, kv_heads: int, tasks: list[tuple[int, int]], spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = importlib.import_module("flash_attn.cute.interface")
    # Functions without an attribute for compiled kernels are called every time.
    functions = {name: partial(getattr(package, name)) for name in ("_flash_attn_fwd", "_flash_attn_bwd")}
    called_every_time, ours = Flash4Kernel(SimpleNamespace(**functions)), Flash4Kernel(package)  # type: ignore[arg-type]
    spans, calls = _spans(tasks), list[str]()
    _run(called_every_time, *_tensors(tasks, 8, kv_heads, 128), spans, spec)  # compiles

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: (calls.append(name), function(*given, **named))[1]

    for name in ("_forward", "_backward"):
        monkeypatch.setattr(ours, name, noted(name, getattr(ours, name)))
    for repeat in range(3):
        others = [torch.randn_like(x) for x in _tensors(tasks, 8, kv_heads, 128)]
        right = _run(called_every_time, *others, spans, spec)
        for what, result, truth in zip(
            ("out", "lse", "dq", "dk", "dv"), _run(ours, *others, spans, spec), right, strict=True
        ):
            if what in ("dq", "dk", "dv") and not spec.deterministic:  # blocks add to them in any order
                assert (result - truth).abs().max() <= 2**-7 * truth.abs().max(), f"{what}, call {repeat}"
            else:
                assert torch.equal(result, truth), f"{what}, call {repeat}"
    assert calls == ["_forward", "_backward"]


@each_kernel
def test_deterministic_backward_is_bit_equal(name: KernelName) -> None:
    tasks = [(2048, 2048), (1024, 4096)]
    q, k, v, dout = _tensors(tasks, 8, 2, _dim(name))
    kernel, spans = choose_kernel(name, Operands.of(q, k, v), SPEC), _spans(tasks)
    spec = AttentionSpec(SCALE, deterministic=True)
    first = _run(kernel, q, k, v, dout, spans, spec)

    for _ in range(10):
        for again, before in zip(_run(kernel, q, k, v, dout, spans, spec), first, strict=True):
            assert torch.equal(again, before)


def _surrounded(x: torch.Tensor, heads: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A larger tensor full of sevens, and a view of it that holds `x`: some of its tokens, and some of its heads."""
    whole = torch.full((x.shape[0] + 8, sum(heads) + x.shape[1], *x.shape[2:]), 7.0, device="cuda", dtype=x.dtype)
    view = whole[4:-4, heads[0] : heads[0] + x.shape[1]]
    view.copy_(x)
    return whole, view


def _is_untouched_around(whole: torch.Tensor, view: torch.Tensor, heads: tuple[int, int]) -> bool:
    outside = torch.ones(whole.shape[:2], dtype=torch.bool, device="cuda")
    outside[4:-4, heads[0] : heads[0] + view.shape[1]] = False
    return bool((whole[outside] == 7).all())


def _side_by_side(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of keys and of values that lie as `[rows, G * H | G * V]`, as in the store."""
    rows, width = torch.cat([k.flatten(1), v.flatten(1)], dim=1), k[0].numel()
    return rows[:, :width].unflatten(1, k.shape[1:]), rows[:, width:].unflatten(1, v.shape[1:])


@pytest.mark.parametrize("around", [(0, 0), (8, 0), (2, 6)], ids=["all heads", "last", "between"])
@pytest.mark.parametrize("keys", ["beside values", "of some heads"])
@pytest.mark.parametrize(("causal", "tasks"), [(True, "mixed"), (False, "prefixes")], ids=["causal", "no mask"])
@each_kernel
def test_views_are_read_and_written_in_place(
    name: KernelName, causal: bool, tasks: str, keys: str, around: tuple[int, int]
) -> None:
    """As the runtime has them: queries are some tokens and heads of a layer's; so are own keys, while those of the
    store lie beside their values; log-sum-exps are `[T, N]`, and the kernel gets them transposed."""
    q, k, v, dout = _tensors(_tasks(causal, tasks), 8, 2, _dim(name))
    kernel, spans = choose_kernel(name, Operands.of(q, k, v), SPEC), _spans(_tasks(causal, tasks))
    spec = AttentionSpec(SCALE, causal, deterministic=True)
    expected = _run(kernel, q, k, v, dout, spans, spec)

    lse = torch.empty(q.shape[:2], device="cuda")
    of_queries = [_surrounded(x, around) for x in (q, dout, torch.empty_like(dout), torch.empty_like(q), lse)]
    q, dout, out, dq, lse = (view for _, view in of_queries)
    of_keys = []
    if keys == "beside values":
        (k, v), (dk, dv) = _side_by_side(k, v), _side_by_side(torch.empty_like(k), torch.empty_like(v))
    else:
        of_keys = [_surrounded(x, around) for x in (k, v, torch.empty_like(k), torch.empty_like(v))]
        k, v, dk, dv = (view for _, view in of_keys)
    kernel.forward(Inputs(q, k, v), spans, spec, Room(out, lse.T))
    kernel.backward(dout, Saved(q, k, v, out, lse.T), Gradients(dq, dk, dv), spans, spec)

    for what, result, whole in zip(("out", "lse", "dq", "dk", "dv"), (out, lse.T, dq, dk, dv), expected, strict=True):
        assert torch.equal(result, whole), what
    assert all(_is_untouched_around(whole, view, around) for whole, view in (*of_queries, *of_keys))


def test_auto_takes_the_first_kernel_that_is_installed() -> None:
    q, k, v, _ = _tensors([(4, 4)], 8, 2, 128)
    installed = [name for name in CUDA_KERNELS if KERNELS[name].missing() is None and _takes(name, 128)]

    assert type(choose_kernel("auto", Operands.of(q, k, v), SPEC)) is type(
        choose_kernel(installed[0], Operands.of(q, k, v), SPEC)
    )
