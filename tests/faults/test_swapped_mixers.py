"""Mixers that are changed after the first pass: another function is followed, and what no longer keeps documents apart
is named before a step is taken."""

import copy
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset

import distca_hf
from distca_hf.errors import UnsupportedAttentionError
from support.carried_steps import LARGEST_DIFFERENCE, LENGTHS, THREE, UNCUT, step_alone, step_on_ranks
from support.models import tiny_model
from support.versions import states_travel
from support.wide_models import wide_model, wide_module


pytestmark = [pytest.mark.usefixtures("one_core"), states_travel]
KIND, RULE = "qwen3_next", "torch_chunk_gated_delta_rule"
BUILD = partial(wide_model, KIND, "distca")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The modelling module of the model; its functions are put back."""
    found = wide_module(KIND)
    monkeypatch.setattr(found, RULE, getattr(found, RULE))
    mixer_class = found.Qwen3NextGatedDeltaNet
    monkeypatch.setattr(mixer_class, "forward", mixer_class.forward)
    return found


@pytest.mark.parametrize("ranks", [THREE, UNCUT], ids=["cut", "uncut"])
def test_another_function_is_followed_from_the_next_pass_on(ranks: tuple[str, ...], module: ModuleType) -> None:
    """As if a kernel was put there: mixers call it, with the numbers of every document alone."""
    original, calls = getattr(module, RULE), list[int]()

    @wraps(original)
    def another(query: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        calls.append(query.shape[1])
        return original(query, *args, **keywords)

    def swap(model: Any, rank: int, number: int) -> None:
        if number:
            setattr(module, RULE, another)

    made = step_on_ranks(BUILD, ranks, change=swap, passes=2)

    tokens = sum(calls)
    assert made.difference(step_alone(wide_model(KIND, "sdpa"))) <= LARGEST_DIFFERENCE
    assert tokens >= 2 * sum(LENGTHS), "in both mixers, on all ranks"


def set_forward(model: Any) -> None:
    """What `kernelize` does."""
    mixer = model.model.layers[2].linear_attn
    mixer.forward = type(mixer).forward.__get__(mixer)


def replace_module(model: Any) -> None:
    layer = model.model.layers[2]
    other = copy.deepcopy(layer.linear_attn)
    del other.forward
    layer.linear_attn = other


@pytest.mark.parametrize(
    ("change", "ranks"),
    [(set_forward, THREE), (replace_module, UNCUT)],
    ids=["set, cut", "replaced, uncut"],
)
def test_what_runs_in_place_of_a_mixer_is_named(change: Callable[[Any], None], ranks: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedAttentionError, match=r"model\.layers\.2\.linear_attn, or its forward") as caught:
        step_on_ranks(BUILD, ranks, change=lambda model, rank, number: change(model))

    assert "no step was taken" in str(caught.value)


def test_it_is_named_in_a_pass_without_a_plan_too() -> None:
    model = tiny_model("qwen3_5", num_hidden_layers=2).eval()
    distca_hf.enable(model, distca_hf.DistCAPlugin(), longest_document_tokens=200)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    model(positions, position_ids=positions, use_cache=False)
    mixer = model.model.layers[0].linear_attn
    mixer.forward = type(mixer).forward.__get__(mixer)

    model(positions[:, :4])  # one document has nothing to be kept apart from
    with pytest.raises(UnsupportedAttentionError, match=r"model\.layers\.0\.linear_attn"):
        model(positions, position_ids=positions, use_cache=False)


def test_another_forward_function_of_the_class_is_refused_every_time(module: ModuleType) -> None:
    model = wide_model(KIND, "distca")
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    distca_hf.enable(model, plugin)
    (batch,) = plugin.dataloader(Dataset.from_dict({"input_ids": [[3, 4, 5], [6, 7, 8]]}), device="cpu", model=model)
    model(**batch)
    mixer_class = module.Qwen3NextGatedDeltaNet
    original = mixer_class.forward
    mixer_class.forward = wraps(original)(lambda self, *args, **keywords: 2 * original(self, *args, **keywords))

    for _ in range(2):
        with pytest.raises(UnsupportedAttentionError, match=r"Qwen3NextGatedDeltaNet\.forward was replaced after"):
            model(**batch)


def test_a_wrapper_that_would_not_run_is_refused_before_the_first_pass(module: ModuleType) -> None:
    original = module.Qwen3NextGatedDeltaNet.forward
    wrapper = wraps(original)(lambda self, *args, **keywords: 2 * original(self, *args, **keywords))
    module.Qwen3NextGatedDeltaNet.forward = wrapper

    with pytest.raises(UnsupportedAttentionError, match=f"forward is wrapped by a function of {__name__}, which"):
        distca_hf.enable(wide_model(KIND, "distca"), distca_hf.DistCAPlugin(tokens_per_rank=96))
