"""Served: for how long trainers wait for attention servers, and how busy these are, in sentences.

Clocks of processes are not compared. In one call trainers and servers begin together, as soon as all have come to it.
So a trainer that waits has waited for a server for as long as the server computed longer in that call:

    trainer   | rows leave | own keys | waits ........................ | merges |
    server    | waits | kernels on rows of trainers              | results leave |
                                      |<- computes longer by ->|
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from distca_hf.analysis.report.figures import OfRanks, Seconds, numbers_of
from distca_hf.traces import PassPart, RankTrace, Spent


# A call by its part of the pass and its layer.
_Call = tuple[PassPart, int]
# Waiting below this part of a pass is too little to name anyone; as in the log of a training.
LITTLE_WAITING = 0.01
# A rank has more work, or is slower, if it is by this factor over another number.
NOTABLE = 1.05
# A pass is not shorter, so that one can divide by it.
SHORTEST_SECONDS = 1e-9


def waiting_for_servers(of_ranks: Mapping[int, RankTrace], num_ranks: int) -> OfRanks:
    """Returns seconds that each trainer waits for servers, at most; nothing without traces of servers.

    Args:
        of_ranks: traces by rank, servers behind the trainers.
        num_ranks: trainers.
    """
    longest: defaultdict[_Call, float] = defaultdict(float)
    for trace in of_ranks.values():
        if trace.is_server:
            for call, us in _spent(trace, waits=False).items():
                longest[call] = max(longest[call], us)
    if not longest:
        return ()
    return [_behind(of_ranks[rank], longest) if rank in of_ranks else None for rank in range(num_ranks)]


def _behind(trace: RankTrace, longest: Mapping[_Call, float]) -> float:
    """Returns seconds that a trainer waits while a server computes for longer."""
    own, waits = _spent(trace, waits=False), _spent(trace, waits=True)
    return sum(min(us, max(0.0, longest.get(call, 0.0) - own[call])) for call, us in waits.items()) / 1e6


def _spent(trace: RankTrace, waits: bool) -> Mapping[_Call, float]:
    """Returns microseconds of each call, of waiting or of all else."""
    spent: defaultdict[_Call, float] = defaultdict(float)
    for call in trace.calls:
        spent[call.part, call.layer] += sum(us for use, us in call.spans if (use is Spent.WAIT) == waits)
    return spent


def slow_server(num_ranks: int, seconds: Seconds) -> int | None:
    """Returns the server that all trainers wait for, numbered behind them; None if they wait for none.

    Args:
        num_ranks: trainers.
        seconds: measured.
    """
    waited = numbers_of(seconds.waiting_for_servers)
    if not len(waited) or np.isnan(waited).all():
        return None
    passed = np.maximum(seconds.passed[:num_ranks], SHORTEST_SECONDS)
    busy = _busy(seconds)
    server = num_ranks + int(np.nanargmax(busy[num_ranks:]))
    all_wait = np.nanmin(waited / passed) >= LITTLE_WAITING
    return server if all_wait and busy[server] > NOTABLE * np.nanmax(busy[:num_ranks]) else None


def _busy(seconds: Seconds) -> np.ndarray:
    """Returns `[ranks]` seconds of computing and sending in attention."""
    busy: np.ndarray = numbers_of(seconds.attention) + numbers_of(seconds.exchange)
    return busy


def slow_server_in_words(trace: RankTrace, seconds: Seconds) -> str | None:
    """Returns a sentence that names the server that all trainers wait for, and the reason; None if they do not.

    Args:
        trace: of any rank.
        seconds: measured.
    """
    server = slow_server(trace.num_ranks, seconds)
    if server is None:
        return None
    waited, passed = numbers_of(seconds.waiting_for_servers), np.maximum(seconds.passed, SHORTEST_SECONDS)
    busy, trainers, most = _busy(seconds), slice(trace.num_ranks), int(np.nanargmax(waited))
    named = (
        f"Trainers wait for {trace.name_of(server)}: in attention it computes and sends for {1e3 * busy[server]:.1f} "
        f"ms, trainers for {1e3 * np.nanmax(busy[trainers]):.1f} ms at most. Rank {most} waits up to "
        f"{1e3 * waited[most]:.1f} ms for it, {waited[most] / passed[most]:.1%} of its pass. "
    )
    return named + _reason(trace, numbers_of(seconds.attention), server)


def _reason(trace: RankTrace, attention: np.ndarray, server: int) -> str:
    """Returns why a server is slow.

    Args:
        attention: `[ranks]` seconds of kernels, servers behind the trainers.
    """
    work = np.array(trace.work, dtype=np.float64)
    speeds = np.array(trace.speeds or (1.0,) * len(work))
    attends = (work > 0) & (np.arange(len(work)) < trace.num_ranks)
    if not attends.any():
        return "Trainers leave all attention to servers, so they wait whenever servers attend."
    share = work[server] / speeds[server] / float(np.median(work[attends] / speeds[attends]))
    if share > NOTABLE:
        return f"It has {share:.2f} times the work of a trainer for its speed, {speeds[server]:.2f} of a trainer's."
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = work / attention
    speed = rates[server] / float(np.nanmedian(rates[attends]))
    if speed * NOTABLE < speeds[server]:
        return (
            f"It attends at {speed:.2f} times the speed of a trainer, and the plan counts on {speeds[server]:.2f}: "
            "speeds are measured with server_speed=0; else look at its clocks, and for other programs there."
        )
    return "Its kernels are as fast as the plan counts on: the time is that of sending and merging."


def busy_in_words(trace: RankTrace, seconds: Seconds) -> list[str]:
    """Returns sentences about what servers spend the pass on: the busiest one, and the one with most time left.

    Args:
        trace: of any rank.
        seconds: measured.
    """
    shares = shares_of_servers(trace.num_ranks, seconds)
    known = np.flatnonzero(~np.isnan(shares[:, 0]))
    if not len(known):
        return []
    in_order = known[np.argsort(shares[known, 0], kind="stable")]
    sentences = []
    for place in dict.fromkeys((int(in_order[-1]), int(in_order[0]))):
        busy, waits = shares[place]
        name = trace.name_of(trace.num_ranks + place)
        sentences.append(
            f"{name.capitalize()} computes and sends for {busy:.0%} of the pass, waits for rows for {waits:.0%}, and "
            f"has nothing to do for {max(0.0, 1 - busy - waits):.0%}."
        )
    return sentences


def shares_of_servers(num_ranks: int, seconds: Seconds) -> np.ndarray:
    """Returns `[servers, 2]` parts of the pass in which a server computes and sends, and in which it waits; NaN where
    its trace is missing."""
    parts: Sequence[OfRanks] = (seconds.attention, seconds.exchange, seconds.waiting)
    attention, exchange, waiting = (numbers_of(part)[num_ranks:] for part in parts)
    passed = np.maximum(seconds.passed[num_ranks:], SHORTEST_SECONDS)
    return np.stack(((attention + exchange) / passed, waiting / passed), axis=1)
