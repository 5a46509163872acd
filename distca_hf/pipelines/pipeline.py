"""Pipeline: the user's description of the stages that batches pass; shapes the optimizer steps of a loader.

A stage of a pipeline waits for others if micro-batches take unequal time, and while the pipeline fills with the first
micro-batches and drains after the last ones. So documents are divided by shares of attention work, in several ways:
equal shares, or a few light micro-batches that go first and last. Each way is simulated in several orders, and the
fastest is taken. Micro-batches may have unequal tokens, because all are padded to the same number of rows.

    work of micro-batches   as packed   3 1 1 2 9 1 1 2      even   2.5 2.5 2.5 ...      light ends   1 3 3 3 3 3 3 1

Documents are dealt longest first. In a full step the last ones may find no room, although all micro-batches together
have enough. Then long and short documents are exchanged until one micro-batch has all the remaining room.

The result depends only on lengths, and is the same on all ranks: attended pairs are summed as integers, and seconds
are computed element by element.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray
from distca_hf.batches.placed import PlacedPlanner, StepShape
from distca_hf.cost import CAUSAL_LAYERS, Cost, LayerMasks
from distca_hf.data.accumulation import Divide, MicroStep
from distca_hf.data.epochs import Fits
from distca_hf.errors import ConfigError
from distca_hf.flops import PassCosts
from distca_hf.pipelines.schedules import Parts, Schedule, Seconds


if TYPE_CHECKING:
    from distca_hf.comm.grid import Grid  # imports torch

# Bundles per micro-batch into which the remaining documents are divided: short documents are dealt together.
BUNDLES = 16
# Tokens above its equal share that a micro-batch may get while others have room, as a fraction of its capacity.
SLACK = 0.002
# Shares of work of a light micro-batch that are tried: as little as documents allow, and half of the others.
LIGHT_SHARES = (0.0, 0.5)


@dataclass(frozen=True)
class Pipeline(Parts, StepShape):
    """A pipeline: how many stages a micro-batch passes, and in how many chunks each of them holds its layers.

    Attributes:
        num_stages: stages, each of them a group of ranks that hold the same layers.
        chunks: parts of the model on each stage. With 1 stages run 1F1B, with more interleaved 1F1B.

    Raises:
        ConfigError: fewer than two stages, or fewer than one chunk.
    """

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.num_stages, self.chunks

    def check_grid(self, grid: "Grid") -> None:
        """Refuses a pipeline whose number of stages differs from the mesh.

        Raises:
            ConfigError: names both numbers.
        """
        if 1 < grid.shape[0] != self.num_stages:
            raise ConfigError(
                f"{grid.name}: the mesh has {grid.in_words()}, and pipeline={self} has {self.num_stages} stages; give "
                "both the same number"
            )

    def division(self, planner: PlacedPlanner, micro_steps: int) -> Divide:
        schedule = Schedule(self, micro_steps)

        def divide_step(document_tokens: IntArray, as_packed: list[IntArray]) -> list[MicroStep]:
            work = work_of_documents(document_tokens, planner.layer_masks)
            of_stage = planner.num_ranks, planner.config.tokens_per_rank, planner.costs, planner.fits
            return list(map(MicroStep, shape_step(document_tokens, work, as_packed, schedule, *of_stage)))

        return divide_step


def divide(
    document_tokens: IntArray, document_work: IntArray, shares: Sequence[float], capacity_tokens: int
) -> list[IntArray] | None:
    """Divides whole documents among micro-batches of nearly equal tokens, with work in proportion to shares.

    Documents are dealt longest first, each to the micro-batch that lacks most work beyond what its missing tokens will
    bring on average. Short documents are dealt in bundles, which get smaller towards the end.

    Args:
        document_tokens: `[documents]` lengths.
        document_work: `[documents]` attended pairs, which rise with the length.
        shares: share of the work for each micro-batch, in any unit.

    Returns:
        For each micro-batch, the indices of its documents; None if some document found no room.
    """
    longest_first = np.argsort(-document_tokens, kind="stable")
    # A bundle has one document, or neighbours with at most `1 / parts` of the remaining tokens.
    stops, parts = np.cumsum(document_tokens[longest_first]), BUNDLES * len(shares)
    bundles, at, done = [0], 0, 0
    while at < len(stops):
        at = max(at + 1, int(np.searchsorted(stops, done + (int(stops[-1]) - done) // parts, side="right")))
        done = int(stops[at - 1])
        bundles.append(at)
    borders = np.array(bundles)
    tokens = np.add.reduceat(document_tokens[longest_first], borders[:-1]).tolist()
    work = np.add.reduceat(document_work[longest_first], borders[:-1]).tolist()
    dealt = _deal(tokens, work, shares, capacity_tokens)
    group_of = np.empty(len(document_tokens), dtype=np.int64)
    group_of[longest_first] = np.repeat(dealt, np.diff(borders))
    # In a full step the remaining room is scattered over micro-batches, and some documents found none: their group is
    # the number of micro-batches. One micro-batch collects room by exchanging longer documents for shorter ones of the
    # others.
    micro_batches = len(shares)
    groups = [np.flatnonzero(group_of == number) for number in range(micro_batches)]
    room = [capacity_tokens - int(document_tokens[group].sum()) for group in groups]
    for document in np.flatnonzero(group_of == micro_batches).tolist():
        size = int(document_tokens[document])
        roomiest_first = sorted(range(micro_batches), key=lambda number: -room[number])
        found = next((one for one in roomiest_first if _gather_room(document_tokens, groups, room, one, size)), None)
        if found is None:
            return None
        groups[found] = np.sort(np.append(groups[found], document))
        room[found] -= size
    return groups


def _deal(tokens: list[int], work: list[int], shares: Sequence[float], capacity_tokens: int) -> list[int]:
    """Returns the micro-batch of each bundle; the number of micro-batches if none has room."""
    micro_batches, slack = range(len(shares)), SLACK * capacity_tokens
    tokens_left, work_left = sum(tokens), sum(work)
    missing_tokens = [tokens_left / len(shares)] * len(shares)
    missing_work = [work_left * share / sum(shares) for share in shares]
    room = [capacity_tokens] * len(shares)
    dealt = []
    for size, pairs in zip(tokens, work, strict=True):
        mean = work_left / tokens_left
        best, best_need = len(shares), (False, 0.0)
        for at in micro_batches:
            if size <= room[at]:
                need = size <= missing_tokens[at] + slack, missing_work[at] - mean * missing_tokens[at]
                if best == len(shares) or need > best_need:
                    best, best_need = at, need
        dealt.append(best)
        tokens_left -= size
        work_left -= pairs
        if best < len(shares):
            missing_tokens[best] -= size
            missing_work[best] -= pairs
            room[best] -= size
    return dealt


def _gather_room(document_tokens: IntArray, groups: list[IntArray], room: list[int], one: int, wanted: int) -> bool:
    """Exchanges documents of one group for shorter ones of the others until it has the wanted room. Returns whether
    that succeeded."""
    before = -1
    while before < room[one] < wanted:
        before = room[one]
        for other in range(len(groups)):
            if other != one and room[other] and room[one] < wanted:
                moved = _exchange(document_tokens, groups, one, other, min(room[other], wanted - room[one]))
                room[one] += moved
                room[other] -= moved
    return room[one] >= wanted


def _exchange(document_tokens: IntArray, groups: list[IntArray], one: int, other: int, most_tokens: int) -> int:
    """Exchanges a document of one group for a shorter one of another, and returns the difference in tokens: the
    largest up to `most_tokens`. That is little room in a full step, so work hardly changes."""
    longer, shorter = (
        group[np.argsort(document_tokens[group], kind="stable")] for group in (groups[one], groups[other])
    )
    # For each document of the one, the shortest of the other that is long enough.
    at = np.searchsorted(document_tokens[shorter], document_tokens[longer] - most_tokens)
    longer, at = longer[at < len(shorter)], at[at < len(shorter)]
    tokens = document_tokens[longer] - document_tokens[shorter[at]]
    if tokens.max(initial=0) <= 0:
        return 0
    best = int(np.argmax(tokens))
    gives, takes = longer[best], shorter[at[best]]
    groups[one] = np.sort(np.append(groups[one][groups[one] != gives], takes))
    groups[other] = np.sort(np.append(groups[other][groups[other] != takes], gives))
    return int(tokens[best])


def work_of_documents(document_tokens: IntArray, layer_masks: LayerMasks = CAUSAL_LAYERS) -> IntArray:
    """Returns `[documents]` attended pairs of a layer; if masks differ, the mean over layers, rounded down."""
    work = Cost(layer_masks).work_of(np.zeros_like(document_tokens), document_tokens, document_tokens)
    return work // sum(count for _, count in layer_masks)


def shape_step(
    document_tokens: IntArray,
    document_work: IntArray,
    as_packed: Sequence[IntArray],
    schedule: Schedule,
    num_ranks: int,
    tokens_per_rank: int,
    costs: PassCosts,
    fits: Fits | None = None,
) -> list[IntArray]:
    """Divides the documents of an optimizer step among its micro-batches, and orders these. Returns `[micro_batches]`
    ascending indices of documents; every document is in one of them.

    Args:
        document_work: `[documents]` int64 attended pairs, means over the layers of the model.
        as_packed: documents of each micro-batch, as indices: a division that fits.
        num_ranks: ranks of a stage, which share each micro-batch with equal work.
        tokens_per_rank: rows of a rank, including padding.
        fits: which documents of a micro-batch have room, if ranks hold whole ones; by default all.
    """
    assert len(as_packed) == schedule.micro_batches, "epochs for pipelines have whole steps"
    divisions = [as_packed]
    for shares in shares_to_try(len(as_packed), schedule.pipeline.num_stages):
        division = divide(document_tokens, document_work, shares, num_ranks * tokens_per_rank)
        if division is not None:
            divisions.append(division)
    work = [np.array([int(document_work[group].sum()) for group in division]) for division in divisions]
    tried = [(number, order) for number, loads in enumerate(work) for order in orders_to_try(loads)]
    loads = np.array([work[number][order] for number, order in tried])
    seconds = simulate(schedule, loads, num_ranks, tokens_per_rank, costs)
    # The fastest that has room; of equals the first. The division as packed always has room.
    for best in np.argsort(seconds, kind="stable").tolist():
        number, order = tried[best]
        if fits is None or number == 0 or all(fits(document_tokens[group]).all() for group in divisions[number]):
            break
    return [np.sort(divisions[number][place]) for place in order.tolist()]


def simulate(
    schedule: Schedule, work: NDArray[Any], num_ranks: int, tokens_per_rank: int, costs: PassCosts
) -> Seconds:
    """Simulates optimizer steps whose micro-batches have equal work on all ranks of a stage. Returns `[...]` float64
    seconds.

    Args:
        work: `[..., micro_batches]` attended pairs of all ranks of a stage together.
        num_ranks, tokens_per_rank, costs: as for `shape_step`.
    """
    pairs = work / num_ranks
    forward = tokens_per_rank * costs.forward.token_seconds + pairs * costs.forward.pair_seconds
    backward = tokens_per_rank * costs.backward.token_seconds + pairs * costs.backward.pair_seconds
    return schedule.step_seconds(forward, backward)


def shares_to_try(micro_batches: int, num_stages: int) -> Iterator[list[float]]:
    """Yields shares of work: equal ones, then with some light micro-batches, up to twice as many as stages."""
    yield [1.0] * micro_batches
    for light in LIGHT_SHARES:
        for count in range(1, min(2 * num_stages, micro_batches - 1) + 1):
            yield [light] * count + [1.0] * (micro_batches - count)


def orders_to_try(work: IntArray) -> Iterator[IntArray]:
    """Yields orders of micro-batches of `[micro_batches]` work, as indices: as they are; rising and falling; heavy and
    light ones in turn; and any number of the lightest ones first, then the others from the heaviest on."""
    yield np.arange(len(work))
    rising = np.argsort(work, kind="stable")
    yield rising
    yield rising[::-1]
    half = len(work) // 2
    alternate = np.empty_like(rising)
    alternate[::2], alternate[1::2] = rising[half:], rising[:half]
    yield alternate
    yield np.concatenate([rising[::2], rising[1::2][::-1]])
    yield np.concatenate([rising[::-1][::2], rising[::-1][1::2][::-1]])
    for first in range(1, len(work)):
        yield np.concatenate([rising[:first], rising[first:][::-1]])
