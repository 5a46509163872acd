"""Curves: times between measured sizes, and so seconds of exchanges and of FSDP's collectives between ranks.

Rates are interpolated instead of times, on logarithmic axes: a time grows over orders of magnitude, its rate hardly
changes. Beyond the measured sizes the rate stays as at the border, and a note reports it.

A rank has two wires, one within its node and one to other nodes, and they run at the same time. A collective over all
ranks is a ring over all nodes: every node receives all bytes, and its ranks share them between their wires.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distca_hf.analysis.profiles.cluster_profile import AttentionTimes, ClusterProfile, LinkTimes
from distca_hf.arrays import IntArray
from distca_hf.errors import ConfigError
from distca_hf.placement.by_kernel_time import between


FloatArray = NDArray[np.float64]
# Whole numbers, or others.
Amounts = NDArray[Any]
# Smallest share of extrapolated seconds of one kind that is noted.
WORTH_A_NOTE = 0.005


class Beyond(NamedTuple):
    """How many seconds of one kind were extrapolated: measured sizes, the largest size that was needed, seconds of all
    sizes, and of sizes that were not measured."""

    lowest: float
    highest: float
    most: float
    seconds: float
    outside_seconds: float

    @property
    def share(self) -> float:
        return self.outside_seconds / self.seconds if self.seconds else 0.0


@dataclass
class Notes:
    """Collects notes about times that were extrapolated, or measured on other hardware; each once. `texts`: notes as
    text, in the order in which they were added."""

    texts: dict[str, None] = field(default_factory=dict)
    beyond: dict[str, Beyond] = field(default_factory=dict)

    def add(self, text: str) -> None:
        self.texts[text] = None

    def count(self, name: str, sizes: FloatArray, seconds: FloatArray, lowest: float, highest: float) -> None:
        """Counts seconds of these sizes, and how many of them are outside of the measured sizes."""
        if sizes.size == 0:
            return
        outside = (sizes < lowest) | (sizes > highest)
        of_seconds = float(seconds.sum()), float(seconds[outside].sum())
        self._add(name, Beyond(lowest, highest, float(sizes.max()), *of_seconds))

    def merge(self, other: "Notes") -> None:
        self.texts.update(other.texts)
        for name, beyond in other.beyond.items():
            self._add(name, beyond)

    def lines(self) -> list[str]:
        return [
            *self.texts,
            *(
                f"{name}: up to {of.most:,.0f} needed, {of.lowest:,.0f} to {of.highest:,.0f} measured; "
                f"{100 * of.share:.1f} % of their seconds are extrapolated at the rate of the nearest size"
                for name, of in self.beyond.items()
                if of.share >= WORTH_A_NOTE
            ),
        ]

    def _add(self, name: str, beyond: Beyond) -> None:
        old = self.beyond.get(name)
        if old is not None:
            lowest, highest = min(old.lowest, beyond.lowest), max(old.highest, beyond.highest)
            seconds, outside = old.seconds + beyond.seconds, old.outside_seconds + beyond.outside_seconds
            beyond = Beyond(lowest, highest, max(old.most, beyond.most), seconds, outside)
        self.beyond[name] = beyond


@dataclass(frozen=True, eq=False)
class Curve:
    """Seconds by one size. `name`: what it counts, for notes. `sizes`: `[sizes]` rising. `power`: work grows as this
    power of the size."""

    name: str
    sizes: FloatArray
    seconds: FloatArray
    power: float = 1.0

    @classmethod
    def of(cls, name: str, sizes: Sequence[float], seconds: Sequence[float], power: float = 1.0) -> "Curve":
        return cls(name, np.array(sizes, dtype=np.float64), np.array(seconds, dtype=np.float64), power)

    def at(self, sizes: FloatArray | float, notes: Notes) -> FloatArray:
        """Returns `[...]` seconds for `[...]` sizes; 0 for a size of 0."""
        asked = np.asarray(sizes, dtype=np.float64)
        some = np.maximum(asked, 1e-9)
        index, part = between(self.sizes, some)
        rate = np.log(self.sizes**self.power / self.seconds)
        following = np.minimum(index + 1, len(rate) - 1)
        log_rate = rate[index] * (1 - part) + rate[following] * part
        seconds = np.where(asked > 0, some**self.power / np.exp(log_rate), 0.0)
        notes.count(self.name, asked[asked > 0], seconds[asked > 0], self.sizes[0], self.sizes[-1])
        return seconds


@dataclass(frozen=True, eq=False)
class Surface:
    """Seconds `[rows, columns]` by two rising sizes; work is their product. `names`: what the sizes count, for
    notes."""

    names: tuple[str, str]
    rows: FloatArray
    columns: FloatArray
    seconds: FloatArray

    def at(self, rows: FloatArray, columns: FloatArray, notes: Notes) -> FloatArray:
        """Returns `[...]` seconds for `[...]` pairs of sizes; 0 if one of them is 0."""
        rows, columns = np.asarray(rows, dtype=np.float64), np.asarray(columns, dtype=np.float64)
        some = (rows > 0) & (columns > 0)
        row, row_part = between(self.rows, np.maximum(rows, 1))
        column, column_part = between(self.columns, np.maximum(columns, 1))
        rate = np.log(self.rows[:, None] * self.columns[None, :] / self.seconds)
        row_up, column_up = np.minimum(row + 1, len(self.rows) - 1), np.minimum(column + 1, len(self.columns) - 1)
        log_rate = (
            rate[row, column] * (1 - row_part) * (1 - column_part)
            + rate[row_up, column] * row_part * (1 - column_part)
            + rate[row, column_up] * (1 - row_part) * column_part
            + rate[row_up, column_up] * row_part * column_part
        )
        seconds = np.where(some, rows * columns / np.exp(log_rate), 0.0)
        for name, sizes, measured in ((self.names[0], rows, self.rows), (self.names[1], columns, self.columns)):
            notes.count(name, sizes[some], seconds[some], measured[0], measured[-1])
        return seconds


def square_curve(times: AttentionTimes, seconds: tuple[float, ...]) -> Curve:
    """Returns seconds of squares by their queries."""
    power = 1.0 if times.window_tokens else 2.0
    name = f"queries of a square{f', window {times.window_tokens}' if times.window_tokens else ''}"
    return Curve.of(name, times.square_tokens, seconds, power)


def prefix_surface(times: AttentionTimes, seconds: tuple[tuple[float, ...], ...]) -> Surface:
    """Returns seconds of prefixes by their queries and keys."""
    names = "queries of a prefix", "keys of a prefix"
    rows, columns = (np.array(sizes, dtype=np.float64) for sizes in (times.prefix_queries, times.prefix_keys))
    return Surface(names, rows, columns, np.array(seconds, dtype=np.float64))


def kernel_times_of(times: AttentionTimes) -> dict[str, Any]:
    """Returns the table of `placement.by_kernel_time.KernelTimes`, of a full table with prefixes."""
    queries = np.array(times.square_tokens)
    keys = np.array(sorted({*times.square_tokens, *times.prefix_keys} - set(queries[queries > times.prefix_keys[-1]])))
    keys = keys[keys >= queries[0]]
    passes = (times.square_forward, times.prefix_forward), (times.square_backward, times.prefix_backward)
    # For each number of queries, `[keys]` seconds of the last queries of documents of that many tokens. Notes are not
    # kept: beyond measured prefixes, rates are the border's.
    notes, rows = Notes(), []
    for number in queries[queries <= keys[-1]]:
        total, before = np.zeros(len(keys)), np.maximum(0.0, keys - number)
        for square, prefix in passes:
            total += square_curve(times, square).at(number, notes)
            total += prefix_surface(times, prefix).at(np.full(len(keys), number), before, notes)
        rows.append(total)
    return {
        "query_tokens": [int(x) for x in queries[queries <= keys[-1]]],
        "key_tokens": [int(x) for x in keys],
        "seconds": [
            [float(x) if key >= number else None for x, key in zip(row, keys, strict=True)]
            for number, row in zip(queries, rows, strict=False)
        ],
    }


# Units of curves, by the name of their times in a profile.
WORDS = {
    "exchange": "exchange",
    "one_way": "exchange that goes one way",
    "to_next": "exchange with the next rank",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}
# Most seconds by which a second on the wires delays kernels meanwhile: running one after the other takes that long.
MOST_DELAY = 1.0


@dataclass(frozen=True)
class WireBytes:
    """Bytes that ranks send and receive, each `[ranks]`."""

    sent: Amounts
    received: Amounts

    @classmethod
    def both_ways(cls, num_bytes: Amounts) -> "WireBytes":
        return cls(num_bytes, num_bytes)


@dataclass(frozen=True)
class Cluster:
    """Ranks and their links. `ranks_per_node`: number of ranks that share a node. `notes`: everything that was not
    measured as needed."""

    profile: ClusterProfile
    num_ranks: int
    ranks_per_node: int
    notes: Notes

    def __post_init__(self) -> None:
        several, profile = self.num_ranks > self.ranks_per_node, self.profile
        for needed, links, name, advice in (
            (
                self.num_ranks > 1 < self.ranks_per_node,
                profile.within_node,
                "within a node",
                "on a node of several GPUs",
            ),
            (several, profile.between_nodes, "between nodes", "on several nodes, or with --as-between-nodes"),
        ):
            if needed and links is None:
                raise ConfigError(
                    f"{profile.source}: links {name} were not measured, and {self.num_ranks} ranks, "
                    f"{self.ranks_per_node} per node, need them; run `distca profile` {advice}"
                )

    @property
    def node_of(self) -> IntArray:
        return np.arange(self.num_ranks) // self.ranks_per_node

    def exchange(self, within: WireBytes, between: WireBytes) -> FloatArray:
        """Returns `[ranks]` seconds of an exchange with ranks of the same node, and of others."""
        links = self.profile.within_node, self.profile.between_nodes
        return np.maximum(*(self._both_ways(*each) for each in zip(links, (within, between), strict=True)))

    def alike_exchange(self, num_bytes: float) -> float:
        """Returns the seconds in which every rank sends and receives this many bytes, between nodes if there are
        several."""
        crosses = self.num_ranks > self.ranks_per_node
        of_links = (WireBytes.both_ways(np.array(num_bytes * is_there)) for is_there in (not crosses, crosses))
        return float(self.exchange(*of_links))

    def share_beyond(self, group: int) -> FloatArray:
        """Returns `[ranks]` part of the other ranks of each one's group, of this many neighbours, that are on other
        nodes."""
        number = self.node_of * self.num_ranks + np.arange(self.num_ranks) // group
        _, of_rank, inside = np.unique(number, return_inverse=True, return_counts=True)
        return (group - inside[of_rank]) / max(1, group - 1)

    def to_next(self, num_bytes: Amounts, group: int) -> FloatArray:
        """Returns `[ranks]` seconds of sending this many bytes to the next rank of a ring, over groups of so many
        neighbours; in groups that span nodes some ranks send to another one, and all wait for it."""
        seconds = self._to_next(self.profile.within_node, num_bytes if self.ranks_per_node > 1 else 0 * num_bytes)
        between = self._to_next(self.profile.between_nodes, num_bytes * (self.share_beyond(group) > 0))
        return np.maximum(seconds, between)

    def all_gather(self, num_bytes: float) -> float:
        return self._collective("all_gather", num_bytes)

    def reduce_scatter(self, num_bytes: float) -> float:
        return self._collective("reduce_scatter", num_bytes)

    @property
    def attention_beside(self) -> float:
        """Seconds by which a second of exchange delays attention meanwhile, on the slower links."""
        return self._delay("attention")

    @property
    def products_beside(self) -> float:
        """Seconds by which a second of gathering delays products meanwhile."""
        return self._delay("products")

    def _delay(self, kernels: str) -> float:
        if self.num_ranks == 1:
            return 0.0
        slower = self.profile.between_nodes if self.num_ranks > self.ranks_per_node else self.profile.within_node
        measured: float = getattr(slower, f"{kernels}_beside")
        if measured > MOST_DELAY:
            self.notes.add(
                f"a second on the wires was measured to delay {kernels} by {measured:.3g} s: taken as "
                f"{MOST_DELAY:g} s, as if one waited for the other"
            )
        return min(measured, MOST_DELAY)

    def _both_ways(self, links: LinkTimes | None, traffic: WireBytes) -> FloatArray:
        """Returns the seconds of sending and receiving at once: the common part both ways, and the rest one way.

        They are between the measured times of the smaller and of the larger size in both directions: one way never
        takes longer than both.
        """
        more, less = np.maximum(traffic.sent, traffic.received), np.minimum(traffic.sent, traffic.received)
        if links is None or not links.one_way:
            return self._seconds(links, "exchange", more)
        seconds = self._seconds(links, "one_way", more) + _added_by_other_way(links, less)
        return np.clip(seconds, *(self._seconds(links, "exchange", each) for each in (less, more)))

    def _to_next(self, links: LinkTimes | None, num_bytes: Amounts) -> FloatArray:
        return self._seconds(links, "to_next" if links is not None and links.to_next else "exchange", num_bytes)

    def _collective(self, name: str, num_bytes: float) -> float:
        if self.num_ranks == 1:
            return 0.0
        received = num_bytes * (self.num_ranks - 1) / self.num_ranks
        seconds = 0.0
        if self.ranks_per_node > 1:
            seconds = float(self._seconds(self.profile.within_node, name, received))
        if self.num_ranks > self.ranks_per_node:
            links = self.profile.between_nodes
            assert links is not None
            shared = received * links.ranks_per_node / self.ranks_per_node
            seconds = max(seconds, float(self._seconds(links, name, shared)))
        return seconds

    def _seconds(self, links: LinkTimes | None, name: str, num_bytes: Amounts | float) -> FloatArray:
        asked = np.asarray(num_bytes, dtype=np.float64)
        if links is None:
            return np.zeros_like(asked)
        return Curve.of(f"bytes of one {WORDS[name]}", links.num_bytes, _without_noise(getattr(links, name))).at(
            asked, self.notes
        )


def _without_noise(seconds: Sequence[float]) -> list[float]:
    """Returns times by rising sizes, none longer than for a larger size: times of small ones may be disturbed."""
    return [*accumulate(reversed(seconds), min)][::-1]


def _added_by_other_way(links: LinkTimes, num_bytes: Amounts) -> FloatArray:
    """Returns the seconds that this many bytes add to at least equally many that go the other way; more bytes never
    add less."""
    sizes = np.array([0.0, *links.num_bytes])
    apart = np.array(_without_noise(links.exchange)) - np.array(_without_noise(links.one_way))
    added = np.maximum.accumulate([0.0, *apart])
    return np.interp(num_bytes, sizes, added) * np.maximum(1.0, num_bytes / sizes[-1])
