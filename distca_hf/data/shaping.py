"""Shaping: whole documents of an optimizer step into the micro-batches of a pipeline.

A stage of a pipeline waits for others wherever micro-batches take unequal time, and while the pipeline fills with the
first micro-batches and drains of the last. So the documents are divided by shares of attention work, in several ways:
equal shares, or some light micro-batches, which go first and last. Each way is simulated in several orders, and the
fastest is taken. Tokens are what they may be: rows of a pipeline are padded to one number.

    work of micro-batches   as packed   3 1 1 2 9 1 1 2      even   2.5 2.5 2.5 ...      light ends   1 3 3 3 3 3 3 1

All of it follows from lengths, and is alike on all ranks: attended pairs are summed as integers, and seconds are
computed element by element.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray
from distca_hf.cost import CAUSAL_LAYERS, Cost, LayerMasks
from distca_hf.data.accumulation import MicroStep, SteppedEpoch
from distca_hf.data.epochs import Epoch, Fits
from distca_hf.data.pipelines import Pipeline
from distca_hf.data.schedules import Schedule, Seconds
from distca_hf.data.work_shares import divide
from distca_hf.flops import LLAMA_8B_COSTS, PassCosts


# Shares of work of a light micro-batch that are tried: as little as documents allow, and half of the others.
LIGHT_SHARES = (0.0, 0.5)


class ShapedEpoch(SteppedEpoch):
    """An epoch whose optimizer steps are shaped for a pipeline.

    Args:
        epoch, document_tokens, micro_steps, steps_from: as for `SteppedEpoch`.
        pipeline: stages and chunks.
        num_ranks, tokens_per_rank, costs, fits: as for `shape_step`.
        layer_masks: masks of the model's layers, each with their number.
    """

    def __init__(
        self,
        epoch: Epoch,
        document_tokens: IntArray,
        micro_steps: int,
        pipeline: Pipeline,
        num_ranks: int,
        tokens_per_rank: int,
        steps_from: int = 0,
        costs: PassCosts = LLAMA_8B_COSTS,
        layer_masks: LayerMasks = CAUSAL_LAYERS,
        fits: Fits | None = None,
    ) -> None:
        super().__init__(epoch, document_tokens, micro_steps, steps_from)
        self._schedule = Schedule(pipeline, micro_steps)
        self._num_ranks, self._tokens_per_rank, self._costs, self._fits = num_ranks, tokens_per_rank, costs, fits
        self._layer_masks = layer_masks

    def _divide(self, document_tokens: IntArray, as_packed: list[IntArray]) -> list[MicroStep]:
        groups = shape_step(
            document_tokens,
            work_of_documents(document_tokens, self._layer_masks),
            as_packed,
            self._schedule,
            *(self._num_ranks, self._tokens_per_rank, self._costs, self._fits),
        )
        return [MicroStep(documents) for documents in groups]


def work_of_documents(document_tokens: IntArray, layer_masks: LayerMasks = CAUSAL_LAYERS) -> IntArray:
    """Returns `[documents]` attended pairs of a layer; the mean over layers, rounded down, where masks differ."""
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
    """Divides the documents of an optimizer step among its micro-batches, and orders these.

    Args:
        document_tokens: `[documents]` lengths.
        document_work: `[documents]` int64 attended pairs, means over the layers of the model.
        as_packed: documents of each micro-batch, as indices: a division that fits.
        schedule: order of operations, for as many micro-batches.
        num_ranks: ranks of a stage, which share each micro-batch with equal work.
        tokens_per_rank: rows of a rank, padding included.
        costs: seconds of a token and of a pair.
        fits: which documents of a micro-batch have room, where ranks hold whole ones; by default all.

    Returns:
        `[micro_batches]` indices of documents in rising order; every document is in one of them.
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
    # The fastest that has room; of equals the first. Documents as they were packed always have.
    for best in np.argsort(seconds, kind="stable").tolist():
        number, order = tried[best]
        if fits is None or number == 0 or all(fits(document_tokens[group]).all() for group in divisions[number]):
            break
    return [np.sort(divisions[number][place]) for place in order.tolist()]


def simulate(
    schedule: Schedule,
    work: NDArray[Any],
    num_ranks: int,
    tokens_per_rank: int,
    costs: PassCosts,
    hop_seconds: float = 0.0,
    part_layers: Sequence[int] | None = None,
) -> Seconds:
    """Simulates optimizer steps whose micro-batches have equal work on all ranks of a stage.

    Args:
        work: `[..., micro_batches]` attended pairs of all ranks of a stage together.
        num_ranks, tokens_per_rank, costs: as for `shape_step`.
        hop_seconds, part_layers: as for `Schedule.step_seconds`.

    Returns:
        `[...]` float64 seconds.
    """
    pairs = work / num_ranks
    forward = tokens_per_rank * costs.forward.token_seconds + pairs * costs.forward.pair_seconds
    backward = tokens_per_rank * costs.backward.token_seconds + pairs * costs.backward.pair_seconds
    return schedule.step_seconds(forward, backward, hop_seconds, part_layers)


def shares_to_try(micro_batches: int, num_stages: int) -> Iterator[list[float]]:
    """Yields shares of work: equal ones, then with some light micro-batches, up to twice as many as stages."""
    yield [1.0] * micro_batches
    for light in LIGHT_SHARES:
        for count in range(1, min(2 * num_stages, micro_batches - 1) + 1):
            yield [light] * count + [1.0] * (micro_batches - count)


def orders_to_try(work: IntArray) -> Iterator[IntArray]:
    """Yields orders of micro-batches of `[micro_batches]` work, as indices: as they are; rising and falling; heavy and
    light ones in turn; and each number of the lightest ones first, the others behind from the heaviest on."""
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
