"""Figures: all that a page shows, whatever it was read from. The page draws them, and `--json` prints them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


# Kind and version of the JSON that `distca report --json` prints.
KIND, VERSION = "distca-report", 1

# A number of each rank; None where it is not known.
OfRanks = Sequence[float | None]


@dataclass(frozen=True)
class Seconds:
    """Predicted and measured seconds of every rank, forward and backward of all layers. All are `[ranks]`, with
    attention servers after the ranks that hold tokens.

    Attributes:
        rates: the profile, or the GPU, by which they are predicted; empty if nothing is predicted.
        source: the same in words.
        predicted_attention, predicted_rest: of attention, and of all else but the optimizer.
        attention, waiting, exchange, rest: measured: kernels of attention; waiting for rows of other ranks in it;
            sending and merging; and all else of the pass, with waiting in collectives of the framework.
        step: from the beginning of a micro-batch to that of the next one.
        waiting_for_servers: the most of `waiting` that can be for servers, while one computes for longer than this
            rank. Of ranks that hold tokens alone. Empty without traces of servers.
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
        """`[ranks]` measured seconds of the pass; NaN where they are not known."""
        parts = (self.attention, self.waiting, self.exchange, self.rest)
        passed: np.ndarray = np.sum([numbers_of(part) for part in parts], axis=0)
        return passed


def numbers_of(of_ranks: OfRanks) -> np.ndarray:
    """Returns `[ranks]` float64, NaN where a number is not known."""
    return np.array([np.nan if one is None else one for one in of_ranks], dtype=np.float64)


@dataclass(frozen=True)
class CallOfRanks:
    """One attention call, of several ranks side by side.

    Attributes:
        window_tokens: of its sliding window; 0 without one.
        ranks: for each its number, and its spans: what time was spent on, and microseconds.
    """

    part: str
    layer: int
    window_tokens: int
    ranks: Sequence[tuple[int, Sequence[tuple[str, float]]]]


@dataclass(frozen=True)
class MemoryBar:
    """Memory of a rank, or of a way to train.

    Attributes:
        label: whose it is.
        parts: name and bytes of each.
        limit_bytes: that there are; 0 if unknown.
    """

    label: str
    parts: Sequence[tuple[str, float]]
    limit_bytes: float


@dataclass(frozen=True)
class Table:
    """A table of text and numbers.

    Attributes:
        bars: number of the column that is drawn as bars; None: nothing is drawn.
        marked: numbers of the rows whose bars stand out.
    """

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
        label: its name in the list of steps.
        before, after: how documents lie in `work_before`, and in `work`.
        work_before, work: `[ranks]` attended pairs in one layer. Attention servers are the last of `work`.
        tokens: `[ranks]` that each holds.
        tokens_before: `[ranks]` of each batch, of documents that lie as in `work_before`; empty if unknown.
        step_work_before, step_work: `[ranks]` operations of a step, of ranks that hold tokens; empty if unknown.
        num_ranks: ranks that hold tokens.
        servers: numbers of the attention servers after them.
        speeds: `[ranks]` relative speeds of the ranks of `work`; empty where all are equal.
        sent: (source, destination, bytes) of one layer's forward pass.
        nodes_sent: nodes that source and destination are, because ranks are too many; attention servers are numbered
            after them. 0: they are ranks.
        missing: ranks whose traces are missing, servers after the ranks that hold tokens.
        facts: name and value of what else is known of it.
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
        """Max over mean of `work_before`."""
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
    """A page.

    Attributes:
        source: path of what was read.
        steps: micro-batches, in their order.
        notes: what is missing or left out.
        tables: of what is not of one micro-batch.
        begin_with: number of the step that is shown first, and that the command prints.
    """

    title: str
    source: str
    steps: Sequence[StepFigures]
    summary: Sequence[str] = ()
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    begin_with: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns one object; numbers have five digits."""
        steps = [
            {**asdict(step), "imbalance_before": step.imbalance_before, "imbalance": step.imbalance}
            for step in self.steps
        ]
        content = {"kind": KIND, "version": VERSION, **{**asdict(self), "steps": steps}}
        return {name: _short(value) for name, value in content.items()}


def _short(value: Any) -> Any:
    """Returns a value with numbers of five digits; whole numbers stay."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: _short(inner) for name, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list | tuple) else value
