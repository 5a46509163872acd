"""States that travel: in fp64, a step of every family of hybrids on cut documents has the gradients of a step on every
document alone. All ranks make the same exchanges, and none without need."""

import inspect
import math
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.integrations.models.mixers import mixers_of
from distca_hf.layout import Layout
from distca_hf.planning import folds
from distca_hf.planning.folds import Fold
from distca_hf.planning.fragments import Fragments
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import plan_in_place
from distca_hf.prefixes import SharedPrefixes
from distca_hf.runtime.carried_states import After, CarriedRows, SentSummaries
from distca_hf.runtime.device_fragments import PinnedFragments
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.testing import run_ranks
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
from support.thorough import is_thorough
from support.versions import states_travel
from support.wide_models import FAMILIES, tiny_config_of, wide_model


pytestmark = [pytest.mark.usefixtures("one_core"), states_travel]
CHECKPOINTING = ("none", "non-reentrant", "reentrant", "attending again")
KINDS = ("qwen3_next", "bamba", "jamba", "lfm2")  # a family of each kind of mixer
# One layout more for each kind, besides the one that all families have.
ALSO = dict(zip(KINDS, (EIGHT, FOUR, TWO, ONE_WITHOUT), strict=True))


@cache
def alone(model_type: str) -> Step:
    """The step on every document alone."""
    return step_alone(wide_model(model_type, FAMILIES[model_type].plain))


def step(model_type: str, ranks: tuple[str, ...], checkpointing: str) -> Step:
    """The step on cut documents."""
    return step_on_ranks(partial(wide_model, model_type, "distca"), ranks, checkpointing)


def in_turn(model_type: str) -> str:
    """A way to checkpoint: each is that of several families."""
    return CHECKPOINTING[1 + [*FAMILIES].index(model_type) % 3]


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
    expected, plain = alone(model_type), step(model_type, THREE, "none")

    assert plain.difference(expected) <= LARGEST_DIFFERENCE
    if model_type in ALSO:
        assert step(model_type, ALSO[model_type], "none").difference(expected) <= LARGEST_DIFFERENCE
    # Summaries start before whole documents run, so the latest exchange of a layer goes back first.
    assert len(plain.forward) == (1 if model_type == "lfm2" else 2) * len(
        {place.split(", ")[0] for place in plain.forward}
    )
    back = [place.replace("forward", "backward") for place in reversed(plain.forward)]
    assert plain.backward == back
    in_all_ways = model_type in KINDS or is_thorough()
    for checkpointing in CHECKPOINTING[1:] if in_all_ways else ():  # the next test checkpoints other families
        made = step(model_type, THREE, checkpointing)
        assert made.difference(expected) <= LARGEST_DIFFERENCE, checkpointing
        assert made.forward == plain.forward
        if checkpointing == "reentrant":
            assert [place for place in made.backward if "backward" in place] == back
            assert {place for place in made.backward if "forward" in place} == {*plain.forward}, "may be nested"
        else:
            assert made.backward == back, "recomputation exchanges nothing that was saved"


