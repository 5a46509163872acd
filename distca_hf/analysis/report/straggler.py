"""Straggler: the rank or the attention server that others wait for, and why, in sentences.

Ranks meet in the exchanges of every layer. The rank that waits least there comes last. If its kernels take longer,
attention is the reason: it has more work, or is slower at the same work. Otherwise it loses time outside attention.

All trainers may wait for an attention server instead. Clocks of processes are not compared. In each call, trainers and
servers begin together, as soon as all have reached it. So a trainer waits for a server for as long as the server
computes longer in that call:

    trainer   | rows leave | own keys | waits ........................ | merges |
    server    | waits | kernels on rows of trainers              | results leave |
                                      |<- computes longer by ->|
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from distca_hf.analysis.report.figures import OfRanks, Seconds, StepFigures, imbalance, numbers_of
from distca_hf.traces import PassPart, RankTrace, Spent


# A call by its part of the pass and its layer.
_Call = tuple[PassPart, int]
# Waiting below this part of a pass is too little to name a rank; as in the log of a training.
LITTLE_WAITING = 0.01
# Smallest factor over another number that counts as more work, or as slower.
NOTABLE = 1.05


def balance_in_words(before: str, after: str, work_before: Sequence[float], work: Sequence[float]) -> str:
    """Returns a sentence about the busiest ranks before and after."""
    return (
        f"The busiest rank has {imbalance(work_before):.2f} times the mean attention work with {before} (rank "
        f"{int(np.argmax(work_before))}), and {imbalance(work):.3f} times with {after} (rank {int(np.argmax(work))})."
    )


def findings_of(trace: RankTrace, seconds: Seconds, missing: Sequence[int]) -> list[str]:
    """Returns sentences about one micro-batch: its balance, and the rank that others wait for."""
    if trace.servers:  # the rank that takes longest for its work is the busiest one
        speeds = trace.speeds or (1.0,) * len(trace.work)
        time = [work / speed if work else 0.0 for work, speed in zip(trace.work, speeds, strict=True)]
        sentences = [
            f"The busiest rank has {imbalance(trace.work_before):.2f} times the mean attention work with "
            f"{trace.before} (rank {int(np.argmax(trace.work_before))}); with {trace.after} the longest time is "
            f"{imbalance(trace.work, trace.speeds):.3f} times that of an even split "
            f"({trace.name_of(int(np.argmax(time)))})."
        ]
    else:
        sentences = [balance_in_words(trace.before, trace.after, trace.work_before, trace.work)]
    works = (
        ("work in a step (layers, attention, head)", trace.step_work_before, trace.step_work),
        ("tokens", trace.tokens_before, trace.layer_tokens),
    )
    of_step = [
        f"{imbalance(before):.2f} → {imbalance(after):.2f} times the mean {name}"
        for name, before, after in works
        if before and after and not trace.placed
    ]
    if of_step:
        sentences.append(f"The busiest rank has {', '.join(of_step)}.")
    slow_server = slow_server_in_words(trace, seconds)
    if slow_server is not None:
        sentences.append(slow_server)
    elif trace.num_ranks > 1:
        sentences.append(straggler_in_words(trace.work[: trace.num_ranks], seconds))
    sentences += busy_in_words(trace, seconds)
    if missing:
        sentences.append(f"Traces of {names_in_words([trace.name_of(rank) for rank in missing])} are missing.")
    return sentences


def names_in_words(names: Sequence[str]) -> str:
    """Joins names such as rank 1, rank 2, server 0 to a list that names each kind once."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind, number = name.split()
        kinds.setdefault(kind, []).append(number)
    return " and ".join(f"{kind} {', '.join(numbers)}" for kind, numbers in kinds.items())


def waited_for(num_ranks: int, seconds: Seconds) -> int | None:
    """Returns the rank that others wait for; None if there is none, or nothing was measured."""
    waited = numbers_of(seconds.waiting)[:num_ranks]
    if num_ranks < 2 or np.isnan(waited).all():
        return None
    last, first = int(np.nanargmin(waited)), int(np.nanargmax(waited))
    longer = waited[first] - waited[last]
    return last if longer >= LITTLE_WAITING * seconds.passed[first] else None


