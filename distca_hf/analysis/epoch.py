"""Epoch: balance of every micro-batch of an epoch, as packed and as planned.

Balance of documents in order is computed for all micro-batches. Plans are made for optimizer steps spread evenly over
the epoch. Of few all are planned, otherwise as many as take about a second.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline
from distca_hf.analysis.baselines.packing import sorted_packs
from distca_hf.analysis.request import PlanRequest, plan_micro_steps
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.cost import causal_pairs_of
from distca_hf.data.epochs import Epoch


# Maximum of ranks x micro-batches that are planned; a plan takes a quarter of a millisecond per rank.
MOST_PLANNED_RANKS = 1024

Track = Callable[[Sequence[int]], Iterable[int]]  # yields the given items, and shows progress


@dataclass(frozen=True, eq=False)
class InOrder:
    """Micro-batches whose documents fill the ranks in order, with equal tokens.

    Attributes:
        tokens: `[micro_batches]` tokens of all ranks together.
        work: `[micro_batches, ranks]` attended pairs.
    """

    tokens: IntArray
    work: IntArray

    @property
    def imbalance(self) -> np.ndarray:
        """`[micro_batches]` float64 max/mean work over ranks; training logs its mean as `distca/imbalance_before`."""
        return self.work.max(axis=1) * self.work.shape[1] / self.work.sum(axis=1)

    def rank_tokens(self, micro_batches: IntArray | slice) -> IntArray:
        """Returns `[micro_batches]` tokens of the fullest rank."""
        return ceil_div(self.tokens[micro_batches], self.work.shape[1])


@dataclass(frozen=True, eq=False)
class EpochPlans:
    """Plans of some optimizer steps of an epoch, in numbers.

    Attributes:
        in_order: all micro-batches of the epoch.
        planned: `[planned]` numbers of the micro-batches that were planned.
        work: `[planned, ranks]` attended pairs, as planned.
        received_bytes: `[planned]` most bytes that one rank receives in one layer's forward pass.
        sorted_tokens, sorted_work: `[planned, ranks]` tokens and attended pairs of packs that are cut at their
            borders, sorted by work within each optimizer step.
    """

    in_order: InOrder
    planned: IntArray
    work: np.ndarray
    received_bytes: IntArray
    sorted_tokens: IntArray
    sorted_work: IntArray

    @property
    def imbalance(self) -> np.ndarray:
        """`[planned]` float64 max/mean work over ranks; training logs its mean as `distca/imbalance`."""
        return np.asarray(self.work.max(axis=1) / self.work.mean(axis=1))


def pack_in_order(document_tokens: IntArray, epoch: Epoch, num_ranks: int) -> InOrder:
    """Counts tokens and attended pairs of every rank if documents fill the ranks in order.

    It is `placement.place.fill_in_order`, for all micro-batches at once.

    Args:
        document_tokens: `[documents]` lengths of the whole dataset.
        epoch: its micro-batches.
        num_ranks: ranks that share each of them.
    """
    # 1. All documents of the epoch in one line: where each stops, and the pairs up to there.
    lengths = document_tokens[epoch.documents]
    stops = np.concatenate([[0], np.cumsum(lengths)])
    # The sum over millions of documents may overflow; differences within a micro-batch are still exact.
    pairs = np.concatenate([[0], np.cumsum(causal_pairs_of(np.zeros_like(lengths), lengths))])
    # 2. Borders of the ranks on that line.
    first = stops[epoch.offsets[:-1], None]
    tokens = np.diff(stops[epoch.offsets])
    borders = first + tokens[:, None] * np.arange(num_ranks + 1) // num_ranks
    # 3. Pairs up to each border: of whole documents, and inside of the document that the border cuts.
    document = np.searchsorted(stops, borders, side="right") - 1
    inside = borders - stops[document]
    work = np.diff(pairs[document] + causal_pairs_of(np.zeros_like(inside), inside), axis=1)
    return InOrder(tokens, work)


def plan_epoch(request: PlanRequest, document_tokens: IntArray, epoch: Epoch, track: Track = iter) -> EpochPlans:
    """Plans optimizer steps that are spread evenly over the epoch.

    Args:
        request: ranks, model and layout; its limit of bytes is ignored.
        document_tokens: `[documents]` lengths of the whole dataset.
        epoch: its micro-batches, at least as many as an optimizer step has.
        track: iterates over the steps, and shows progress.
    """
    # 1. Steps that are planned.
    request, micro_steps = replace(request, bytes_limit=None), request.micro_steps
    steps = epoch.num_micro_batches // micro_steps
    planned_steps = min(steps, max(1, MOST_PLANNED_RANKS // (request.num_ranks * micro_steps)))
    chosen = np.unique(np.linspace(0, steps - 1, planned_steps).astype(np.int64))
    # 2. Their plans, and the same documents as sorted packs.
    work, received, packs = [], [], []
    for step in track(chosen.tolist()):
        numbers = range(step * micro_steps, (step + 1) * micro_steps)
        batches = [document_tokens[epoch.micro_batch(number)] for number in numbers]
        for plan in plan_micro_steps(request, batches):
            work.append(plan.work / plan.tasks.head_groups)
            sent = Baseline.of_plan("", plan, request.model.token_bytes).bytes_between
            received.append(int(sent.sum(axis=0).max()))
        packs += sorted_packs(np.concatenate(batches), request.num_ranks, micro_steps)
    return EpochPlans(
        in_order=pack_in_order(document_tokens, epoch, request.num_ranks),
        planned=(chosen[:, None] * micro_steps + np.arange(micro_steps)).reshape(-1),
        work=np.array(work),
        received_bytes=np.array(received, dtype=np.int64),
        sorted_tokens=np.array([pack.tokens for pack in packs]),
        sorted_work=np.array([pack.work for pack in packs]),
    )
