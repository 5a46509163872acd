"""Kinds: plans layers that attend with several masks: routings by mask, facts and work of all layers together.

Ranks meet in every layer, so each kind of layers has another busiest rank:

    rank                     0    1       of the busiest    mean
    full layers             40   40             40           40       imbalance 1.00
    layers with a window     6   10             10            8       imbalance 1.25
    one layer of each       46   50             50           48       imbalance 1.04

Work of the busiest ranks is summed over layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray
from distca_hf.cost import CAUSAL_LAYERS, CAUSAL_MASK, LayerMasks, Mask, imbalance
from distca_hf.flops import StepFlops
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan, PlanFacts
from distca_hf.planning.routing import RankPlan, Routing, rank_plan


class RoutedKinds(NamedTuple):
    """One rank's routings by mask, including the full causal one; and facts of all layers together."""

    plans: dict[Mask, RankPlan[Routing]]
    facts: PlanFacts
    layout: Layout
    rank: int

    @classmethod
    def of(
        cls,
        plan: Plan,
        rank: int,
        num_chunks: int = 1,
        layer_masks: LayerMasks = CAUSAL_LAYERS,
        work_before: Callable[[Mask], IntArray] | None = None,
        num_extra: int = 0,
    ) -> "RoutedKinds":
        """Routes all kinds of layers of one rank.

        Args:
            plan: plan of the full causal layers; layers with a window follow its layout.
            num_chunks: chunks of the exchange in forward.
            layer_masks: masks of the model, each with the number of its layers.
            work_before: returns `[ranks with tokens]` attended pairs to compare with, in facts.
            num_extra: number of ranks without tokens, the last ones of the plan.
        """
        layout, longest = plan.layout, plan.layout.longest_document_tokens
        work_of: Callable[[Mask], IntArray | None] = work_before or (lambda mask: None)
        made = {CAUSAL_MASK: rank_plan(plan, rank, num_chunks, work_of(CAUSAL_MASK))}
        layers = dict.fromkeys(made, 0)
        # Ranks without tokens hold no queries, so they compute nothing in layers with a window.
        num_trainers = layout.num_ranks - num_extra
        speeds = (1.0,) * num_trainers + (0.0,) * num_extra if num_extra else ()
        for mask, count in layer_masks:
            mask = mask.within(longest)
            if mask not in made:
                routed = rank_plan(plan.of_window(mask), rank, work_before=work_of(mask))
                made[mask] = replace(routed, facts=replace(routed.facts, speeds=speeds))
            layers[mask] = layers.get(mask, 0) + count
        facts = PlanFacts.of_layers([(made[mask].facts, count) for mask, count in layers.items() if count])
        return cls(made, facts, layout, rank)


def imbalance_of_layers(plan: Plan, layer_masks: LayerMasks, num_extra: int = 0) -> float:
    """Returns the imbalance of all layers, as in `PlanFacts.imbalance`.

    Args:
        plan: plan of the full layers.
        layer_masks: masks of the model, each with the number of its layers.
        num_extra: number of ranks without tokens, the last ones of the plan; they compute nothing in windows.
    """
    speeds = (1.0,) * (plan.layout.num_ranks - num_extra) + (0.0,) * num_extra if num_extra else ()
    values, weights = [], []
    for mask, count in layer_masks:
        if mask.within(plan.layout.longest_document_tokens) == CAUSAL_MASK:  # these layers follow the plan
            values.append(plan.imbalance)
            weights.append(count * float((plan.work / plan.tasks.head_groups).sum()))
        else:  # every rank computes the queries that it holds
            work = plan.layout.rank_work_of(mask)
            values.append(imbalance(work, speeds))
            weights.append(count * float(work.astype(np.float64).sum()))
    return float(np.average(values, weights=weights)) if any(weights) else 1.0


