"""Ranks whose collective calls are in different orders cannot meet; one that is only behind can."""

import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from distca_hf.comm import whereabouts
from distca_hf.comm.whereabouts import Calls, Place, Repeated, Whereabouts, busy_seconds, cannot_meet


def _place(*moments: tuple[int, int, int], waits: str = "", on_gpu: bool = False) -> Place:
    return Place("somewhere", [[*moment] for moment in moments], waits, on_gpu, 0)


# The last numbers are those of now, the ones before of the moment at which a gather started.
AHEAD = _place((7, 30, 4), (8, 30, 4), (8, 32, 4))
CASES = {
    "behind, before the gather": (_place((7, 29, 4)), False),
    "behind, after it": (_place((7, 30, 4), (8, 30, 4), (8, 31, 4), waits="elsewhere"), False),
    "ahead": (_place((7, 30, 4), (8, 30, 4), (8, 32, 5), waits="backward"), False),
    "another exchange before the gather": (_place((7, 31, 4)), True),
    "another exchange, and the gather after it": (_place((7, 31, 4), (8, 31, 4), (8, 31, 4)), True),
    "the next gather without the exchanges": (_place((8, 30, 4), (9, 30, 4), (9, 30, 4)), True),
    "a collective of other code instead of the gather": (_place((7, 30, 5), waits="backward"), True),
    "such a collective, of a thread: this rank is at work": (_place((7, 30, 5)), False),
    "a collective before the gather that a thread started": (
        _place((7, 30, 3), (8, 30, 3), (8, 32, 4), waits="backward"),
        False,
    ),
}
ON_GPU = [_place((7, 30, count), (8, 30, count), (8, 32, 4), on_gpu=True) for count in (3, 4)]


@pytest.mark.parametrize(("other", "apart"), CASES.values(), ids=CASES)
def test_ranks_can_meet_unless_their_calls_are_in_different_orders(other: Place, apart: bool) -> None:
    assert cannot_meet(AHEAD, other) is apart
    assert cannot_meet(other, AHEAD) is apart


def test_ranks_that_wait_for_different_collectives_of_other_code_cannot_meet() -> None:
    waits = [_place((3, 1, 5), waits=where) for where in ("backward", "elsewhere", "")]

    assert cannot_meet(*ON_GPU), "hosts go on while GPUs wait"
    assert cannot_meet(waits[0], waits[1])
    assert not cannot_meet(waits[0], waits[0])
    assert not cannot_meet(waits[0], waits[2]), "it may come to the same collective"


def _read_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOW_SECONDS", "READ_SECONDS", "SHORTEST_PAUSE_SECONDS", "PAUSE_FRACTION"):
        monkeypatch.setattr(whereabouts, name, 0.0)


def test_two_readings_must_say_the_same_and_progress_forgets_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _read_at_every_look(monkeypatch)
    store, counts = HashStore(), [[0, 0], [0, 0]]
    ranks = [
        Whereabouts(store, "here", rank, (0, 1), ["0", "1"], lambda rank=rank: tuple(counts[rank]), lambda: "", False)
        for rank in (0, 1)
    ]

    def look() -> list[str | None]:
        assert [rank.look() for rank in ranks] == [True, True]
        return [rank.in_vain for rank in ranks]

    ranks[0].note_gather()
    counts[1][0] += 1  # an exchange that rank 0 has not started before its gather
    for rank in ranks:
        rank.waits_for = f"call of rank {rank._rank}"
    assert look() == [None, None]  # they have just come here
    assert look() == [None, None]
    counts[1][0] += 1
    assert look()[0] is None, "rank 1 has gone on since the first reading"
    look()
    words = "ranks wait for each other at different places: call of rank 0 on rank 0, call of rank 1 on rank 1"
    assert [look(), look()][1] == [words, words]
    assert ranks[0].shown()[1].now == Calls(0, 2, 0)
    for foreign in ("[]", "{}", "no JSON", '{"text": "", "moments": [[1, 2]], "waits": "", "on_gpu": 0, "look": 1}'):
        store.set("distca_hf/whereabouts/here/at/1", foreign)
        assert list(ranks[0].shown()) == [0], "somebody else has written it"


class _Asked:
    """A store that notes for which keys it was asked."""

    def __init__(self, store: Any) -> None:
        self.multi_get, self._store, self.keys = store.multi_get, store, list[list[str]]()

    def check(self, keys: list[str]) -> bool:
        self.keys.append(keys)
        return bool(self._store.check(keys))


def test_places_of_all_ranks_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repeated, "begin", lambda *_: None)
    store, ranks = HashStore(), range(3)
    all_ranks = [Whereabouts(store, "here", rank, ranks, "012", lambda: (0, 0), str, False) for rank in ranks]
    for rank in all_ranks:
        rank.begin(lambda: None)
    asked = all_ranks[0]._store = _Asked(all_ranks[0]._store)  # type: ignore[assignment]

    assert all_ranks[0].shown() == {}, "none of them has come to a stop"
    assert asked.keys == [["at/0", "at/1", "at/2"]]


class _Gone:
    """A store whose process has ended."""

    def set(self, *args: object) -> None:
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("readings", [0, 1, 2])
def test_rank_that_loses_the_store_goes_by_what_it_has_read(readings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _read_at_every_look(monkeypatch)
    store = HashStore()
    ranks = [
        Whereabouts(store, "here", rank, (0, 1), ["0", "1"], lambda rank=rank: (rank, 0), lambda: "", False)
        for rank in (0, 1)
    ]
    ranks[0].note_gather()
    assert [ranks[0].look(), ranks[1].look(), ranks[1].look()] == [True] * 3  # it has shown its place
    for _ in range(readings):
        assert ranks[0].look()
    assert (ranks[0].in_vain is not None) == (readings == 2)
    ranks[0]._store = _Gone()  # type: ignore[assignment]
    assert ranks[0].look() == (readings > 0)
    assert ("different places" in str(ranks[0].in_vain)) == (readings > 0)


def _burn(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() < began + seconds:
        pass


@pytest.mark.parametrize("system", ["counts what is ready", "shows zeros", "shows nothing"])
def test_a_thread_at_work_is_busy_and_one_that_waits_is_not(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if system == "shows zeros":
        monkeypatch.setattr(whereabouts.Path, "read_text", lambda path: "0 0 0\n")
    elif system == "shows nothing":
        monkeypatch.setattr(whereabouts.Path, "read_text", lambda path: path.rename("/nowhere/to/be/found"))
    before = busy_seconds()
    _burn(0.2)
    assert busy_seconds() - before > 0.1

    other = threading.Thread(target=_burn, args=(0.5,))
    other.start()
    before = busy_seconds()
    other.join()
    assert busy_seconds() - before < 0.3
