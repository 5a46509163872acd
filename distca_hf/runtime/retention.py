"""Retention: rows of other ranks that stay in memory until backward, or until checkpointing recomputes attention.

    forward     attend ── keys and queries of other ranks ──┐          backward    attend again, without fetching them
                                                            └────────▶

Ranks may keep received keys and values, and remote queries with their results, until backward. If attention is
recomputed, received rows of all layers may be kept until then. Otherwise the same rows would be sent again, just when
sharded layers send gradients and weights. They take less memory than attention outputs: only rows of documents that
span ranks, and no queries if all stay on their rank. Results of remote queries are computed and sent again.

Layers differ in how long they hold rows of other ranks:

    forward    layer 0 holds all until backward   │ layer 1 recomputed: holds what it received, or nothing
    backward                                      │ layers of one checkpointed region hold all at the same time

Both decisions are the same on all ranks and in all layers of a micro-batch, because fetching is an exchange.

Ranks without tokens also keep rows if attention is not recomputed. They hold no graph, so every forward call gets a
number, its slot, under which they keep what they received. Backward names the slot.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, Mask
from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.planning.plan import PlanFacts
from distca_hf.telemetry import warn


# For each checkpointed region whose attention is recomputed: masks of its layers.
Regions = tuple[tuple[Mask, ...], ...]


class HeldLayers(NamedTuple):
    """Numbers of layers of one kind that hold rows of other ranks, and when."""

    saved: int = 1  # layers that hold backward's rows from forward on
    recomputed: int = 0  # all other layers; they attend again before their backward
    together: int = 0  # most of the recomputed layers in one region; they hold the rows at the same time


class PassLayers(NamedTuple):
    """Layers of a forward pass."""

    attention_calls: int = 1  # number of attention calls of the pass, as far as it is known before the first pass
    # Masks of the model's layers, each with the number of its layers. A layer in tiles of heads counts once for each
    # tile.
    layer_masks: LayerMasks = CAUSAL_LAYERS
    regions: Regions = ()  # regions whose attention is recomputed
    layers_of_calls: tuple[int, ...] = ()  # number of the layer of each call, if layers make several in tiles of heads

    def of(self, kind: Mask, longest_document_tokens: int) -> HeldLayers:
        """Returns the layers of one kind, at least one. If no layer is known to have this mask, all may have it. A
        window that is at least as long as the longest document counts as no window."""

        def in_kind(mask: Mask) -> bool:
            return mask.within(longest_document_tokens) == kind

        counts: Callable[[Mask], bool] = in_kind
        if not any(in_kind(mask) for mask, _ in self.layer_masks):
            counts = bool
        total = sum(count for _, count in self.layer_masks)
        layers = sum(count for mask, count in self.layer_masks if counts(mask))
        of_regions = [sum(map(counts, masks)) for masks in self.regions]
        calls = self.attention_calls / total  # calls per layer: some models run a layer several times
        recomputed = round(calls * sum(of_regions))
        saved = max(0 if recomputed else 1, round(calls * layers) - recomputed)
        return HeldLayers(saved, recomputed, max(of_regions, default=0))


# Layers of an unknown pass.
ONE_LAYER = PassLayers()


@dataclass(eq=False, slots=True)
class Kept:
    """One layer's rows that are kept until backward; empty tensors if not kept."""

    keys: torch.Tensor  # `[rows, G * H + G * V]` received keys and values
    # `[remote-query rows, ...]`.
    remote_q: torch.Tensor
    remote_out: torch.Tensor
    remote_lse: torch.Tensor
    # `[number, 0]`; ranks without tokens keep theirs under this number, or nothing if it is 0. Graphs carry tensors to
    # backward, and write to memory that nobody needs any more, so it has none.
    slot: torch.Tensor

    @classmethod
    def nothing(cls, k: torch.Tensor) -> "Kept":
        keys, q, out = k.new_empty((0, 0)), k.new_empty((0, 0, 0)), k.new_empty((0, 0, 0))
        return cls(keys, q, out, k.new_empty((0, 0), dtype=accumulation_dtype(k.dtype)), k.new_empty((0, 0)))

    def received(self) -> "Received":
        return Received(self.keys, self.remote_q).once_more()


@dataclass(eq=False, slots=True)
class Received:
    """Rows that came from other ranks in a layer's forward pass."""

    keys: torch.Tensor  # `[rows, G * H + G * V]` keys and values
    remote_q: torch.Tensor  # `[remote-query rows, ...]`

    def once_more(self) -> "Received":
        """Returns detached aliases: an operator's outputs get a history, so kept rows must be other tensors."""
        return Received(self.keys.detach(), self.remote_q.detach())


