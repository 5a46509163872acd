"""Planned micro-batches: what planning leaves on this rank, now or when the decoder of a model begins."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from distca_hf.comm.posted_plans import PostedPlan
from distca_hf.cost import Mask
from distca_hf.planning.plan import PlanFacts
from distca_hf.runtime.device_routing import DeviceRankPlan
from distca_hf.runtime.row_moves import DeviceRowMoves


# Makes the rank plan of a mask with a window, on the device.
RouteWindow = Callable[[Mask], DeviceRankPlan]


class Planned(NamedTuple):
    """A micro-batch as it was planned for the attention servers that take part now.

    Attributes:
        routings: returns rank plans by mask: the full causal one, and windows that were known before. They are copied
            to the device when they are first asked for: rows move in before.
        route_window: makes that of a window that a layer is the first to ask for; None: there is no other.
        facts: of all layers together.
        fingerprint: of the plan.
        posted: the plan as attention servers have it; posts calls to them. None if they take no part.
        moves: of rows that are placed inside the model; None if rows stay where batches have them.
        batch_forms: `[ranks]` numbers of the forms of their batches: of equal forms, decoders get equal inputs.
    """

    routings: Callable[[], Mapping[Mask, DeviceRankPlan]]
    route_window: RouteWindow | None
    facts: PlanFacts
    fingerprint: int
    posted: PostedPlan | None = None
    moves: DeviceRowMoves | None = None
    batch_forms: tuple[int, ...] = ()

    @property
    def longest_document_tokens(self) -> int:
        """Tokens of the longest document of the micro-batch."""
        return self.facts.longest_document_tokens


class PlannedLater(NamedTuple):
    """A micro-batch that is planned when something first asks for its plan: a model whose decoder begins.

    Attributes:
        longest_document_tokens: of the micro-batch; known before.
        plan: plans it, once. May wait for other ranks.
    """

    longest_document_tokens: int
    plan: Callable[[], Planned]