def longest_waiting(num_ranks: int, seconds: Seconds) -> float:
    """Returns the largest part of its pass that a rank with tokens waits in attention; 0 if nothing was measured."""
    waited = numbers_of(seconds.waiting)[:num_ranks]
    if np.isnan(waited).all():
        return 0.0
    return float(np.nanmax(waited / seconds.passed[:num_ranks]))


def most_telling(steps: Sequence[StepFigures]) -> int:
    """Returns the number of the micro-batch in which a rank waits longest. If hardly any rank waits, returns the one
    whose work would be least even without distca. The last of several; 0 if there are none."""

    def telling(number: int) -> tuple[float, float, int]:
        step = steps[number]
        waiting = 0.0 if step.seconds is None else longest_waiting(step.num_ranks, step.seconds)
        return waiting if waiting >= LITTLE_WAITING else 0.0, step.imbalance_before, number

    return max(range(len(steps)), key=telling, default=0)


def straggler_in_words(work: Sequence[float], seconds: Seconds) -> str:
    """Returns a sentence that names the rank that others wait for, and the reason. `work`: `[ranks]` attended pairs of
    ranks that hold tokens."""
    trainers = slice(len(work))
    waited = numbers_of(seconds.waiting)[trainers]
    if np.isnan(waited).all():
        return "Nothing was measured."
    attention = numbers_of(seconds.attention)[trainers]
    last, first = waited_for(len(work), seconds), int(np.nanargmax(waited))
    if last is None:
        longest = longest_waiting(len(work), seconds)
        if longest < LITTLE_WAITING:
            return f"No rank waits for others: the longest waiting in attention is {longest:.1%} of the pass."
        return (
            f"All ranks wait about as long, up to {longest:.1%} of the pass: not for one of them, but for rows on "
            "their way. The network is slow for so many bytes, or there is little to compute meanwhile."
        )
    named = (
        f"Others wait for rank {last}: rank {first} waits {1e3 * waited[first]:.1f} ms in attention, rank {last} "
        f"{1e3 * waited[last]:.1f} ms. "
    )
    per_pair = attention / np.maximum(np.array(work, dtype=np.float64), 1.0)
    if work[last] > NOTABLE * float(np.median(work)):
        return f"{named}It has {work[last] / np.mean(work):.2f} times the mean attention work."
    if attention[last] > NOTABLE * np.nanmedian(attention) and per_pair[last] > NOTABLE * np.nanmedian(per_pair):
        return (
            f"{named}Its attention kernels take {attention[last] / np.nanmedian(attention):.2f} times as long as the "
            "median for the same work: look at its clocks and temperature, and for other programs there."
        )
    return (
        f"{named}Its attention kernels take no longer than others, so it comes late from elsewhere: other "
        "layers (experts), the host, data, or a callback on that rank."
    )


def summary_of(steps: Sequence[StepFigures]) -> list[str]:
    """Returns sentences about all reported micro-batches."""
    before = float(np.mean([step.imbalance_before for step in steps]))
    after = float(np.mean([step.imbalance for step in steps]))
    on_average = ", on average" if len(steps) > 1 else ""
    sentences = [
        f"{len(steps)} reported micro-batch{'es' if len(steps) > 1 else ''}: attention work of the busiest rank "
        f"{before:.2f} → {after:.2f} times the mean{on_average}."
    ]
    given = [step for step in steps if step.step_work]
    if given:
        before = float(np.mean([imbalance(step.step_work_before) for step in given]))
        after = float(np.mean([imbalance(step.step_work) for step in given]))
        sentences.append(f"Work of the busiest rank in a step {before:.2f} → {after:.2f} times the mean{on_average}.")
    waited, servers = Counter[int](), Counter[int]()
    for step in steps:
        if step.seconds is None:
            continue
        server, rank = slow_server(step.num_ranks, step.seconds), waited_for(step.num_ranks, step.seconds)
        if server is not None:
            servers[step.servers[server - step.num_ranks]] += 1
        elif rank is not None:
            waited[rank] += 1
    for counts, opening in ((waited, "Others wait for rank"), (servers, "Trainers wait for server")):
        if counts:
            number, count = max(counts.items(), key=lambda found: (found[1], -found[0]))
            sentences.append(f"{opening} {number} in {count} of them.")
    return [*sentences, *_servers_of(steps)]


