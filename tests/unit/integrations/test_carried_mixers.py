"""Mixers whose states travel: which ones are accepted, and copies of models that have them."""

import copy
import pickle
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.models.bamba import modeling_bamba

from distca_hf.integrations.models.carried_mixers import _packed_by, _scan, carries
from distca_hf.integrations.models.mixers import halo_tokens_for, mixers_of, needs_whole_documents
from distca_hf.layout import Layout
from distca_hf.planning.fragments import Fragments
from distca_hf.runtime.device_fragments import PinnedFragments
from lib.trainer_batches import rows_on_one_device
from support.carried_steps import ONE_WITHOUT, step_alone, step_on_ranks
from support.models import tiny_model
from support.versions import states_travel
from support.wide_models import FAMILIES, wide_model


pytestmark = pytest.mark.usefixtures("one_core")


def mixer_of(kind: str = "qwen3_5") -> Any:
    return next(iter(mixers_of(tiny_model(kind, "sdpa")).values()))


@states_travel
@pytest.mark.parametrize("kind", FAMILIES)
def test_states_of_known_families_travel(kind: str) -> None:
    model = wide_model(kind, "eager")

    assert not needs_whole_documents(model)
    assert halo_tokens_for(model) == (2 if kind == "lfm2" else 3)


def remote_code(mixer: Any) -> None:
    type(mixer).__module__ = "transformers_modules.someone.model"


def kernel_on_the_instance(mixer: Any) -> None:
    mixer.forward = lambda hidden_states, **_: hidden_states


def another_convolution(mixer: Any) -> None:
    mixer.more = nn.Conv1d(4, 4, 4)


def another_recurrence(mixer: Any) -> None:
    mixer.more = nn.GRU(4, 4)


def with_forward(function: Callable[..., Any]) -> Callable[[Any], None]:
    """Replaces the forward function of the mixer's class by one of the same module."""

    def change(mixer: Any) -> None:
        names = {**type(mixer).forward.__globals__, "new_scan": torch.cumsum}
        type(mixer).forward = type(function)(function.__code__, names)

    return change


def with_functions_as_attributes(self: Any, hidden_states: torch.Tensor) -> Any:
    return self.torch_chunk_gated_delta_rule(causal_conv1d_fn(hidden_states, self.conv1d.weight))  # type: ignore[name-defined]  # noqa: F821


def with_an_unknown_function(self: Any, hidden_states: torch.Tensor) -> Any:
    return new_scan(causal_conv1d_fn(hidden_states, self.conv1d.weight), 1)  # type: ignore[name-defined]  # noqa: F821


def with_an_unknown_method(self: Any, hidden_states: torch.Tensor) -> Any:
    return self.scan(causal_conv1d_fn(hidden_states, self.conv1d.weight))  # type: ignore[name-defined]  # noqa: F821


def add_method(mixer: Any) -> None:
    type(mixer).scan = lambda self, x: x.cumsum(1)
    with_forward(with_an_unknown_method)(mixer)


@states_travel
@pytest.mark.parametrize(
    "change",
    [
        remote_code,
        kernel_on_the_instance,
        another_convolution,
        another_recurrence,
        with_forward(with_functions_as_attributes),
        with_forward(with_an_unknown_function),
        add_method,
    ],
)
def test_a_mixer_that_may_mix_otherwise_keeps_documents_whole(change: Callable[[Any], None]) -> None:
    mixer = mixer_of()
    mixer.__class__ = type(type(mixer).__name__, (type(mixer),), {"__module__": type(mixer).__module__})
    assert carries(mixer)

    change(mixer)

    assert not carries(mixer)


@states_travel
def test_a_mixer_that_is_sharded_by_itself_is_known() -> None:
    mixer = mixer_of()
    mixer.__class__ = type("FSDPMixer", (FSDPModule, type(mixer)), {"__module__": "torch.distributed.fsdp"})

    assert carries(mixer)


