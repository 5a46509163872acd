"""Ranks whose collective calls are in different orders cannot meet; one that is only behind can."""

import pytest
from torch.distributed import HashStore

from distca_hf.comm import whereabouts
from distca_hf.comm.whereabouts import Calls, Place, Whereabouts, cannot_meet


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


def test_two_readings_must_say_the_same_and_progress_forgets_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whereabouts, "SHOW_SECONDS", 0.0)
    monkeypatch.setattr(whereabouts, "READ_SECONDS", 0.0)
    monkeypatch.setattr(whereabouts, "SHORTEST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(whereabouts, "PAUSE_FRACTION", 0.0)
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
