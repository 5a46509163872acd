"""ffpa-attn for wide heads: what its functions are given, where results are written, and what is refused.

The package runs only on GPUs. Here functions with the parameters of its own compute by the reference.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distca_hf.errors import UnsupportedAttentionError
from distca_hf.kernels.flash4 import FfpaKernel
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Room, Saved, Spans, before_queries
from distca_hf.kernels.reference import ReferenceKernel
from distca_hf.kernels.registry import KERNELS, Operands, choose_kernel, chosen_kernel


SPEC = AttentionSpec(0.5)
DIM = 3
WIDE = Operands("cuda", 9, torch.bfloat16, num_heads=8, num_kv_heads=2, head_dim=512, value_dim=512)
CAUSAL_TASKS = [(6, 6), (3, 9), (0, 0), (1, 4)]
OTHER_TASKS = [(4, 9), (9, 2), (1, 5)]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> Any:
    assert return_lse
    assert lse is None or lse.stride(1) == 1, "rows of a head follow each other"
    spans = Spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    results = ReferenceKernel().forward(Inputs(q, k, v), spans, AttentionSpec(softmax_scale, causal))
    return tuple(x if place is None else place.copy_(x) for x, place in zip(results, (out, lse), strict=True))


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    spans = Spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    spec = AttentionSpec(softmax_scale, causal)
    ReferenceKernel().backward(dout, Saved(q, k, v, out, lse), Gradients(dq, dk, dv), spans, spec)


@pytest.fixture
def kernel() -> FfpaKernel:
    def chosen(function: Any) -> Any:
        def impl_for_device(device: torch.device, head_dim: int, head_dim_v: int) -> Any:
            assert (device.type, head_dim, head_dim_v) == ("cpu", DIM, DIM)
            return function

        return impl_for_device

    functions = {"_forward_impl_for_device": chosen(forward), "_backward_impl_for_device": chosen(backward)}
    return FfpaKernel(SimpleNamespace(**functions))  # type: ignore[arg-type]


def call_of(tasks: list[tuple[int, int]]) -> tuple[Inputs, Spans, torch.Tensor]:
    queries, keys = zip(*tasks, strict=True)
    offsets = [torch.tensor([0, *rows]).cumsum(0).to(torch.int32) for rows in (queries, keys)]
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(queries), 4, DIM), (sum(keys), 2, DIM), (sum(keys), 2, DIM), (sum(queries), 4, DIM)
    *inputs, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return Inputs(*inputs), Spans(*offsets, max(queries), max(keys)), dout


def gradients_of(inputs: Inputs) -> Gradients:
    """Room that is some heads of larger tensors, as the runtime has it."""
    return Gradients(*(x.new_full((len(x), x.shape[1] + 2, DIM), 7.0)[:, 1:-1] for x in inputs))


@pytest.mark.parametrize(
    ("spec", "tasks"), [(SPEC, CAUSAL_TASKS), (before_queries(SPEC), OTHER_TASKS)], ids=["causal", "all keys"]
)
def test_its_functions_get_the_call_that_is_asked_for(
    kernel: FfpaKernel, spec: AttentionSpec, tasks: list[tuple[int, int]]
) -> None:
    inputs, spans, dout = call_of(tasks)
    out, lse = kernel.forward(inputs, spans, spec)
    expected_out, expected_lse = ReferenceKernel().forward(inputs, spans, spec)
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)

    # Of a longer row: as if its other keys had half of the weight.
    saved = Saved(*inputs, out, lse + torch.tensor(2.0).log())
    room, expected = gradients_of(inputs), gradients_of(inputs)
    kernel.backward(dout, saved, room, spans, spec)
    ReferenceKernel().backward(dout, saved, expected, spans, spec)
    for gradient, right in zip(room, expected, strict=True):
        assert torch.equal(gradient, right)


@pytest.mark.parametrize("head_by_head", [True, False])
def test_room_is_filled(kernel: FfpaKernel, head_by_head: bool) -> None:
    """The package writes log-sum-exps where rows of a head follow each other; elsewhere they are copied."""
    inputs, spans, _ = call_of(CAUSAL_TASKS)
    out, lse = ReferenceKernel().forward(inputs, spans, SPEC)
    heads, rows = lse.shape
    of_more_heads = lse.new_zeros(heads + 1, rows) if head_by_head else lse.new_zeros(rows, heads + 1).t()
    room = Room(torch.zeros_like(out), of_more_heads[1:])
    got = kernel.forward(inputs, spans, SPEC, room)

    for result, place, right in zip(got, room, (out, lse), strict=True):
        assert result is place
        assert torch.equal(result, right)


@pytest.mark.parametrize(
    ("changes", "spec", "told"),
    [
        ({"head_dim": 128, "value_dim": 128}, SPEC, "has head dimensions from 320, the model has 128"),
        ({"head_dim": 512, "value_dim": 256}, SPEC, "has head dimensions from 320, the model has 256"),
        ({"head_dim": 576, "value_dim": 512}, SPEC, "has head dimensions up to 512, the model has 576"),
        ({"head_dim": 328, "value_dim": 328}, SPEC, "multiples of 64, the model has 328 and 328"),
        ({"head_dim": 512, "value_dim": 384}, SPEC, "equal key and value dimensions, the model has 512 and 384"),
        ({"dtype": torch.float32}, SPEC, "computes torch.bfloat16, torch.float16, tensors are torch.float32"),
        ({"compute_capability": 8}, SPEC, "needs compute capability (9,), the GPU has 8"),
        ({"compute_capability": 10}, SPEC, "needs compute capability (9,), the GPU has 10"),
        ({}, SPEC._replace(window_tokens=1024), "does not compute window_tokens"),
        ({}, before_queries(SPEC, 1024), "does not compute one_sided_window"),
        ({}, SPEC._replace(softcap=50.0), "does not compute softcap"),
    ],
)
def test_what_it_does_not_compute_is_refused(changes: dict[str, object], spec: AttentionSpec, told: str) -> None:
    operands = dataclasses.replace(WIDE, **changes)
    assert told in (KERNELS["ffpa"].capabilities.refusal(operands, spec) or "")
    with pytest.raises(UnsupportedAttentionError, match="kernel='ffpa' cannot be used: ffpa "):
        choose_kernel("ffpa", operands, spec)


@pytest.mark.parametrize("dim", [320, 384, 448, 512])
def test_wide_heads_have_no_other_kernel_on_gpus(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = dataclasses.replace(WIDE, head_dim=dim, value_dim=dim)
    stand_in = SimpleNamespace(_forward_impl_for_device=None, _backward_impl_for_device=None)
    entry = dataclasses.replace(KERNELS["ffpa"], module="json", make=lambda module: FfpaKernel(stand_in))  # type: ignore[arg-type]
    monkeypatch.setitem(KERNELS, "ffpa", entry)
    monkeypatch.setattr("distca_hf.kernels.registry.try_out", lambda *given: None)
    chosen_kernel.cache_clear()

    assert isinstance(choose_kernel("auto", operands, SPEC), FfpaKernel)
    assert isinstance(choose_kernel("ffpa", operands, SPEC), FfpaKernel)
    chosen_kernel.cache_clear()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "ffpa", dataclasses.replace(KERNELS["ffpa"], module="absent_ffpa.cute"))
    chosen_kernel.cache_clear()
    for name in ("auto", "ffpa"):
        with pytest.raises(UnsupportedAttentionError, match=r"ffpa is not installed \(pip install ffpa-attn\)"):
            choose_kernel(name, WIDE, SPEC)
