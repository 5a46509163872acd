"""How windows, softcap and determinism are handed to attention packages: what each function computes of them, by its
own rules.

The packages run only on GPUs. Here functions of the same names compute by a dense mask, which they make of their
arguments as the packages do.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distca_hf.kernels.flash4 import Flash4Kernel
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Room, Saved, Spans
from distca_hf.kernels.reference import ReferenceKernel
from distca_hf.kernels.registry import KERNELS
from distca_hf.kernels.varlen import Flash2Kernel, Flash3Kernel, TorchVarlenKernel


# Query and key rows: more keys, one query, fewer keys by far. FlashAttention 2 must reach all of the last ones.
CAUSAL_TASKS = [(6, 6), (3, 9), (1, 4)]
OTHER_TASKS = [(4, 9), (9, 2), (1, 5), (12, 1)]
SPECS = [
    AttentionSpec(0.6, causal, window_tokens, softcap)
    for causal in (True, False)
    for window_tokens in (0, 1, 3, 64)
    for softcap in (0.0, 0.8)
]


def dense(given: Inputs, spans: Spans, scale: float, sides: tuple[int | None, int | None], softcap: float) -> Any:
    """Output and log-sum-exp of queries that attend to keys from `place - left` to `place + right`."""
    q, k, v = (x.repeat_interleave(given[0].shape[1] // x.shape[1], 1) for x in given)
    outs, lses = [], []
    for task in range(len(spans.queries) - 1):
        rows, keys = (slice(*offsets[task : task + 2]) for offsets in (spans.queries, spans.keys))
        scores = torch.einsum("tnh,snh->nts", q[rows], k[keys]) * scale
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        beside = torch.arange(scores.shape[2]) - (torch.arange(scores.shape[1])[:, None] + len(k[keys]) - len(q[rows]))
        left, right = sides
        hidden = (beside < -left) if left is not None else torch.zeros_like(beside, dtype=torch.bool)
        hidden = hidden | (beside > right) if right is not None else hidden
        scores = scores.masked_fill(hidden, float("-inf"))
        outs.append(torch.einsum("nts,snv->tnv", scores.softmax(-1), v[keys]))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


def as_flash2(causal: bool, left: int, right: int, longest_q: int, longest_k: int) -> tuple[int | None, int | None]:
    """`csrc/flash_attn/flash_api.cpp`: an open side beside a closed one is as wide as the longest keys."""
    right = 0 if causal and longest_q > 1 else right
    left, right = (-1 if side >= longest_k else side for side in (left, right))
    if left < 0 and right < 0:
        return None, None
    return longest_k if left < 0 else left, longest_k if right < 0 else right


def as_flash3(causal: bool, left: int, right: int, longest_q: int, longest_k: int) -> tuple[int | None, int | None]:
    """`hopper/flash_api.cpp`."""
    left, right = -1 if left >= longest_k - 1 else left, -1 if right >= longest_q - 1 else right
    right = 0 if causal else right
    if left < 0 and right < 0:
        return None, None
    return longest_k - 1 if left < 0 else left, longest_q - 1 if right < 0 else right


def flash2(
    q, k, v, offsets_q, offsets_k, longest_q, longest_k, dropout_p, softmax_scale, causal, **options: Any
) -> Any:
    left, right = options.get("window_size_left", -1), options.get("window_size_right", -1)
    sides = as_flash2(causal, left, right, longest_q, longest_k)
    spans = Spans(offsets_q, offsets_k, longest_q, longest_k)
    return dense(Inputs(q, k, v), spans, softmax_scale, sides, options.get("softcap", 0.0))


def of_torch(
    q, k, v, offsets_q, offsets_k, longest_q, longest_k, dropout, causal, debug, *, scale, **options: Any
) -> Any:
    left, right = options.get("window_size_left"), options.get("window_size_right")
    left, right = (-1 if side is None else side for side in (left, right))
    sides = as_flash2(causal, left, right, longest_q, longest_k)
    assert "softcap" not in options
    return dense(Inputs(q, k, v), Spans(offsets_q, offsets_k, longest_q, longest_k), scale, sides, 0.0)


def flash3(
    q, k, v, *, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, **spans: Any
) -> Any:
    of_call = Spans(**spans)
    longest = of_call.max_seqlen_q, of_call.max_seqlen_k
    sides = as_flash3(causal, window_size_left, window_size_right, *longest)
    return dense(Inputs(q, k, v), of_call, softmax_scale, sides, softcap)


def flash4(
    q, k, v, *, softmax_scale, causal, return_lse, out, lse, window_size_left=None, softcap=None, **spans: Any
) -> Any:
    """`flash_attn/cute/interface.py`: None is open, and every number is one."""
    sides = window_size_left, 0 if causal else None
    results = dense(Inputs(q, k, v), Spans(**spans), softmax_scale, sides, softcap or 0.0)
    assert lse is None or lse.stride(1) == 1
    return tuple(x if room is None else room.copy_(x) for x, room in zip(results, (out, lse), strict=True))


PACKAGES: dict[str, Callable[[], Kernel]] = {
    "flash4": lambda: Flash4Kernel(SimpleNamespace(_flash_attn_fwd=flash4, _flash_attn_bwd=None)),
    "flash3": lambda: Flash3Kernel(SimpleNamespace(_flash_attn_forward=flash3, _flash_attn_backward=None)),
    "flash2": lambda: Flash2Kernel(
        SimpleNamespace(_flash_attn_varlen_forward=flash2, _flash_attn_varlen_backward=None)
    ),
    "torch_varlen": TorchVarlenKernel,
}


def computes(name: str, spec: AttentionSpec) -> bool:
    return not spec.softcap or "softcap" in KERNELS[name].capabilities.options


def call_of(spec: AttentionSpec) -> tuple[Inputs, Spans]:
    queries, keys = zip(*(CAUSAL_TASKS if spec.causal else OTHER_TASKS), strict=True)
    offsets = [torch.tensor([0, *rows]).cumsum(0).to(torch.int32) for rows in (queries, keys)]
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(queries), 4, 3), (sum(keys), 2, 3), (sum(keys), 2, 3)
    inputs = Inputs(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))
    return inputs, Spans(*offsets, max(queries), max(keys))


@pytest.mark.parametrize(
    ("name", "spec"), [(name, spec) for name in PACKAGES for spec in SPECS if computes(name, spec)]
)
def test_packages_get_the_window_that_is_asked_for(
    name: str, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "torch_varlen":
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", of_torch)
    inputs, spans = call_of(spec)
    got = PACKAGES[name]().forward(inputs, spans, spec)

    for result, right in zip(got, ReferenceKernel().forward(inputs, spans, spec), strict=True):
        torch.testing.assert_close(result, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_by_head", [True, False])
def test_flash_attention_4_fills_its_room(head_by_head: bool) -> None:
    """It writes log-sum-exps itself where rows of a head follow each other; elsewhere they are copied."""
    spec = AttentionSpec(0.5)
    inputs, spans = call_of(spec)
    out, lse = ReferenceKernel().forward(inputs, spans, spec)
    heads, rows = lse.shape
    of_more_heads = lse.new_zeros(heads + 1, rows) if head_by_head else lse.new_zeros(rows, heads + 1).t()
    room = Room(torch.zeros_like(out), of_more_heads[1:])
    got = PACKAGES["flash4"]().forward(inputs, spans, spec, room)

    for result, place, right in zip(got, room, (out, lse), strict=True):
        assert result is place
        torch.testing.assert_close(result, right, rtol=0, atol=1e-12)


# The names of each package's functions, in forward and in backward.
FUNCTIONS = {
    Flash4Kernel: ("_flash_attn_fwd", "_flash_attn_bwd"),
    Flash3Kernel: ("_flash_attn_forward", "_flash_attn_backward"),
    Flash2Kernel: ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
    TorchVarlenKernel: ("_flash_attention_forward", "_flash_attention_backward"),
}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "-".join(map(str, spec[1:4])))
@pytest.mark.parametrize("kind", FUNCTIONS, ids=lambda kind: kind.__name__)
def test_backward_gets_the_same_window_as_forward(
    kind: type[Any], spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[object], dict[str, object]]] = []

    nothing = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0}

    def note(*given: object, **named: object) -> list[torch.Tensor]:
        options = {name: named.get(name, default) for name, default in nothing.items()}
        asked.append(([x for x in given if type(x) is int], options))
        return [torch.zeros(1)] * 3

    functions = dict.fromkeys(FUNCTIONS[kind], note)
    for name in functions if kind is TorchVarlenKernel else ():
        monkeypatch.setattr(torch.ops.aten, name, note)
    kernel = kind() if kind is TorchVarlenKernel else kind(SimpleNamespace(**functions))
    inputs, spans = call_of(spec)
    zeros = [torch.zeros(1)] * 5
    kernel.forward(inputs, spans, spec)
    kernel.backward(torch.zeros(1), Saved(*zeros), Gradients(*zeros[:3]), spans, spec)

    [(forward_rows, forward), (backward_rows, backward)] = asked
    asked_for = {"window_size_left": spec.window_tokens - 1, "softcap": spec.softcap}
    assert forward == backward == {**nothing, **asked_for}
    assert forward_rows == backward_rows or kind is Flash3Kernel  # rows of the longest task, some by name


@pytest.mark.parametrize("switch", [(False, False), (True, True), (True, False)], ids=["off", "warns", "on"])
def test_deterministic_call_sets_the_switch_of_torch_and_puts_it_back(
    switch: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's kernel is deterministic only if the switch is on and does not only warn."""

    def now() -> tuple[bool, bool]:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled(), warns

    seen: list[tuple[bool, bool]] = []

    def note(*_: object, **__: object) -> list[torch.Tensor]:
        seen.append(now())
        return [torch.zeros(1)] * 3

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", note)
    spec = AttentionSpec(0.6, deterministic=True)
    zeros = [torch.zeros(1)] * 5
    before = now()
    try:
        torch.use_deterministic_algorithms(switch[0], warn_only=switch[1])
        _, spans = call_of(spec)
        TorchVarlenKernel().backward(torch.zeros(1), Saved(*zeros), Gradients(*zeros[:3]), spans, spec)
        assert seen == [(True, False)]
        assert now() == switch
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
