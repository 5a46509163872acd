"""Epoch: balance of every micro-batch of an epoch, as packed and as planned.

Balance of documents in order is computed for all micro-batches. Plans are made for optimizer steps spread evenly over
the epoch: for all of them if there are few, otherwise for as many as take about a second.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline
from distca_hf.analysis.baselines.packing import sorted_packs
from distca_hf.analysis.request import PlanRequest, plan_micro_steps
from distca_hf.cost import IntArray, causal_pairs_of
from distca_hf.data.epochs import Epoch


# Ranks x micro-batches that are planned: a plan takes a quarter of a millisecond for each rank.
MOST_PLANNED_RANKS = 1024
Track = Callable[[Sequence[int]], Iterable[int]]  # hands out what it is given, and shows how far that is


@dataclass(frozen=True, eq=False)
class InOrder:
    """Micro-batches whose documents fill the ranks one after the other, tokens being equal.

    Attributes:
        tokens: `[micro_batches]` of all ranks.
        work: `[micro_batches, ranks]` attended pairs.
    """

    tokens: IntArray
    work: IntArray

    @property
    def imbalance(self) -> np.ndarray:
        """`[micro_batches]` float64 max/mean work over ranks; training logs its mean as `distca/imbalance_before`."""
        return self.work.max(axis=1) * self.work.shape[1] / self.work.sum(axis=1)

    def rank_tokens(self, micro_batches: IntArray | slice) -> IntArray:
        """`[micro_batches]` tokens of the fullest rank."""
        return -(-self.tokens[micro_batches] // self.work.shape[1])


@dataclass(frozen=True, eq=False)
class EpochPlans:
    """What plans of some optimizer steps of an epoch say.

    Attributes:
        in_order: all micro-batches of the epoch.
        looked_at: `[planned]` numbers of the micro-batches whose steps were planned.
        work: `[planned, ranks]` attended pairs, as planned.
        received_bytes: `[planned]` what the rank that receives most receives in one layer's forward pass.
        sorted_tokens, sorted_work: `[planned, ranks]` of packs that are cut at their borders, sorted by work within
            each optimizer step.
    """

    in_order: InOrder
    looked_at: IntArray
    work: np.ndarray
    received_bytes: IntArray
    sorted_tokens: IntArray
    sorted_work: IntArray

    @property
    def imbalance(self) -> np.ndarray:
        """`[planned]` float64 max/mean work over ranks; training logs its mean as `distca/imbalance`."""
        return np.asarray(self.work.max(axis=1) / self.work.mean(axis=1))


def pack_in_order(document_tokens: IntArray, epoch: Epoch, num_ranks: int) -> InOrder:
    """Counts what every rank attends if documents fill the ranks in order: `placement.place.fill_in_order`, for all
    micro-batches at once.

    Args:
        document_tokens: `[documents]` lengths of the whole dataset.
        epoch: its micro-batches.
        num_ranks: ranks that share each of them.
    """
    lengths = document_tokens[epoch.documents]
    stops = np.concatenate([[0], np.cumsum(lengths)])
    # The sum over millions of documents may wrap around; differences within a micro-batch are right all the same.
    pairs = np.concatenate([[0], np.cumsum(causal_pairs_of(np.zeros_like(lengths), lengths))])
    first = stops[epoch.offsets[:-1], None]
    tokens = np.diff(stops[epoch.offsets])
    borders = first + tokens[:, None] * np.arange(num_ranks + 1) // num_ranks
    document = np.searchsorted(stops, borders, side="right") - 1
    inside = borders - stops[document]
    work = np.diff(pairs[document] + causal_pairs_of(np.zeros_like(inside), inside), axis=1)
    return InOrder(tokens, work)


def plan_epoch(request: PlanRequest, document_tokens: IntArray, epoch: Epoch, track: Track = iter) -> EpochPlans:
    """Plans optimizer steps that are spread over the epoch.

    Args:
        request: world, model and way of planning; its limit of bytes is not looked at.
        document_tokens: `[documents]` lengths of the whole dataset.
        epoch: its micro-batches, at least as many as an optimizer step has.
        track: goes over the steps.
    """
    request, micro_steps = replace(request, bytes_limit=None), request.micro_steps
    steps = epoch.num_micro_batches // micro_steps
    planned_steps = min(steps, max(1, MOST_PLANNED_RANKS // (request.num_ranks * micro_steps)))
    chosen = np.unique(np.linspace(0, steps - 1, planned_steps).astype(np.int64))
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
        looked_at=(chosen[:, None] * micro_steps + np.arange(micro_steps)).reshape(-1),
        work=np.array(work),
        received_bytes=np.array(received, dtype=np.int64),
        sorted_tokens=np.array([pack.tokens for pack in packs]),
        sorted_work=np.array([pack.work for pack in packs]),
    )
