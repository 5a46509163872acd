"""Layer kinds: groups the layers of a model by their mask. Each kind has a routing.

    full causal layers       routing of the plan: prefixes travel, and perhaps queries
    layers with a window     routing of a plan for the same layout, in which no query moves: halos travel

All kinds have the same layout, so a rank holds the same rows in every layer. A window as long as the longest document
of the micro-batch counts as none: its layers belong to the full kind.

Planning gives this rank a `Planned`, or a `PlannedLater` if plans are made when a model's decoder begins.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch

from distca_hf.arrays import IntArray
from distca_hf.config import DistCAConfig
from distca_hf.cost import Mask
from distca_hf.errors import PlanError
from distca_hf.kernels.interface import AttentionSpec, mask_of, without_window
from distca_hf.layout import Layout
from distca_hf.planning.fragments import Fragments
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import PlanFacts, plan_in_place
from distca_hf.planning.routing import RankPlan, rank_plan
from distca_hf.runtime.device_fragments import DeviceFragments, PinnedFragments
from distca_hf.runtime.device_routing import DeviceRankPlan, DeviceRouting, PinnedRouting, on_device
from distca_hf.runtime.posted import Posted
from distca_hf.runtime.retention import PassLayers, Retention
from distca_hf.runtime.row_moves import DeviceRowMoves
from distca_hf.telemetry import get_logger


class Planned(NamedTuple):
    """A micro-batch as it was planned for the ranks that take part now."""

    # Returns rank plans by mask: the full causal one, and windows known before. The first call copies them to the
    # device: rows move in before.
    routings: Callable[[], Mapping[Mask, DeviceRankPlan]]
    # Makes the rank plan of a window when a layer first asks for it; None if there are no others.
    route_window: Callable[[Mask], DeviceRankPlan] | None
    facts: PlanFacts
    fingerprint: int
    posted: Posted | None = None  # the plan that ranks without tokens have; None if there are none
    moves: DeviceRowMoves | None = None  # moves of rows that the model places; None if rows stay as in the batches
    # `[ranks]` numbers of the forms of their batches: equal forms give decoders equal inputs.
    batch_forms: tuple[int, ...] = ()
    # Returns what layers with a state exchange; None for a model without them.
    fragments: Callable[[], DeviceFragments] | None = None

    @property
    def longest_document_tokens(self) -> int:
        """Tokens of the longest document of the micro-batch."""
        return self.facts.longest_document_tokens

    @property
    def rows_to_move(self) -> DeviceRowMoves | None:
        """Moves of rows; None if all rows stay as in the batches."""
        return self.moves if self.moves is not None and self.moves.on_host.changes_rows else None


class PlannedLater(NamedTuple):
    """A micro-batch that is planned when its plan is first needed: when a model's decoder begins."""

    longest_document_tokens: int  # tokens of the micro-batch's longest document; known before
    # Plans it, once. May wait for other ranks.
    plan: Callable[[], Planned]


log = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class PinnedKinds:
    """Rank plans of a micro-batch for each mask of a model, before they are copied to the device."""

    plans: Mapping[Mask, RankPlan[PinnedRouting]]
    facts: PlanFacts
    layout: Layout
    rank: int
    pin: bool  # whether they are in memory from which a GPU copies while the host continues
    fragments: PinnedFragments | None = None

    @classmethod
    def prepare(cls, routed: RoutedKinds, pin: bool = False, halo_tokens: int | None = None) -> "PinnedKinds":
        """Gathers the routing of each kind of layers; safe in a background thread. `halo_tokens` (`Fragments.of`) is
        None for a model without states, or whose documents stay whole."""
        prepare = partial(PinnedRouting.prepare, pin=pin)
        plans = {mask: plan.with_routings(prepare) for mask, plan in routed.plans.items()}
        layout, rank, fragments = routed.layout, routed.rank, None
        if halo_tokens is not None:
            fragments = PinnedFragments.prepare(Fragments.of(layout, rank, halo_tokens), pin)
        return cls(plans, routed.facts, layout, rank, pin, fragments)

    @property
    def document_tokens(self) -> IntArray:
        """`[segments]` tokens of each document, or part of one, that this rank holds, in row order."""
        return self.layout.segment_tokens[self.layout.segments_of(self.rank)]

    @property
    def whole_tokens(self) -> IntArray:
        """`[segments]` tokens of each segment's whole document."""
        return self.layout.document_tokens[self.layout.segment_document[self.layout.segments_of(self.rank)]]

    def planned(
        self,
        device: torch.device,
        fingerprint: int,
        posted: Posted | None = None,
        moves: DeviceRowMoves | None = None,
    ) -> Planned:
        """Returns the planned micro-batch, on the device; the host does not wait."""
        copied = dict[Mask, DeviceRankPlan]()

        def routings() -> Mapping[Mask, DeviceRankPlan]:
            if not copied:  # wrapping this function in `cache` would take longer
                for mask, plan in self.plans.items():
                    copied[mask] = plan.with_routings(lambda routing: routing.to(device))
            return copied

        def route_window(mask: Mask) -> DeviceRankPlan:
            log.debug("rank %d: %s is routed when a layer first attends with it", self.rank, mask)
            return on_device(rank_plan(plan_in_place(self.layout).of_window(mask), self.rank), device, self.pin)

        pinned = self.fragments
        fragments = None if pinned is None else cache(lambda: pinned.to(device))
        return Planned(routings, route_window, self.facts, fingerprint, posted, moves, fragments=fragments)


