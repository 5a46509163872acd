"""Ranks at any speed, with looks at any time: those that can still meet are never said to wait in vain, and those that
cannot are found."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from distca_hf.comm import whereabouts
from distca_hf.comm.whereabouts import Whereabouts


CALLS = ("gather", "exchange", "collective")
Program = list[str]


@pytest.fixture(autouse=True)
def _read_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOW_SECONDS", "READ_SECONDS", "SHORTEST_PAUSE_SECONDS", "PAUSE_FRACTION"):
        monkeypatch.setattr(whereabouts, name, 0.0)
    monkeypatch.setattr(whereabouts, "busy_seconds", lambda: 0.0)


@dataclass
class Rank:
    """A rank that starts the calls of its program, and waits in each until all ranks have started it.

    Attributes:
        started: of its calls.
        counts: exchanges, and collectives of other code.
    """

    store: HashStore
    number: int
    program: Program
    started: int = 0
    counts: list[int] = field(default_factory=lambda: [0, 0])

    def __post_init__(self) -> None:
        of_this = self.number, (0, 1), "01", lambda: tuple(self.counts), lambda: "a call", False
        self.detector = Whereabouts(self.store, "here", *of_this)  # type: ignore[arg-type]

    def start(self) -> None:
        kind = self.program[self.started]
        if kind == "gather":
            self.detector.note_gather()
        else:
            self.counts[kind == "collective"] += 1
        self.detector.waits_for = None if kind == "collective" else f"{kind} {self.started}"
        self.started += 1

    def can_start(self, other: "Rank") -> bool:
        """Whether the other rank has started the latest call, too."""
        common = self.program[: self.started] == other.program[: self.started]
        return self.started < len(self.program) and (not self.started or (common and other.started >= self.started))

    def look(self, monkeypatch: pytest.MonkeyPatch) -> bool:
        waits = "all_reduce" if self.started and self.program[self.started - 1] == "collective" else ""
        with monkeypatch.context() as patch:
            patch.setattr(whereabouts, "_code_of", lambda thread: ("code", waits))
            self.detector.look()
        return self.detector.in_vain is not None


PROGRAMS = st.lists(st.sampled_from(CALLS), min_size=1, max_size=12)
# Which rank does something next, and whether it looks (otherwise it goes on).
EVENTS = st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=60)


def _run(programs: list[Program], events: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    """Ranks after these events, of which none was found in vain; each call is only started if it can be."""
    store = HashStore()
    ranks = [Rank(store, number, program) for number, program in enumerate(programs)]
    for number, looks in events:
        if looks:
            found = ranks[number].look(monkeypatch)
            assert not found or not any(ranks[one].can_start(ranks[1 - one]) for one in (0, 1))
        elif ranks[number].can_start(ranks[1 - number]):
            ranks[number].start()
    return ranks


@given(PROGRAMS, EVENTS)
def test_ranks_of_one_program_are_never_found(program: Program, events: list[tuple[int, bool]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranks = _run([program, program], events, monkeypatch)

    assert [rank.detector.in_vain for rank in ranks] == [None, None]


@given(PROGRAMS, st.permutations(CALLS), EVENTS, st.lists(st.integers(0, 1), min_size=0, max_size=6))
def test_ranks_that_start_different_calls_are_found_in_any_order_of_looks(
    program: Program, calls: list[str], events: list[tuple[int, bool]], looks: list[int]
) -> None:
    programs = [[*program, calls[number]] for number in (0, 1)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranks = _run(programs, events, monkeypatch)
        while any(going := [rank.can_start(ranks[1 - rank.number]) for rank in ranks]):
            ranks[going.index(True)].start()
        for number in [*looks, 0, 1, 0, 1, 0, 1, 0, 1]:  # each has time for two readings
            ranks[number].look(monkeypatch)

    assert all(rank.started == len(rank.program) for rank in ranks)
    assert any(rank.detector.in_vain for rank in ranks)