class Retention:
    """Decides for a micro-batch which rows of other ranks are kept until backward, and until recomputation.

    The first layer decides for all layers with its mask; all ranks decide alike, because fetching is an exchange.
    """

    def __init__(
        self,
        config: DistCAConfig,
        facts: PlanFacts,  # facts of the layers with one mask
        room_bytes: float | None = None,  # on each rank without tokens; None if there are none
        # Retentions of the layers with windows, which have few rows and count before full layers'; None for a layer
        # with a window.
        halos: "Sequence[Retention] | None" = (),
    ) -> None:
        self._config, self._facts, self._room_bytes, self._halos = config, facts, room_bytes, halos
        self.layers = HeldLayers()  # layers of the pass with this mask; set before each pass
        # Whether received rows are kept until backward; None before the first layer. On ranks without tokens it is set
        # for each call.
        self.keeps: bool | None = None
        self._waits: bool | None = None if room_bytes is None else False
        self._nothing: Kept | None = None

    def keeps_received(self, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> bool:
        """Returns whether this micro-batch keeps received rows until backward.

        With `kv_residency="auto"` it does if all layers that hold rows at the same time fit `kv_budget_gib` on the
        rank that receives most. Among layers that recompute attention, only one checkpointed region holds rows at a
        time. Ranks without tokens must also have room. They keep nothing if any layer recomputes attention: otherwise
        they would keep the rows of a pass that is never differentiated.
        """
        if self.keeps is None:
            setting, is_limited = self._config.kv_residency, self._room_bytes is not None
            if setting == "refetch" or (is_limited and self.layers.recomputed):
                self.keeps = False
            elif self._halos is None:
                self.keeps = True
            elif setting == "auto" or is_limited:
                kept = sum(
                    (one.layers.saved + one.layers.together) * kept_bytes(one._facts, q_TNH, k_TGH, v_TGV)
                    for one in self._counted
                )
                self.keeps = kept <= self._budget_bytes
                if setting == "keep" and not self.keeps:
                    # Python shows each text once. With exact bytes every micro-batch would have another text.
                    needed_bytes = 2 ** (kept - 1).bit_length()
                    warn(
                        f"kv_residency='keep': ranks without tokens have room for {self._room_bytes:.0f} bytes of "
                        f"rows, and some micro-batches need more, up to {needed_bytes}; their rows are sent again for "
                        "backward",
                        stacklevel=2,
                    )
            else:
                self.keeps = True
        return self.keeps

    def waits_for_recomputation(self, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> bool:
        """Returns whether received rows of all layers that recompute attention stay until then, in addition to the
        rows that other layers keep until backward."""
        if self._waits is None:
            setting = self._config.kv_residency
            if setting == "auto" and self.keeps_received(q_TNH, k_TGH, v_TGV):
                of_all_layers = sum(
                    one.layers.saved * kept_bytes(one._facts, q_TNH, k_TGH, v_TGV)
                    + one.layers.recomputed * received_bytes(one._facts, q_TNH, k_TGH, v_TGV)
                    for one in self._counted
                )
                self._waits = self._halos is None or of_all_layers <= self._budget_bytes
            else:
                self._waits = setting == "keep"
        return self._waits

    def nothing(self, k: torch.Tensor) -> Kept:
        """Returns empty tensors, made once: new ones for each layer would cost the host more."""
        if self._nothing is None or self._nothing.keys.dtype != k.dtype:
            with torch.inference_mode(False):  # training may follow, and needs tensors outside inference mode
                self._nothing = Kept.nothing(k)
        return self._nothing

    @property
    def _counted(self) -> "tuple[Retention, ...]":
        """Layers that share the budget: layers with this mask, and layers with windows."""
        return self, *(self._halos or ())

    @property
    def _budget_bytes(self) -> float:
        given = self._config.kv_budget_gib * 2**30 if self._config.kv_residency == "auto" else math.inf
        return given if self._room_bytes is None else min(given, self._room_bytes)


def kept_bytes(facts: PlanFacts, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> int:
    """Returns the bytes of one layer's `Kept` on the rank that receives most."""
    result_bytes = v_TGV.shape[2] * q_TNH.element_size() + accumulation_dtype(q_TNH.dtype).itemsize
    return _most_bytes(facts, k_TGH, v_TGV, q_TNH.shape[1] * (q_TNH.shape[2] * q_TNH.element_size() + result_bytes))


def received_bytes(facts: PlanFacts, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> int:
    """Returns the bytes of one layer's `Received` on the rank that receives most."""
    return _most_bytes(facts, k_TGH, v_TGV, q_TNH.shape[1:].numel() * q_TNH.element_size())


def _most_bytes(facts: PlanFacts, k_TGH: torch.Tensor, v_TGV: torch.Tensor, query_bytes: int) -> int:
    """Returns bytes of received keys and values plus remote queries of `query_bytes` each, on the rank with most."""
    key_bytes = (k_TGH.shape[1:].numel() + v_TGV.shape[1:].numel()) * k_TGH.element_size()
    received = zip(facts.key_rows_received, facts.remote_query_rows, strict=True)
    most = max((keys * key_bytes + queries * query_bytes for keys, queries in received), default=0)
    return most // facts.rows_per_token
