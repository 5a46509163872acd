"""Saved positions, mutated: each is refused by the name of a field, or means the very same documents."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distca_hf
from distca_hf import Pipeline
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.prepare import Cursor
from distca_hf.comm.transport import LocalTransport
from distca_hf.errors import ConfigError
from distca_hf.testing import LoopbackTransport, run_ranks
from support.data import random_dataset


DATASET = random_dataset(60)


def loader_of(tokens: int, micro_steps: int = 1, **planner: Any) -> PlacedLoader:
    config = distca_hf.DistCAPlugin(tokens_per_rank=tokens)
    made = PlacedPlanner(config, 1, **planner)
    return PlacedLoader(DATASET, made, LocalTransport(), torch.device("cpu"), seed=3, micro_steps=micro_steps)


def taken_of(loader: PlacedLoader, micro_batches: int) -> dict[str, Any]:
    """The position after some micro-batches, as a file has it."""
    batches = iter(loader)
    list(islice(batches, micro_batches))
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    batches.close()  # type: ignore[attr-defined]
    return state


def resumed_in_other_sizes() -> dict[str, Any]:
    state = taken_of(loader_of(300), 2)
    for tokens in (200, 160):
        loader = loader_of(tokens)
        loader.load_state_dict(state)
        state = taken_of(loader, 2)
    return state


# Loaders, and positions that they, or others like them, have saved.
KINDS: dict[str, tuple[Callable[[], PlacedLoader], Callable[[], dict[str, Any]]]] = {
    "within an epoch": (lambda: loader_of(192), lambda: taken_of(loader_of(192), 5)),
    "at its beginning": (lambda: loader_of(192), lambda: taken_of(loader_of(192), 0)),
    "after steps": (lambda: loader_of(192, 3), lambda: taken_of(loader_of(192, 3), 6)),
    "within a step": (lambda: loader_of(192, 3), lambda: taken_of(loader_of(192, 3), 7)),
    "other sizes": (lambda: loader_of(160), resumed_in_other_sizes),
    "sizes to be changed": (lambda: loader_of(300, 2), lambda: taken_of(loader_of(192, 3), 6)),
    "whole documents": (
        lambda: loader_of(192, whole_documents=True),
        lambda: taken_of(loader_of(192, whole_documents=True), 4),
    ),
    "a pipeline": (
        lambda: loader_of(192, 4, step_shape=Pipeline(2)),
        lambda: taken_of(loader_of(192, 4, step_shape=Pipeline(2)), 5),
    ),
}


def documents_from(loader: PlacedLoader, state: dict[str, Any]) -> list[list[int]]:
    """Documents of the micro-batches from a position on, to the end of the next epoch."""
    loader.restart()
    loader.load_state_dict(state)
    position = loader._position
    later = Cursor(position.epoch + 1)
    return [
        packed.micro_batch(index).tolist()
        for packed, first in ((loader._packed(position), position.micro_batch), (loader._packed(later), 0))
        for index in range(first, packed.num_micro_batches)
    ]


@cache
def made(kind: str) -> tuple[PlacedLoader, dict[str, Any], list[list[int]]]:
    """A loader, a position, and the documents from there on."""
    make, save = KINDS[kind]
    loader, state = make(), save()
    return loader, state, documents_from(loader, state)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3) | st.integers(-2, 9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


def near(value: Any) -> Iterator[Any]:
    """Values that are easily taken for another one."""
    if type(value) is int:
        yield from (value + 1, value - 1, value + 3, 2 * value, -value, float(value), value + 0.9, str(value), 10**30)
    elif isinstance(value, list):
        yield from (
            value + value,
            value[:-1],
            value[::-1],
            [*value, [192, 1]],
            [[192, 0]] * 20_000,
            dict(enumerate(value)),
        )
        for at, inner in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in near(inner))
    elif isinstance(value, str):
        yield from (value[:-1], value.upper(), value + "0", None)
    else:
        yield from (int(value), str(value), not value)


@st.composite
def mutated(draw: st.DrawFn, state: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """A position in which one or two fields are others, or missing; and the names of these."""
    names = draw(st.lists(st.sampled_from(sorted(state)), min_size=1, max_size=2, unique=True))
    other = copy.deepcopy(state)
    for name in names:
        if draw(st.integers(0, 9)) == 0:
            del other[name]
        else:
            other[name] = draw(st.one_of(st.sampled_from(list(near(state[name]))), JSON))
    return names, other


@settings(max_examples=150)
@given(st.data(), st.sampled_from(sorted(KINDS)))
def test_mutated_positions_are_refused_by_name_or_mean_the_same(data: st.DataObject, kind: str) -> None:
    loader, state, documents = made(kind)
    names, other = data.draw(mutated(state))
    words, found = "", None
    try:
        found = documents_from(loader, other)
    except ConfigError as error:
        words = str(error)
    assert found == documents or any(name in words for name in names), words


def test_more_micro_batches_than_an_epoch_had_are_refused_also_in_other_sizes() -> None:
    state = taken_of(loader_of(192), 5) | {"micro_batch": 1000, "steps_from": 1000}
    for tokens in (192, 160):
        with pytest.raises(ConfigError, match=r"micro_batch.*and epoch 0 ha[sd] "):
            loader_of(tokens).load_state_dict(state)


@pytest.mark.parametrize("was_whole", [True, False])
def test_whole_and_cut_documents_have_other_positions(was_whole: bool) -> None:
    """The same documents in other micro-batches: some would never come."""
    state = taken_of(loader_of(192, whole_documents=was_whole), 4)
    with pytest.raises(ConfigError, match=f"is of whole_documents={was_whole}, this loader has {not was_whole};"):
        loader_of(192, whole_documents=not was_whole).load_state_dict(state)


def test_a_step_that_is_divided_in_another_way_is_refused() -> None:
    """Within a step its micro-batches depend on the nodes, and on the model; at its end they do not."""

    def body(transport: LoopbackTransport) -> list[str]:
        def of_nodes(ranks_per_node: int) -> PlacedLoader:
            config = distca_hf.DistCAPlugin(tokens_per_rank=96, ranks_per_node=ranks_per_node)
            made, device = PlacedPlanner(config, transport.world_size), torch.device("cpu")
            return PlacedLoader(random_dataset(120), made, transport, device, seed=3, micro_steps=4)

        words = []
        for micro_batches in range(5):
            state = taken_of(of_nodes(2), micro_batches)
            of_nodes(2).load_state_dict(state)
            try:
                of_nodes(1).load_state_dict(state)
                words.append("")
            except ConfigError as error:
                words.append(str(error))
        return words

    at_once, *within, at_the_end = run_ranks(2, body)[0]
    assert at_once == at_the_end == ""
    assert ["or an optimizer step that had begun is divided in another way here" in one for one in within] == [
        True
    ] * 3