@pytest.mark.parametrize("model_type", [name for name in (FAMILIES if is_thorough() else KINDS) if name != "lfm2"])
def test_steps_are_right_if_ranks_divide_heads(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer heads than ranks, too: some fold none."""
    monkeypatch.setattr(folds, "LEAST_SAVED_BYTES", -math.inf)
    in_all_ways = model_type in KINDS or is_thorough()
    first = "none" if in_all_ways else in_turn(model_type)
    expected, plain = alone(model_type), step(model_type, THREE, first)

    assert plain.difference(expected) <= LARGEST_DIFFERENCE
    if in_all_ways:
        assert step(model_type, EIGHT, "none").difference(expected) <= LARGEST_DIFFERENCE
    returned = [place for place in plain.forward if "states" in place]
    assert len(returned) == len({*returned}) == len([place for place in plain.forward if "summaries" in place])
    back = [place.replace("forward", "backward") for place in reversed(plain.forward)]
    assert first == "reentrant" or plain.backward == back
    for checkpointing in CHECKPOINTING[1:] if is_thorough() else [in_turn(model_type)] * in_all_ways:
        again = step(model_type, THREE, checkpointing)
        assert again.difference(expected) <= LARGEST_DIFFERENCE, checkpointing
        assert checkpointing == "reentrant" or again.backward == back


@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear"])
def test_kernels_for_packed_rows_run_once_for_each_group(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole documents, followed fragments, and those that begin with a state each."""
    names = names_of_mixers(model_type)
    name = "chunk_kimi_delta_attention" if model_type == "kimi_linear" else "torch_chunk_gated_delta_rule"
    rule, calls = names[name], list[tuple[int, bool]]()

    def packed(
        *of_rows: Any,
        g: Any,
        beta: Any,
        initial_state: Any = None,
        output_final_state: bool = False,
        cu_seqlens: Any = None,
        **more: Any,
    ) -> Any:
        calls.append((of_rows[0].shape[1], initial_state is not None))
        offsets = [0, of_rows[0].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        assert initial_state is None or len(initial_state) == len(offsets) - 1
        made = [
            rule(
                *(x[:, start:stop] for x in of_rows),
                g=g[:, start:stop],
                beta=beta[:, start:stop],
                initial_state=None if initial_state is None else initial_state[number : number + 1],
                output_final_state=output_final_state,
                **more,
            )
            for number, (start, stop) in enumerate(pairwise(offsets))
        ]
        states = torch.cat([state for _, state in made]) if output_final_state else None
        return torch.cat([out for out, _ in made], dim=1), states

    expected = alone(model_type)
    monkeypatch.setitem(names, name, packed)

    assert step(model_type, THREE, "none").difference(expected) <= LARGEST_DIFFERENCE
    layout = layout_of(THREE)
    rows = max(layout.rank_tokens.tolist()) + 3
    expected_calls = list[tuple[int, bool]]()
    for rank in range(layout.num_ranks):
        of_groups = {"whole": rows - int(layout.rank_tokens[rank]), "followed": 0, "middle": 0, "last": 0}
        for document, start, stop in layout.held_by(rank):
            is_followed = stop < layout.document_tokens[document]
            of_groups["followed" if is_followed else "last" if start else "whole"] += stop - start
            of_groups["middle"] += (stop - start) * (is_followed and start > 0)
        expected_calls += [(tokens, group in ("middle", "last")) for group, tokens in of_groups.items() if tokens]
    assert sorted(calls) == sorted(2 * expected_calls), "in both mixers of every rank"


def test_heads_are_divided_if_that_saves_more_than_an_exchange_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(EIGHT)
    fragments = [Fragments.of(layout, rank, 3) for rank in range(layout.num_ranks)]
    held = [PinnedFragments.prepare(one, pin=False).to(torch.device("cpu")) for one in fragments]
    heads = 16

    def divided(saved_units: float) -> set[bool]:
        monkeypatch.setattr(folds, "LEAST_SAVED_BYTES", saved_units)
        return {one.fold(heads, 1).on_host.heads == heads for one in held}

    saved = heads * held[0].by_ranks.on_host.busiest - Fold.of(fragments[0].cut, 0, heads).busiest
    assert saved > 0
    assert divided(saved - 1) == {True}, "the same on all ranks"
    assert divided(saved) == {False}
    assert held[0].fold(heads, 2) is held[0].fold(heads, 2), "made once for a plan"


@pytest.mark.parametrize(
    ("model_type", "checkpointing"),
    [
        *(("qwen3_next", way) for way in ("non-reentrant", "attending again")),
        ("jamba", "reentrant"),
    ],
)
def test_two_passes_may_run_before_backward(model_type: str, checkpointing: str) -> None:
    """As of a loss that compares them. Recomputation has the rows of its pass; Jamba's layers pass no keywords on."""
    build = partial(wide_model, model_type, "distca")
    made = step_on_ranks(build, THREE, checkpointing, also=(ONE_WITHOUT, UNCUT))
    expected = alone(model_type)

    assert made.difference(Step({name: 3 * one for name, one in expected.gradients.items()})) <= LARGEST_DIFFERENCE


@pytest.mark.parametrize(("model_type", "checkpointing"), zip(KINDS, CHECKPOINTING, strict=True))
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


@pytest.mark.parametrize(
    ("model_type", "trained", "checkpointing"),
    [
        (model_type, trained, checkpointing)
        for one, model_type in enumerate(KINDS[:3])
        for other, trained in enumerate([*TRAINED, "LoRA"])
        for number, checkpointing in enumerate(CHECKPOINTING[:3])
        # Otherwise a third of all pairs, each with one way to checkpoint.
        if is_thorough() or (number == (one + other) % 3 and (one + other) % 3 == 1)
    ],
)
def test_a_rank_without_fragments_makes_the_exchanges_of_the_others(
    model_type: str, trained: str, checkpointing: str
) -> None:
    """Forward and backward, whichever parameters are trained: otherwise ranks would wait for it."""
    build = partial(build_partly_trained, model_type, trained)
    torch.manual_seed(0)
    expected = step_alone(build(FAMILIES[model_type].plain))
    assert expected.gradients
    made = step_on_ranks(partial(build, "distca"), ONE_WITHOUT, checkpointing)

    assert made.difference(expected) <= LARGEST_DIFFERENCE


def names_of_mixers(model_type: str) -> dict[str, Any]:
    """The functions that mixers of a family call, by name."""
    mixer = next(iter(mixers_of(wide_model(model_type, "distca")).values()))
    names: dict[str, Any] = inspect.unwrap(type(mixer).forward).__globals__
    return names


def test_states_of_a_kernel_may_need_gradients_because_of_any_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """All outputs of a function of autograd do if one input does, on ranks with fragments only."""
    names = names_of_mixers("bamba")
    scan = names["mamba2_chunk_scan"]

    def as_one_function(
        *of_rows: Any, D: torch.Tensor, initial_states: Any = None, return_final_states: bool = False, **more: Any
    ) -> Any:
        made = scan(*of_rows, D=D, initial_states=initial_states, return_final_states=return_final_states, **more)
        return (made[0], made[1] + 0 * D.sum()) if return_final_states else made

    monkeypatch.setitem(TRAINED, "only D", lambda name: name.endswith(".D"))
    build = partial(build_partly_trained, "bamba", "only D")
    expected = step_alone(build(FAMILIES["bamba"].plain))
    monkeypatch.setitem(names, "mamba2_chunk_scan", as_one_function)

    assert step_on_ranks(partial(build, "distca"), ONE_WITHOUT).difference(expected) <= LARGEST_DIFFERENCE


def test_a_selective_scan_that_returns_no_state_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have no gradients of the last state."""
    names, expected = names_of_mixers("jamba"), alone("jamba")
    scan = names["mamba_selective_scan"]

    def without_state(*of_rows: Any, return_last_state: bool = False, **more: Any) -> torch.Tensor:
        assert not return_last_state
        output: torch.Tensor = scan(*of_rows, **more)
        return output

    monkeypatch.setitem(names, "mamba_selective_scan", without_state)

    assert step("jamba", THREE, "none").difference(expected) <= LARGEST_DIFFERENCE


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "jamba"])
def test_chains_are_computed_in_fp64_under_autocast(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever dtype layers compute in: an error of one fragment would grow with those after it."""
    states = SentSummaries.states
    computed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def noted_states(sent: SentSummaries, after: After) -> tuple[torch.Tensor, torch.Tensor]:
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


def test_gradients_of_many_halos_of_a_token_are_added_in_fp32() -> None:
    """Documents that continue a prefix see its last tokens: in bf16 a sum of ones would stop at 256."""
    prefix_tokens, count = 9, 400
    spans = [[(0, 0, 20)], *([(0, 0, prefix_tokens), (number, prefix_tokens, 11)] for number in range(1, count + 1))]
    packs = [[20, *[11] * (count // 2)], [11] * (count // 2)]
    layout = Layout.from_packs(packs).sharing(SharedPrefixes.of_spans(spans, range(count + 1)))
    plan = plan_in_place(layout)

    def body(transport: Transport) -> torch.Tensor:
        kinds = PinnedKinds.prepare(RoutedKinds.of(plan, transport.rank), False, 3)
        live = LivePlan(0, kinds.planned(torch.device("cpu"), plan.fingerprint), transport, DistCAConfig())
        x_1CT = torch.zeros(1, 2, int(layout.rank_rows[transport.rank]), dtype=torch.bfloat16, requires_grad=True)
        sums = CarriedRows(live).convolved(
            x_1CT, lambda x: sum(pad(x, (at, 0))[..., : x.shape[2]] for at in range(4)), ""
        )
        sums.sum().backward()
        assert x_1CT.grad is not None
        return x_1CT.grad

    of_holder, _ = run_ranks(2, body)
    # A token is seen by itself and the three after it, of each document that it is in.
    expected = [4] * 6 + [4 + count, 4 + 2 * count, 4 + 2 * count] + [4] * 8 + [3, 2, 1]
    torch.testing.assert_close(of_holder[0, 0, :20].float(), torch.tensor(expected).float(), rtol=2**-8, atol=0)