def as_transformers_calls(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel as Transformers does, whose own function takes any keyword."""

    @wraps(lambda query, **keywords: query)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        return implementation(*args, **keywords)

    return wrapped


def test_kernels_for_packed_rows_are_told_where_documents_begin() -> None:
    layout = Layout.from_segments([5, 9, 3], [[(0, 0, 5), (1, 0, 4), (2, 0, 3)], [(1, 4, 9)]], [14, 5])
    held = PinnedFragments.prepare(Fragments.of(layout, 0, 3), pin=False).to(torch.device("cpu"))
    delta = _packed_by(as_transformers_calls(lambda q, cu_seqlens=None, cu_seqlens_cpu=None: q), "cu_seqlens")
    scan = _packed_by(as_transformers_calls(lambda x, seq_idx=None: x), "seq_idx")
    assert delta is not None
    assert scan is not None

    # Two whole documents, and padding, which counts as one; the fragment is in neither call.
    assert {name: x.tolist() for name, x in delta(held.whole).items()} == {
        "cu_seqlens": [0, 5, 8, 10],
        "cu_seqlens_cpu": [0, 5, 8, 10],
    }
    assert scan(held.whole)["seq_idx"].tolist() == [[0] * 5 + [1] * 3 + [2] * 2]
    assert delta(held.followed)["cu_seqlens"].tolist() == [0, 4]
    assert held.whole.offsets is held.whole.offsets, "made once for a plan"
    assert _packed_by(as_transformers_calls(lambda q, **keywords: q), "cu_seqlens") is None


@states_travel
@pytest.mark.parametrize(("kind", "width"), [("lfm2", {"conv_L_cache": 1}), ("bamba", {"mamba_d_conv": 1})])
def test_a_convolution_over_one_token_is_exact(kind: str, width: dict[str, int]) -> None:
    step = step_on_ranks(partial(wide_model, kind, "distca", **width), ONE_WITHOUT)

    assert step.difference(step_alone(wide_model(kind, "sdpa", **width))) <= 1e-12


@states_travel
def test_a_model_can_be_copied_and_stored_after_a_step() -> None:
    models = list[Any]()

    def build() -> Any:
        models.append(wide_model("qwen3_5", "distca"))
        return models[-1]

    step = step_on_ranks(build, ONE_WITHOUT)
    for model in models:
        model.zero_grad()
    copied, stored = copy.deepcopy(models[0]), pickle.loads(pickle.dumps(models[1]))

    ids = torch.arange(9)[None]
    with torch.no_grad():
        logits = [model.eval()(input_ids=ids, use_cache=False).logits for model in (models[0], copied, stored)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert step.gradients


@states_travel
def test_gradients_of_fragments_are_rounded_after_they_are_summed() -> None:
    """The halves of the document almost cancel each other in this gradient, so rounding one of them would show."""
    tokens, heads = 32, 2
    rows = rows_on_one_device([(0, 0, tokens // 2), (0, tokens // 2, tokens)], 3, torch.device("cpu"))
    x_1THP, B_1TGS = torch.ones(1, tokens, heads, 4), torch.full((1, tokens, 1, 4), 1e-3)
    dout_1THP = torch.full((1, tokens, heads, 4), -1.0)
    dout_1THP[:, : tokens // 2] = 1.02

    def gradient(scan: Callable[..., Any], dtype: torch.dtype) -> torch.Tensor:
        D_H = torch.full((heads,), 0.1, dtype=dtype, requires_grad=True)
        x, dt, B = (one.to(dtype) for one in (x_1THP, torch.zeros(1, tokens, heads), B_1TGS))
        out = scan(x, dt, -torch.ones(heads), B, B, 8, D=D_H)
        return torch.autograd.grad(out, D_H, dout_1THP.to(out.dtype))[0].float()

    exact, cut = modeling_bamba.mamba2_chunk_scan, _scan(modeling_bamba.mamba2_chunk_scan, lambda: rows, "mixer")
    expected = gradient(exact, torch.float32)

    assert (gradient(cut, torch.bfloat16) - expected).abs().max() <= 2**-7 * expected.abs().max()