@dataclass(eq=False)
class LayerKind:
    """The layers that attend with one mask."""

    plan: DeviceRankPlan
    retention: Retention  # decides which rows of other ranks are kept until backward, and until recomputation
    has_room: bool = False  # whether the device is known to have room for a call of this pass


class LayerKinds:
    """Kinds of layers of one micro-batch."""

    def __init__(self, planned: Planned, config: DistCAConfig, where: str, layers: PassLayers) -> None:
        self._planned, self._config, self._where = planned, config, where
        self._longest_tokens = planned.facts.longest_document_tokens
        self._layers = layers
        self._halos: list[Retention] = []
        self._kinds: dict[Mask, LayerKind] = {}
        for mask, plan in planned.routings().items():
            self._add(mask, plan)

    def begin_forward_pass(self, layers: PassLayers) -> None:
        self._layers = layers
        for mask, kind in self._kinds.items():
            kind.retention.layers = layers.of(mask, self._longest_tokens)
            kind.has_room = False  # another pass may leave less room

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Returns the spec of a layer, without its window if no document of the micro-batch is longer."""
        if spec.window_tokens and spec.window_tokens >= self._longest_tokens:
            return without_window(spec)
        return spec

    def of(self, spec: AttentionSpec) -> LayerKind:
        """Returns the kind of layers that attend like this, as `spec` returned it. Routes a window that was not known
        before. Raises PlanError if the batch was planned without their mask."""
        mask, route_window = mask_of(spec), self._planned.route_window
        found = self._kinds.get(mask)
        if found is not None:
            return found
        if route_window is None or mask.window_tokens is None:
            planned = ", ".join(kind.in_words for kind in self._kinds)
            raise PlanError(
                f"{self._where}: a layer attends with {mask.in_words}, the plan of this batch has routings for "
                f"{planned}; plan it for the masks of all layers"
            )
        return self._add(mask, route_window(mask))

    def __iter__(self) -> Iterator[LayerKind]:
        return iter(self._kinds.values())

    @property
    def held(self) -> DeviceRouting:
        """One of the routings, from which to read the rows that this rank holds."""
        return next(iter(self)).plan.forward

    @property
    def num_rows(self) -> int:
        """Rows that this rank holds, padding included; rows here are tokens."""
        return self.held.num_rows // self.held.rows_per_token

    def check_fit(self, x: torch.Tensor, where: str) -> None:
        """Checks that device, rows and heads of a tensor fit the plan. Raises PlanError if they do not."""
        device, groups = self.held.send_rows.device, max(kind.plan.forward.rows_per_token for kind in self)
        if x.device != device:
            raise PlanError(
                f"{where}: attention got tensors on {x.device}, the plan of this batch is on {device}; keep the model "
                "where the loader puts batches (its argument device)"
            )
        if x.shape[0] != self.num_rows:
            raise PlanError(
                f"{where}: attention got {x.shape[0]} rows, the plan of this batch has {self.num_rows}; feed the "
                "batch to the model as the loader made it"
            )
        if x.shape[1] % groups:
            raise PlanError(
                f"{where}: the plan divides heads in {groups} groups, the model has {x.shape[1]} of them; plan with "
                "the number of its KV heads, or a divisor of it"
            )

    def _add(self, mask: Mask, plan: DeviceRankPlan) -> LayerKind:
        posted, is_full = self._planned.posted, mask.window_tokens is None
        room_bytes = None if posted is None else posted.room_bytes
        retention = Retention(self._config, plan.facts, room_bytes, self._halos if is_full else None)
        retention.layers = self._layers.of(mask, self._longest_tokens)
        if not is_full:
            self._halos.append(retention)
        kind = self._kinds[mask] = LayerKind(plan, retention)
        return kind
