"""A stream that stops twice goes on, on any number of ranks: every document once, in steps of three."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice, product
from typing import Any

import pytest
import torch

from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.stream_loader import StreamLoader
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError
from distca_hf.testing import LoopbackTransport, LoopbackWorld, run_ranks
from support.streams import Rows, all_tokens, numbered, numbered_stream, tokens_in
from support.thorough import is_thorough


DOCUMENTS, TOKENS_PER_RANK, MICRO_STEPS = 96, 48, 3
WORLDS = (1, 2, 3, 4)
State = dict[str, Any]
# Tokens, positions and labels of a micro-batch on one rank.
RankRows = tuple[list[int], list[int], list[int]]


def _whole(rank: int, world: int) -> Any:
    return numbered_stream(DOCUMENTS, 5)


def _own_rows(rank: int, world: int) -> Any:
    """A stream that gives a rank its own rows, as a `StatefulDataLoader` does."""
    numbers = range(rank * DOCUMENTS // world, (rank + 1) * DOCUMENTS // world)
    return Rows([{"input_ids": numbered(number)} for number in numbers])


def _part(
    world: int,
    state: State | None,
    micro_batches: int | None,
    stream: Callable[[int, int], Any] = _whole,
    **settings: Any,
) -> tuple[list[list[RankRows]], Counter[int], State]:
    """Batches of each rank, their tokens, and the position, which all ranks must agree on."""
    reading_world = LoopbackWorld((1, world, 1))

    def read(transport: LoopbackTransport) -> tuple[list[RankRows], Counter[int], str]:
        rank = transport.rank
        planner = PlacedPlanner(
            DistCAConfig(**{"tokens_per_rank": TOKENS_PER_RANK, "pad_to_multiple_of": 1} | settings), world
        )
        reading = LoopbackTransport(reading_world, rank)
        loader = StreamLoader(
            *(stream(rank, world), planner, transport, reading, torch.device("cpu")), seed=3, micro_steps=MICRO_STEPS
        )
        if state is not None:
            loader.load_state_dict(state)
        rows: list[RankRows] = []
        seen: Counter[int] = Counter()
        for batch in islice(loader, micro_batches):
            seen += tokens_in(batch)
            ids, positions, labels = (
                batch[name][0].tolist() for name in ("input_ids", "position_ids", "shift_labels")
            )
            rows.append((ids, positions, labels))
        return rows, seen, json.dumps(loader.state_dict())

    ranks = run_ranks(world, read)
    (position,) = {saved for *_, saved in ranks}
    return [rows for rows, *_ in ranks], sum((seen for _, seen, _ in ranks), Counter()), json.loads(position)


@pytest.mark.parametrize(
    ("first", "then"),
    product(WORLDS, WORLDS) if is_thorough() else [(1, 2), (2, 4), (4, 3)],
)
def test_every_document_comes_once_from_any_world_to_any_other(first: int, then: int) -> None:
    _, seen, state = _part(first, None, 2 * MICRO_STEPS)
    _, more, state = _part(then, state, MICRO_STEPS)
    _, rest, state = _part(first, state, None)

    assert state["pass"] == 1
    assert seen + more + rest == all_tokens(DOCUMENTS)


@pytest.mark.parametrize(("world", "stream"), [(2, _whole), (3, _own_rows)])
def test_batches_are_equal_after_two_stops_in_the_same_world(world: int, stream: Callable[[int, int], Any]) -> None:
    whole, seen, _ = _part(world, None, None, stream)
    assert seen == all_tokens(DOCUMENTS)

    parts: list[list[RankRows]] = [[] for _ in range(world)]
    state: State | None = None
    for stop in (4, 5, None):  # the first is in the middle of a step
        ranks, _, state = _part(world, state, stop, stream)
        parts = [earlier + later for earlier, later in zip(parts, ranks, strict=True)]
    assert parts == whole


@pytest.mark.parametrize(("first", "then"), [(1, 2), (3, 1)])
def test_ranks_that_give_their_own_rows_resume_only_as_many(first: int, then: int) -> None:
    *_, state = _part(first, None, MICRO_STEPS, _own_rows)
    with pytest.raises(ConfigError, match=f"readers={first}, this loader has {then}"):
        _part(then, state, None, _own_rows)


@pytest.mark.parametrize("overlong", ["split", "truncate"])
def test_a_pass_goes_on_to_cut_documents_as_it_began(overlong: str) -> None:
    """To 16 tokens on one rank. The next pass will cut them to what two ranks hold."""

    def cut(tokens: int) -> Counter[int]:
        return Counter({token: min(times, tokens) for token, times in all_tokens(DOCUMENTS).items()})

    settings = {"tokens_per_rank": 16, "overlong": overlong}
    _, seen, state = _part(1, None, 2 * MICRO_STEPS, **settings)
    _, more, within = _part(3, state, MICRO_STEPS, **settings)
    assert within["cut_tokens"] == 16
    _, rest, state = _part(2, within, None, **settings)

    assert seen + more + rest == (all_tokens(DOCUMENTS) if overlong == "split" else cut(16))
    assert state["cut_tokens"] == 32


def test_a_pass_that_cut_documents_to_more_than_fits_is_refused() -> None:
    settings = {"tokens_per_rank": 16, "overlong": "split"}
    *_, within = _part(2, None, MICRO_STEPS, **settings)
    with pytest.raises(ConfigError, match="cut_tokens=32, this loader has 16"):
        _part(1, within, None, **settings)
    *_, at_end = _part(2, within, None, **settings)
    _, seen, _ = _part(1, at_end, MICRO_STEPS, **settings)
    assert seen