@dataclass(frozen=True, eq=False)
class LayerWork:
    """Attended pairs of micro-batches, in layers of each mask.

    Attributes:
        pairs: `[masks, micro_batches, ranks]` attended pairs in one layer.
        layer_masks: the masks, each with the number of its layers.
    """

    pairs: NDArray[np.float64] | IntArray
    layer_masks: LayerMasks

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        counts = np.array([count for _, count in self.layer_masks], dtype=np.float64)
        shares: NDArray[np.float64] = counts / counts.sum()
        return shares

    @property
    def busiest(self) -> NDArray[np.float64]:
        """`[micro_batches]` pairs of the busiest ranks, mean over layers."""
        mean: NDArray[np.float64] = self._shares @ self.pairs.max(axis=2)
        return mean

    @property
    def total(self) -> NDArray[np.float64]:
        """`[micro_batches]` pairs of all ranks, mean over layers."""
        mean: NDArray[np.float64] = self._shares @ self.pairs.sum(axis=2)
        return mean

    @property
    def imbalance(self) -> NDArray[np.float64]:
        """`[micro_batches]` max/mean work over ranks, of all layers; 1.0 without documents."""
        num_ranks, total = self.pairs.shape[2], self.total
        return np.divide(self.busiest * num_ranks, total, out=np.ones(len(total)), where=total > 0)


@dataclass(frozen=True)
class PlanTotals:
    """Sums over planned micro-batches, the same on all ranks, to report the gain of balancing.

    Attributes:
        micro_batches: number of micro-batches.
        tokens, pairs: sums over all ranks; a pair of a query and a key counts once for all heads.
        shared_tokens: tokens that layers did not compute, because another document begins with them, too.
        imbalance_before, imbalance: sums of these numbers of every micro-batch.
        mixed_micro_batches: number of those that had layers with full attention and layers with a window.
        imbalance_full, imbalance_window: sums of the imbalance of either over these micro-batches.
        token_imbalance_before, token_imbalance: sums of max over mean of the tokens of ranks, before and as planned.
        step_imbalance_before, step_imbalance: the same for the work of a step; 0 if operations are not known.
    """

    micro_batches: int = 0
    tokens: int = 0
    pairs: float = 0.0
    shared_tokens: int = 0
    imbalance_before: float = 0.0
    imbalance: float = 0.0
    mixed_micro_batches: int = 0
    imbalance_full: float = 0.0
    imbalance_window: float = 0.0
    token_imbalance_before: float = 0.0
    token_imbalance: float = 0.0
    step_imbalance_before: float = 0.0
    step_imbalance: float = 0.0

    def plus(self, facts: PlanFacts, flops: StepFlops | None = None) -> Self:
        """Returns the sums with one micro-batch more.

        Args:
            flops: operations of a model whose batches are given; None if they are not known.
        """
        mixed = facts.of_full_and_windows
        before, after = (0.0, 0.0) if flops is None else (imbalance(work.tolist()) for work in facts.step_work(flops))
        full, window = (0.0, 0.0) if mixed is None else (kind.imbalance for kind in mixed)
        added = (  # in the order of the fields
            *(1, facts.num_tokens, sum(facts.work) / facts.rows_per_token, facts.shared_tokens),
            *(facts.imbalance_before, facts.imbalance, mixed is not None, full, window),
            *(imbalance(facts.tokens_before), imbalance(facts.tokens), before, after),
        )
        return type(self)(*(sums + one for sums, one in zip(vars(self).values(), added, strict=True)))

    @property
    def balance(self) -> str:
        """Text about the mean balance over these micro-batches: of a step if its work is counted, else of
        attention."""

        def means(name: str) -> str:
            before, after = (getattr(self, f"{name}{when}") / self.micro_batches for when in ("_before", ""))
            return f"{before:.2f} -> {after:.2f}"

        if not self.step_imbalance:
            return f"attention work of the busiest rank {means('imbalance')} times the mean"
        return (
            f"work of the busiest rank in a step {means('step_imbalance')} times the mean (its tokens "
            f"{means('token_imbalance')}, attention {means('imbalance')})"
        )

    def since(self, earlier: Self) -> Self:
        """Returns sums over the micro-batches that came after earlier ones."""
        return type(self)(*(now - then for now, then in zip(vars(self).values(), vars(earlier).values(), strict=True)))
