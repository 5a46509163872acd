"""States that travel: in fp64, a step of every family of hybrids on cut documents has the gradients of a step on every
document alone. All ranks make the same exchanges, and none without need."""

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from distca_hf.runtime.carried_states import After, SentSummaries
from support.carried_steps import (
    EIGHT,
    FOUR,
    LARGEST_DIFFERENCE,
    ONE_WITHOUT,
    THREE,
    TWO,
    UNCUT,
    Step,
    layout_of,
    step_alone,
    step_on_ranks,
)
from support.wide_models import FAMILIES, tiny_config_of, wide_model


pytestmark = pytest.mark.usefixtures("one_core")
CHECKPOINTING = ("none", "non-reentrant", "reentrant")
# One layout more for each family, besides those that all have.
ALSO = dict(zip(FAMILIES, [EIGHT, FOUR, TWO, EIGHT, EIGHT, FOUR, TWO, FOUR, EIGHT, ONE_WITHOUT, TWO], strict=True))


@lru_cache(maxsize=1)
def alone(model_type: str) -> Step:
    """The step on every document alone."""
    return step_alone(wide_model(model_type, FAMILIES[model_type].plain))


def step(model_type: str, ranks: tuple[str, ...], checkpointing: str) -> Step:
    """The step on cut documents."""
    return step_on_ranks(partial(wide_model, model_type, "distca"), ranks, checkpointing)


def test_layouts_are_as_difficult_as_they_are_meant_to_be() -> None:
    for ranks in (THREE, ONE_WITHOUT, FOUR, EIGHT):
        layout = layout_of(ranks)
        held = [layout.held_by(rank) for rank in range(layout.num_ranks)]
        of_longest = [[start for document, start, _ in segments if document == 0] for segments in held]
        assert layout.cut_documents == 3
        assert sum(map(bool, of_longest)) >= (2 if ranks == ONE_WITHOUT else 3), "it is on three ranks"
        assert {stop - start for segments in held for _, start, stop in segments} >= {1, 2}
        assert len({*map(int, layout.rank_tokens)}) > 1, "ranks have unequal padding"
        if ranks != EIGHT:
            assert any(starts != sorted(starts) for starts in of_longest), "out of document order"
    assert layout_of(UNCUT).cut_documents == 0


@pytest.mark.parametrize("model_type", FAMILIES)
def test_step_on_cut_documents_is_that_of_every_document_alone(model_type: str) -> None:
    expected = alone(model_type)
    plain, saved, again = (step(model_type, THREE, checkpointing) for checkpointing in CHECKPOINTING)

    assert plain.difference(expected) <= LARGEST_DIFFERENCE
    assert saved.difference(expected) <= LARGEST_DIFFERENCE, "non-reentrant checkpointing"
    assert again.difference(expected) <= LARGEST_DIFFERENCE, "reentrant checkpointing"
    assert step(model_type, ALSO[model_type], "none").difference(expected) <= LARGEST_DIFFERENCE

    # Summaries start before whole documents run, so the latest exchange of a layer goes back first.
    assert len(plain.forward) == (1 if model_type == "lfm2" else 2) * len(
        {place.split(", ")[0] for place in plain.forward}
    )
    back = [place.replace("forward", "backward") for place in reversed(plain.forward)]
    assert (plain.backward, saved.backward) == (back, back), "recomputation exchanges nothing that was saved"
    assert (saved.forward, again.forward) == (plain.forward, plain.forward)
    assert [place for place in again.backward if "backward" in place] == back
    assert {place for place in again.backward if "forward" in place} == {*plain.forward}, "regions may be nested"


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("model_type", ["qwen3_next", "jamba", "lfm2"])
def test_two_passes_may_run_before_backward(model_type: str, checkpointing: str) -> None:
    """As of a loss that compares them. Recomputation has the rows of its pass; Jamba's layers pass no keywords on."""
    build = partial(wide_model, model_type, "distca")
    made = step_on_ranks(build, THREE, checkpointing, also=(ONE_WITHOUT, UNCUT))
    expected = alone(model_type)

    assert made.difference(Step({name: 3 * one for name, one in expected.gradients.items()})) <= LARGEST_DIFFERENCE


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "jamba", "lfm2"])
def test_mixers_exchange_nothing_if_no_document_is_cut(model_type: str, checkpointing: str) -> None:
    made = step(model_type, UNCUT, checkpointing)

    assert (made.forward, made.backward) == ([], [])
    assert made.difference(alone(model_type)) <= LARGEST_DIFFERENCE


TRAINED = {
    "all": lambda name: True,
    "only A_log": lambda name: name.endswith("A_log"),
    "only in_proj": lambda name: "in_proj" in name,
    "all but mixers": lambda name: ".mamba." not in name and ".linear_attn." not in name,
}


def build_partly_trained(model_type: str, trained: str, implementation: str) -> Any:
    """Returns a model of which some parameters are trained, or LoRA's."""
    model = wide_model(model_type, implementation)
    if trained == "LoRA":
        peft = pytest.importorskip("peft")
        targets = r".*(mamba|linear_attn)\.(in_proj|in_proj_qkvz|out_proj)"
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets)).double()
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero at first, which would leave lora_A without gradients
                torch.nn.init.normal_(parameter, std=0.1)
        return adapted
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED[trained](name))
    return model


@pytest.mark.parametrize("trained", [*TRAINED, "LoRA"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "jamba"])
def test_a_rank_without_fragments_makes_the_exchanges_of_the_others(model_type: str, trained: str) -> None:
    """Forward and backward, whichever parameters are trained: otherwise ranks would wait for it."""
    build = partial(build_partly_trained, model_type, trained)
    torch.manual_seed(0)
    expected = step_alone(build(FAMILIES[model_type].plain))
    assert expected.gradients
    for checkpointing in CHECKPOINTING:
        made = step_on_ranks(partial(build, "distca"), ONE_WITHOUT, checkpointing)

        assert made.difference(expected) <= LARGEST_DIFFERENCE, checkpointing


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "jamba"])
def test_chains_are_computed_in_fp64_under_autocast(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever dtype layers compute in: an error of one fragment would grow with those after it."""
    states = SentSummaries.states
    computed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def noted_states(sent: SentSummaries, after: After) -> tuple[list[torch.Tensor], torch.Tensor]:
        def noted_after(summary: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
            found = after(summary, state)
            with torch.autocast("cpu", enabled=False):
                computed.append((found, after(summary, state)))
            return found

        return states(sent, noted_after)

    monkeypatch.setattr(SentSummaries, "states", noted_states)
    config, implementation = tiny_config_of(model_type), {"attn_implementation": "distca"}
    build = partial(AutoModelForCausalLM.from_config, config, **implementation, experts_implementation="eager")
    made = step_on_ranks(build, THREE, autocast=True)

    assert computed
    for found, expected in computed:
        assert found.dtype == torch.float64
        assert torch.equal(found, expected)
    assert all(gradient.isfinite().all() for gradient in made.gradients.values())
