"""Placement by measured times of the attention kernel, instead of attended pairs.

Equal pairs are not equal seconds. Many short documents, or a short part of a long one, run at a lower rate than one
long document. Pairs of a document are therefore weighted by the time of a document of its length (`TimedCost`). The
rest of the error depends on where documents are cut. So the seconds of each rank are predicted, slow ranks get smaller
shares, and documents are placed again, in a few rounds.

A local search then evens out the best round: the slowest rank and a fast one swap equally many tokens.

    slowest    | dense segments .... | [ first tokens of one ] |          ──▶ to the fast rank
    fast       | lightest tokens     |                                    ──▶ to the slowest rank

The slowest rank gives dense segments. The last of them is cut, and only its beginning given, which needs fewer keys
than its end. It receives the lightest tokens of a fast rank. Bisection finds the number of tokens at which both take
the same time. Several partners and first segments are tried: a short piece of a long document may cost more time than
it saves.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray, as_int_array
from distca_hf.cost import Work, causal_pairs, causal_pairs_of
from distca_hf.errors import PackingError
from distca_hf.layout import TILE_TOKENS, Layout, Topology, join_neighbours
from distca_hf.placement.piece_pool import Segment
from distca_hf.placement.place import place


FloatArray = NDArray[np.float64]
Seconds = Callable[[list[Segment]], float]

# Number of placements after the first one, each with new shares: more rounds do not improve (measured).
ROUNDS = 3
# Units of a weight of 1.0. Weights are integers, which keeps sums exact, and 1/256 is finer than a measurement.
PARTS_OF_A_PAIR = 256
# Maximum number of swaps, per rank: bounds the time of planning.
SWAPS_PER_RANK = 4
# Excess of the slowest rank's seconds over the mean, as a fraction of it, at which the search ends: below the error of
# predicted seconds.
CLOSE_TO_MEAN = 5e-3
# Maximum number of partners to try for one swap, fastest first.
PARTNERS = 4
# Maximum number of first segments to try for one swap, each of another density.
STARTS = 8


@dataclass(frozen=True, eq=False)
class KernelTimes:
    """Measured seconds of one task, forward and backward: the last `query_tokens` of `key_tokens` tokens, all heads.

    The rate, in pairs per second, is interpolated between measurements on logarithmic axes, and constant beyond them.

    Attributes:
        query_tokens: `[queries]` int64, rising.
        key_tokens: `[keys]` int64, rising.
        seconds: `[queries, keys]` float64; NaN for more queries than keys.

    Raises:
        PackingError: the table does not have this form.
    """

    query_tokens: IntArray
    key_tokens: IntArray
    seconds: FloatArray

    def __post_init__(self) -> None:
        if self.seconds.shape != (len(self.query_tokens), len(self.key_tokens)):
            raise PackingError(
                f"kernel times of shape {self.seconds.shape} for {len(self.query_tokens)} query lengths and "
                f"{len(self.key_tokens)} key lengths"
            )
        for name, tokens in (("query_tokens", self.query_tokens), ("key_tokens", self.key_tokens)):
            if len(tokens) == 0 or tokens[0] < 1 or np.any(np.diff(tokens) <= 0):
                raise PackingError(f"{name} of kernel times must rise from 1 or more, not {tokens.tolist()}")
        wrong = np.argwhere(self._is_causal & ~((self.seconds > 0) & (self.seconds < np.inf)))
        if len(wrong):
            query, key = wrong[0]
            raise PackingError(
                f"kernel times: {self.query_tokens[query]} queries and {self.key_tokens[key]} keys took "
                f"{self.seconds[query, key]} s; every time with no more queries than keys must be finite and above 0"
            )
        if not self._is_causal.any(axis=1).all():
            raise PackingError("kernel times: every query length needs a key length that is at least as long")

    @classmethod
    def load(cls, path: Path) -> "KernelTimes":
        """Reads a JSON file `{"query_tokens": [...], "key_tokens": [...], "seconds": [[...], ...]}`, with `null` for
        more queries than keys. A file of `distca profile` has this table as `kernel_times`.

        Raises:
            PackingError: the file cannot be read, or does not have this form.
        """
        try:
            table = json.loads(path.read_text())
            table = table.get("kernel_times", table)
            return cls(
                as_int_array(table["query_tokens"], f"{path}: query_tokens"),
                as_int_array(table["key_tokens"], f"{path}: key_tokens"),
                np.array(table["seconds"], dtype=np.float64),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, PackingError):
                raise
            raise PackingError(f"{path} is not a table of kernel times: {error!r}") from error

    @property
    def _is_causal(self) -> NDArray[np.bool_]:
        return self.query_tokens[:, None] <= self.key_tokens[None, :]

    @cached_property
    def log_rate(self) -> FloatArray:
        """`[queries, keys]` logarithm of pairs per second. Entries with more queries than keys repeat the first other
        entry of their row."""
        queries, keys = np.meshgrid(self.query_tokens, self.key_tokens, indexing="ij")
        first = np.argmax(self._is_causal, axis=1)[:, None]
        column = np.maximum(np.arange(len(self.key_tokens))[None, :], first)
        pairs = causal_pairs_of(keys - np.minimum(queries, keys), keys)
        return np.take_along_axis(np.log(np.where(self._is_causal, pairs, 1) / self.seconds), column, axis=1)

    def of(self, starts: IntArray, stops: IntArray) -> FloatArray:
        """Predicts seconds of each query range [start, stop), forward and backward."""
        query, query_part = between(self.query_tokens, stops - starts)
        key, key_part = between(self.key_tokens, stops)
        rate = self.log_rate
        # Bilinear, between the four measurements around a range; at the border of the table two of them coincide.
        upper = np.minimum(query + 1, len(self.query_tokens) - 1), np.minimum(key + 1, len(self.key_tokens) - 1)
        log_rate = (
            rate[query, key] * (1 - query_part) * (1 - key_part)
            + rate[upper[0], key] * query_part * (1 - key_part)
            + rate[query, upper[1]] * (1 - query_part) * key_part
            + rate[upper[0], upper[1]] * query_part * key_part
        )
        return causal_pairs_of(starts, stops) / np.exp(log_rate)


@dataclass(frozen=True, eq=False)
class TimedCost:
    """Causal pairs, weighted by the time of a pair in a document of this length, relative to the fastest length."""

    times: KernelTimes

    def work_of(self, starts: IntArray, stops: IntArray, document_tokens: IntArray) -> IntArray:
        """Weighs the pairs of query ranges, in units of `1 / PARTS_OF_A_PAIR` of a pair at the highest rate."""
        return causal_pairs_of(starts, stops) * self._weights(document_tokens)

    def of_documents(self, document_tokens: Sequence[int]) -> Work:
        """Returns the same as a function of (document, start, stop)."""
        weights = self._weights(np.array(document_tokens, dtype=np.int64)).tolist()
        return lambda document, start, stop: causal_pairs(start, stop) * weights[document]

    def _weights(self, document_tokens: IntArray) -> IntArray:
        starts, most_pairs_per_second = np.zeros_like(document_tokens), float(np.exp(self.times.log_rate.max()))
        pairs = np.maximum(1, causal_pairs_of(starts, document_tokens))
        seconds_per_pair = self.times.of(starts, document_tokens) / pairs
        return np.rint(PARTS_OF_A_PAIR * seconds_per_pair * most_pairs_per_second).astype(np.int64)


def rank_seconds(layout: Layout, times: KernelTimes) -> FloatArray:
    """Predicts `[ranks]` seconds of attention of one layer, forward and backward. Ranks share a stripe equally."""
    seconds = times.of(layout.segment_start, layout.segment_stop)
    total, unstriped = _stripe_seconds(layout, times), ~layout.segment_in_stripe
    np.add.at(total, layout.segment_rank[unstriped], seconds[unstriped])
    return total


def _stripe_seconds(layout: Layout, times: KernelTimes) -> FloatArray:
    total = np.zeros(layout.num_ranks)
    for stripe in layout.stripes:
        whole = times.of(np.array([stripe.start]), np.array([stripe.stop]))[0]
        total[stripe.first_rank : stripe.stop_rank] += whole / (stripe.stop_rank - stripe.first_rank)
    return total


def place_by_seconds(
    document_tokens: Sequence[int] | IntArray,
    num_ranks: int,
    times: KernelTimes,
    *,
    topology: Topology | None = None,
    head_groups: int = 1,
    rounds: int = ROUNDS,
) -> Layout:
    """Places documents as `place` does, but makes predicted seconds equal instead of work.

    Args:
        document_tokens, num_ranks, topology, head_groups: see `place`.
        times: measured times of the kernel.
        rounds: placements after the first one.

    Returns:
        The layout of the round in which the slowest rank is fastest, evened out.

    Raises:
        PackingError: a length is out of range, or numbers of ranks disagree.
    """
    # 1. Placements with shares that follow from the seconds of the one before.
    shares = np.ones(num_ranks)
    best, best_seconds = None, np.inf
    for _ in range(1 + rounds):
        layout = place(
            document_tokens,
            num_ranks,
            topology=topology,
            cost=TimedCost(times),
            head_groups=head_groups,
            rank_shares=shares.tolist(),
        )
        seconds = rank_seconds(layout, times)
        if best is None or seconds.max() < best_seconds:
            best, best_seconds = layout, seconds.max()
        if not seconds.all():
            break
        shares = shares * seconds.mean() / seconds
    assert best is not None

    # 2. Token swaps on the best of them.
    def seconds_of(segments: list[Segment]) -> float:
        bounds = np.array([segment[1:] for segment in segments], dtype=np.int64).reshape(-1, 2)
        return float(times.of(bounds[:, 0], bounds[:, 1]).sum())

    return _even_out(best, seconds_of, _stripe_seconds(best, times))


def between(measured: NDArray[Any], values: NDArray[Any]) -> tuple[IntArray, FloatArray]:
    """Locates values between measured sizes. Returns the index of the lower one, and the fraction of the way to the
    next one on a logarithmic axis; clips values outside to the border."""
    values = np.clip(values, measured[0], measured[-1])
    index = np.searchsorted(measured, values, side="right") - 1
    following = np.minimum(index + 1, len(measured) - 1)
    step = np.log(measured[following] / measured[index])
    part = np.log(values / measured[index]) / np.where(step > 0, step, 1.0)
    return index.astype(np.int64), part


@dataclass(frozen=True)
class Held:
    """Segments that a rank may swap, and the seconds of the others."""

    segments: list[Segment]
    fixed_seconds: float

    def seconds(self, seconds_of: Seconds) -> float:
        """Sums the seconds of all segments of the rank."""
        return seconds_of(self.segments) + self.fixed_seconds


def _even_out(layout: Layout, seconds_of: Seconds, fixed_seconds: FloatArray) -> Layout:
    """Swaps tokens between ranks of a layout until the slowest is close to the mean, or no swap helps. Leaves stripes
    as they are; they take `fixed_seconds`."""
    # 1. Seconds of each rank; segments of stripes are not swapped.
    of_stripes: list[list[Segment]] = [[] for _ in range(layout.num_ranks)]
    free: list[list[Segment]] = [[] for _ in range(layout.num_ranks)]
    for rank in range(layout.num_ranks):
        in_stripe = layout.segment_in_stripe[layout.segments_of(rank)]
        for segment, of_stripe in zip(layout.held_by(rank), in_stripe, strict=True):
            (of_stripes if of_stripe else free)[rank].append(segment)
    ranks = [Held(segments, float(fixed)) for segments, fixed in zip(free, fixed_seconds, strict=True)]
    seconds = [of_rank.seconds(seconds_of) for of_rank in ranks]

    # 2. The best swap of the slowest rank, again and again.
    for _ in range(SWAPS_PER_RANK * layout.num_ranks):
        slow, *fast = (int(number) for number in [np.argmax(seconds), *np.argsort(seconds, kind="stable")[:PARTNERS]])
        if seconds[slow] * len(seconds) <= (1 + CLOSE_TO_MEAN) * sum(seconds):
            break
        # Places at which density falls, from dense to light.
        means = [_mean_position(segment)[0] for segment in _densest_first(ranks[slow].segments)]
        starts = [at for at, mean in enumerate(means) if at == 0 or mean < means[at - 1]][:STARTS]
        tried = [
            (partner, *_evened(ranks[slow], ranks[partner], start, seconds_of))
            for partner in fast
            if partner != slow
            for start in starts
        ]
        times = [max(one.seconds(seconds_of), other.seconds(seconds_of)) for _, one, other in tried]
        if not tried or min(times) >= seconds[slow]:
            break
        partner, ranks[slow], ranks[partner] = tried[times.index(min(times))]
        seconds[slow], seconds[partner] = ranks[slow].seconds(seconds_of), ranks[partner].seconds(seconds_of)

    # 3. A layout of all segments, in the order in which tasks are computed.
    held = [
        sorted([*stay, *of_rank.segments], key=lambda segment: (segment[1] > 0, segment))
        for stay, of_rank in zip(of_stripes, ranks, strict=True)
    ]
    return Layout.from_segments(layout.document_tokens, held, stripes=layout.stripes)


def _evened(slow: Held, fast: Held, start: int, seconds_of: Seconds) -> tuple[Held, Held]:
    """Swaps tokens until two ranks are equally slow, as nearly as tiles allow: dense tokens of the slow rank, from
    place `start` in its order on, for light tokens of the fast rank."""
    dense, light = _densest_first(slow.segments), sorted(fast.segments, key=_mean_position)

    def swapped(tiles: int) -> tuple[Held, Held]:
        given, kept = _first_tokens(dense[start:], tiles * TILE_TOKENS)
        taken, left = _first_tokens(light, tiles * TILE_TOKENS)
        return (
            Held(_joined([*dense[:start], *kept, *taken]), slow.fixed_seconds),
            Held(_joined([*left, *given]), fast.fixed_seconds),
        )

    def is_enough(tiles: int) -> bool:
        one, other = swapped(tiles)
        return one.seconds(seconds_of) <= other.seconds(seconds_of)

    most = min(sum(stop - begin for _, begin, stop in held) for held in (dense[start:], light)) // TILE_TOKENS
    tiles = bisect_left(range(most), True, key=is_enough)
    pairs = [swapped(max(0, tiles - 1)), swapped(tiles)]
    return min(pairs, key=lambda pair: max(pair[0].seconds(seconds_of), pair[1].seconds(seconds_of)))


def _first_tokens(segments: list[Segment], tokens: int) -> tuple[list[Segment], list[Segment]]:
    """Divides segments in order into their first `tokens` tokens, and all others."""
    first: list[Segment] = []
    others: list[Segment] = []
    for document, start, stop in segments:
        cut = min(stop, start + tokens)
        tokens -= cut - start
        if cut > start:
            first.append((document, start, cut))
        if cut < stop:
            others.append((document, cut, stop))
    return first, others


def _joined(segments: list[Segment]) -> list[Segment]:
    """Joins segments of two ranks that follow each other in a document."""
    document, start, stop = np.array(segments, dtype=np.int64).reshape(-1, 3).T
    columns = join_neighbours(document, start, stop, np.zeros_like(document))[:3]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _mean_position(segment: Segment) -> tuple[int, Segment]:
    return segment[1] + segment[2], segment


def _densest_first(segments: list[Segment]) -> list[Segment]:
    return sorted(segments, key=_mean_position, reverse=True)
