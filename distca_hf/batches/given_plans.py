"""Given plans: how given batches are placed and planned, lengths in, integers out. Training follows it, and
`distca plan` and `distca simulate` show it.

    layers without a state     rows are placed inside the model, unless batches are even; ranks compute what they hold
    layers that carry a state  tokens stay, attention tasks move
    extra ranks                rows are placed among the others, tasks move to these
"""

from dataclasses import dataclass

from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, TokenBytes
from distca_hf.layout import Layout
from distca_hf.placement.given import place_given
from distca_hf.planning.extra_ranks import ExtraRanks
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.topology import Topology


@dataclass(frozen=True)
class GivenPlans:
    """Places and plans given batches of one model; pure.

    Attributes:
        topology: nodes of the ranks that hold tokens.
        head_groups: groups that heads can be divided into.
        token_bytes: bytes of a token in one layer.
        layer_masks: masks that the model's layers attend with, each with the number of its layers.
        places_rows: whether the model moves rows, so that tokens may be placed; else attention tasks move.
    """

    topology: Topology
    head_groups: int = 1
    token_bytes: TokenBytes = TokenBytes()  # noqa: RUF009 (immutable)
    layer_masks: LayerMasks = CAUSAL_LAYERS
    places_rows: bool = True

    def layout(self, home: Layout) -> Layout:
        """Returns the layout that layers compute.

        Args:
            home: whole documents, in the order of the batches.
        """
        if not self.places_rows:
            return home
        return place_given(home, self.topology, self.head_groups, self.layer_masks)

    def plan(self, layout: Layout, extra_ranks: ExtraRanks | None = None) -> Plan:
        """Returns the plan of such a layout; extra ranks are numbered after its ranks."""
        if extra_ranks is not None:
            return extra_ranks.plan(layout, self.head_groups, topology=self.topology, token_bytes=self.token_bytes)
        if self.places_rows:
            return plan_in_place(layout, self.head_groups)
        return plan_by_moving(layout, self.head_groups, topology=self.topology, token_bytes=self.token_bytes)
