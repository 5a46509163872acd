"""Figures: everything that a page shows, from any source. The page draws them, and `--json` prints them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from distca_hf.arrays import ceil_div


# Kind and version of the JSON that `distca report --json` prints.
KIND, VERSION = "distca-report", 1

# Lower limit of the time of a pass, to divide by it.
SHORTEST_SECONDS = 1e-9
# A number of each rank; None if it is not known.
OfRanks = Sequence[float | None]


@dataclass(frozen=True)
class Seconds:
    """Predicted and measured seconds of every rank, forward and backward of all layers. All are `[ranks]`, with
    attention servers after the ranks that hold tokens.

    Attributes:
        rates, source: the profile or GPU by which they are predicted, and its description; empty if nothing is.
        predicted_rest: of everything except attention and the optimizer.
        attention, waiting, exchange, rest: measured: kernels of attention; waiting for rows of other ranks in it;
            sending and merging; and everything else of the pass, including waiting in the framework's collectives.
        step: from the beginning of a micro-batch to the beginning of the next one.
        waiting_for_servers: the most of `waiting` that can be for servers, while one computes for longer than this
            rank. Only for ranks that hold tokens. Empty without traces of servers.
    """

    rates: str = ""
    source: str = ""
    predicted_attention: OfRanks = ()
    predicted_rest: OfRanks = ()
    attention: OfRanks = ()
    waiting: OfRanks = ()
    exchange: OfRanks = ()
    rest: OfRanks = ()
    step: OfRanks = ()
    waiting_for_servers: OfRanks = ()

    @property
    def passed(self) -> np.ndarray:
        """`[ranks]` measured seconds of the pass, never 0; NaN if they are not known."""
        parts = (self.attention, self.waiting, self.exchange, self.rest)
        return np.maximum(np.sum([numbers_of(part) for part in parts], axis=0), SHORTEST_SECONDS)

    @property
    def busy(self) -> np.ndarray:
        """`[ranks]` seconds of computing and sending in attention."""
        busy: np.ndarray = numbers_of(self.attention) + numbers_of(self.exchange)
        return busy


def numbers_of(of_ranks: OfRanks) -> np.ndarray:
    """Returns `[ranks]` float64, NaN for unknown numbers."""
    return np.array([np.nan if one is None else one for one in of_ranks], dtype=np.float64)


@dataclass(frozen=True)
class CallOfRanks:
    """One attention call, of several ranks side by side. `ranks`: number of each rank, and its uses of time with their
    microseconds. `window_tokens`: 0 without a sliding window."""

    part: str
    layer: int
    window_tokens: int
    ranks: Sequence[tuple[int, Sequence[tuple[str, float]]]]


@dataclass(frozen=True)
class MemoryBar:
    """Memory of a rank, or of a way to train. `parts`: name and bytes of each. `limit_bytes`: available bytes; 0 if
    unknown."""

    label: str
    parts: Sequence[tuple[str, float]]
    limit_bytes: float


@dataclass(frozen=True)
class Table:
    """A table of text and numbers. `bars`: number of the column that is drawn as bars; None: nothing is drawn.
    `marked`: numbers of the rows whose bars stand out."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    note: str = ""
    bars: int | None = None
    marked: Sequence[int] = ()


@dataclass(frozen=True)
class StepFigures:
    """One micro-batch.

    Attributes:
        before, after: text for the order of documents in `work_before`, and in `work`.
        work_before, work: `[ranks]` attended pairs in one layer. Attention servers are the last of `work`.
        tokens, tokens_before: `[ranks]` tokens that each rank holds, and tokens of its batch; the latter are empty if
            unknown.
        step_work_before, step_work: `[ranks]` operations of a step, of ranks that hold tokens; empty if unknown.
        num_ranks: ranks that hold tokens.
        servers: numbers of the attention servers after them.
        speeds: `[ranks]` relative speeds of the ranks of `work`; empty if all are equal.
        sent: (source, destination, bytes) of one layer's forward pass.
        nodes_sent: number of nodes, if source and destination are nodes because there are too many ranks;
            attention servers are numbered after them. 0: they are ranks.
        missing: ranks whose traces are missing, servers after the ranks that hold tokens.
        findings: sentences: balance, the rank that others wait for, and why.
        seconds, calls, memory: empty if nothing was measured or predicted.
    """

    label: str
    before: str
    after: str
    work_before: Sequence[float]
    work: Sequence[float]
    tokens: OfRanks
    num_ranks: int
    sent: Sequence[tuple[int, int, float]]
    tokens_before: Sequence[int] = ()
    step_work_before: Sequence[float] = ()
    step_work: Sequence[float] = ()
    speeds: Sequence[float] = ()
    nodes_sent: int = 0
    servers: Sequence[int] = ()
    missing: Sequence[int] = ()
    facts: Sequence[tuple[str, str]] = ()
    findings: Sequence[str] = ()
    seconds: Seconds | None = None
    calls: Sequence[CallOfRanks] = ()
    memory: Sequence[MemoryBar] = ()

    @property
    def imbalance_before(self) -> float:
        return imbalance(self.work_before)

    @property
    def imbalance(self) -> float:
        """Max over mean of `work`; with speeds, the longest time over the time of an even split."""
        return imbalance(self.work, self.speeds)


def imbalance(work: Sequence[float], speeds: Sequence[float] = ()) -> float:
    """Returns `[ranks]` work as `PlanFacts.imbalance` has it, of numbers that need not be whole."""
    total = sum(work)
    if not total:
        return 1.0
    speeds = speeds or (1.0,) * len(work)
    return max(one / speed for one, speed in zip(work, speeds, strict=True) if one) * sum(speeds) / total