def _servers_of(steps: Sequence[StepFigures]) -> list[str]:
    """Returns, if measured, how busy servers are in all micro-batches, and how long trainers wait for them."""
    shares, waits = [np.zeros(0)], [np.zeros(0)]
    for step in steps:
        if step.seconds is not None and step.seconds.waiting_for_servers:
            shares.append(shares_of_servers(step.num_ranks, step.seconds)[:, 0])
            passed = step.seconds.passed[: step.num_ranks]
            waits.append(numbers_of(step.seconds.waiting_for_servers) / passed)
    busy, waited = (of[~np.isnan(of)] for of in (np.concatenate(shares), np.concatenate(waits)))
    if not len(busy) or not len(waited):
        return []
    return [
        f"Attention servers compute and send for {busy.mean():.0%} of a pass, and trainers wait for them for up to "
        f"{waited.mean():.1%} of it, on average."
    ]


def waiting_for_servers(of_ranks: Mapping[int, RankTrace], num_ranks: int) -> OfRanks:
    """Returns seconds that each trainer waits for servers, at most; nothing without traces of servers. `of_ranks`:
    traces by rank, servers after the trainers."""
    longest: defaultdict[_Call, float] = defaultdict(float)
    for trace in of_ranks.values():
        if trace.is_server:
            for call, us in _spent(trace, waits=False).items():
                longest[call] = max(longest[call], us)
    if not longest:
        return ()

    def waiting_seconds(trace: RankTrace) -> float:
        """Returns seconds that a trainer waits while a server computes for longer."""
        own, waits = _spent(trace, waits=False), _spent(trace, waits=True)
        return sum(min(us, max(0.0, longest.get(call, 0.0) - own[call])) for call, us in waits.items()) / 1e6

    return [waiting_seconds(of_ranks[rank]) if rank in of_ranks else None for rank in range(num_ranks)]


def _spent(trace: RankTrace, waits: bool) -> Mapping[_Call, float]:
    """Returns microseconds of each call, of waiting or of everything else."""
    spent: defaultdict[_Call, float] = defaultdict(float)
    for call in trace.calls:
        spent[call.part, call.layer] += sum(us for use, us in call.spans if (use is Spent.WAIT) == waits)
    return spent


def slow_server(num_ranks: int, seconds: Seconds) -> int | None:
    """Returns the server that all trainers wait for, numbered after them; None if there is none."""
    waited = numbers_of(seconds.waiting_for_servers)
    if not len(waited) or np.isnan(waited).all():
        return None
    busy = seconds.busy
    server = num_ranks + int(np.nanargmax(busy[num_ranks:]))
    all_wait = np.nanmin(waited / seconds.passed[:num_ranks]) >= LITTLE_WAITING
    return server if all_wait and busy[server] > NOTABLE * np.nanmax(busy[:num_ranks]) else None


def slow_server_in_words(trace: RankTrace, seconds: Seconds) -> str | None:
    """Returns a sentence that names the server that all trainers wait for, and the reason; None if there is none."""
    server = slow_server(trace.num_ranks, seconds)
    if server is None:
        return None
    waited, passed = numbers_of(seconds.waiting_for_servers), seconds.passed
    busy, trainers, most = seconds.busy, slice(trace.num_ranks), int(np.nanargmax(waited))
    named = (
        f"Trainers wait for {trace.name_of(server)}: in attention it computes and sends for {1e3 * busy[server]:.1f} "
        f"ms, trainers for {1e3 * np.nanmax(busy[trainers]):.1f} ms at most. Rank {most} waits up to "
        f"{1e3 * waited[most]:.1f} ms for it, {waited[most] / passed[most]:.1%} of its pass. "
    )
    return named + _reason(trace, numbers_of(seconds.attention), server)


def _reason(trace: RankTrace, attention: np.ndarray, server: int) -> str:
    """Returns why a server is slow. `attention`: `[ranks]` seconds of kernels, servers after the trainers."""
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
    """Returns sentences about what servers spend the pass on: the busiest one, and the one with most time left."""
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
    """Returns `[servers, 2]` parts of the pass in which a server computes and sends, and in which it waits; NaN if its
    trace is missing."""
    return np.stack((seconds.busy, numbers_of(seconds.waiting)), axis=1)[num_ranks:] / seconds.passed[num_ranks:, None]
