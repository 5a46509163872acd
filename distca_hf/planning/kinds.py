"""Kinds: the routings of a plan for each mask that a model's layers attend with, and the facts of all of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from distca_hf.arrays import IntArray
from distca_hf.cost import CAUSAL_LAYERS, CAUSAL_MASK, LayerMasks, Mask
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan, PlanFacts
from distca_hf.planning.routing import RankPlan, rank_plan


class RoutedKinds(NamedTuple):
    """The routings of one rank by mask, the full causal one among them; and facts of all layers together."""

    plans: dict[Mask, RankPlan]
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
            plan: of the full causal layers; layers with a window follow its layout.
            num_chunks: chunks of the exchange in forward.
            layer_masks: masks of the model, each with the number of its layers.
            work_before: returns `[ranks with tokens]` attended pairs to compare with, in facts.
            num_extra: the last ranks of the plan without tokens.
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