@dataclass(frozen=True)
class Report:
    """A page. `source`: path that was read. `notes`: sentences about missing or omitted parts. `tables`: figures that
    do not belong to one micro-batch. `begin_with`: number of the step that is shown first, and that the command
    prints."""

    title: str
    source: str
    steps: Sequence[StepFigures]
    summary: Sequence[str] = ()
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    begin_with: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns one object; numbers are rounded to five digits."""
        steps = [
            {**asdict(step), "imbalance_before": step.imbalance_before, "imbalance": step.imbalance}
            for step in self.steps
        ]
        content = {"kind": KIND, "version": VERSION, **{**asdict(self), "steps": steps}}
        return {name: _short(value) for name, value in content.items()}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: _short(inner) for name, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list | tuple) else value


# Most layers of each part of a pass with timelines, and most ranks in a timeline.
MOST_LAYERS, MOST_TIMELINE_RANKS = 3, 48
# Most ranks and servers in a picture of who sends to whom; if there are more, ranks are shown by node.
MOST_MATRIX_RANKS = 128
# Numbers of a page, all steps together, which make about ten bytes each; and steps in its list.
MOST_NUMBERS, MOST_STEPS = 120_000, 200


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` of the numbers 0 to count - 1, spread evenly, including the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(at * (count - 1) / max(1, most - 1)) for at in range(most)]


def chosen_calls(calls: Sequence[CallOfRanks], num_ranks: int) -> list[CallOfRanks]:
    """Returns calls of a few layers: for every part of a pass, the calls in which ranks wait longest; and for each
    call the ranks that wait longest and shortest, and some between them. Attention servers take up to half of the
    places."""

    chosen = []
    for part in dict.fromkeys(call.part for call in calls):
        of_part = [call for call in calls if call.part == part]
        of_part.sort(key=lambda call: sum(map(_waiting_us, call.ranks)), reverse=True)
        chosen += [_with_few_ranks(call, num_ranks) for call in of_part[:MOST_LAYERS]]
    return chosen


def _waiting_us(of_rank: tuple[int, Sequence[tuple[str, float]]]) -> float:
    return sum(us for use, us in of_rank[1] if use == "wait")


def _with_few_ranks(call: CallOfRanks, num_ranks: int) -> CallOfRanks:
    if len(call.ranks) <= MOST_TIMELINE_RANKS:
        return call
    by_waiting = sorted(call.ranks, key=_waiting_us)
    servers = [of_rank for of_rank in by_waiting if of_rank[0] >= num_ranks]
    others = [of_rank for of_rank in by_waiting if of_rank[0] < num_ranks]
    places = max(MOST_TIMELINE_RANKS // 2, MOST_TIMELINE_RANKS - len(others))
    kept = [servers[at] for at in spread(len(servers), places)]
    kept += [others[at] for at in spread(len(others), MOST_TIMELINE_RANKS - len(kept))]
    return replace(call, ranks=sorted(kept))


def in_nodes(
    sent: Sequence[tuple[int, int, float]], num_ranks: int, num_servers: int, ranks_per_node: int
) -> tuple[int, list[tuple[int, int, float]]]:
    """Returns a number of nodes and (source, destination, bytes): of ranks and 0 nodes, or of nodes if there are too
    many ranks. Attention servers are never summed: they come after the `num_ranks` ranks that hold tokens, or after
    their nodes."""
    if num_ranks + num_servers <= MOST_MATRIX_RANKS or ranks_per_node == 1:
        return 0, list(sent)
    num_nodes = ceil_div(num_ranks, ranks_per_node)

    def place(rank: int) -> int:
        return rank // ranks_per_node if rank < num_ranks else num_nodes + rank - num_ranks

    of_nodes: Counter[tuple[int, int]] = Counter()
    for source, destination, size in sent:
        of_nodes[place(source), place(destination)] += round(size)
    summed = [(source, destination, float(size)) for (source, destination), size in sorted(of_nodes.items())]
    return num_nodes, summed


def fitted(report: Report) -> Report:
    """Returns a report with as many steps and timelines as a page holds; a note says how many.

    The step that is shown first stays, with its timeline.
    """
    per_step = max((22 * len(step.work) + 4 * len(step.sent) for step in report.steps), default=1)
    count = max(1, min(len(report.steps), MOST_STEPS, MOST_NUMBERS // max(1, per_step)))
    chosen, begin_with = _spread_with(report.begin_with, len(report.steps), count)
    steps = [report.steps[at] for at in chosen]
    notes = list(report.notes)
    if count < len(report.steps):
        notes.append(
            f"{count} of {len(report.steps)} micro-batches are shown, to keep the page small; --json has all."
        )
    spans = max(
        (sum(2 * len(spans) + 1 for call in step.calls for _, spans in call.ranks) for step in steps), default=0
    )
    room = max(0, MOST_NUMBERS - count * per_step)
    with_timeline, _ = _spread_with(begin_with, count, max(1, min(count, room // spans)) if spans else count)
    if len(with_timeline) < count:
        notes.append(f"{len(with_timeline)} of them have timelines, to keep the page small; --json has all.")
    return replace(
        report,
        steps=[step if at in with_timeline else replace(step, calls=()) for at, step in enumerate(steps)],
        notes=notes,
        begin_with=begin_with,
    )


def _spread_with(wanted: int, total: int, count: int) -> tuple[list[int], int]:
    """Returns `count` numbers below `total`, spread evenly except for `wanted`, and the place of `wanted`."""
    chosen = spread(total, count)
    if not chosen:
        return chosen, 0
    place = min(range(len(chosen)), key=lambda at: abs(chosen[at] - wanted))
    chosen[place] = wanted
    return chosen, place
