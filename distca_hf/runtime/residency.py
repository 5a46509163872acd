"""Residency: whether what came from other ranks stays in memory until backward, or is fetched again.

Kept are keys and values, and queries of guests with their outputs. Where attention is recomputed one layer after the
other, received rows of all layers may wait for that, too (`runtime.waiting`). Both decisions are the same on all ranks
and in all layers of a micro-batch: fetching is an exchange.
"""

from dataclasses import dataclass

import torch

from distca_hf.config import DistCAConfig
from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.planning.plan_facts import PlanFacts


@dataclass(eq=False, slots=True)
class Kept:
    """What is kept of one layer; empty tensors for what is not.

    Attributes:
        keys: `[rows, G * H + G * V]` received keys and values.
        guest_q, guest_out, guest_lse: `[guest rows, ...]`.
    """

    keys: torch.Tensor
    guest_q: torch.Tensor
    guest_out: torch.Tensor
    guest_lse: torch.Tensor

    @classmethod
    def nothing(cls, k: torch.Tensor) -> "Kept":
        keys, q, out = k.new_empty((0, 0)), k.new_empty((0, 0, 0)), k.new_empty((0, 0, 0))
        return cls(keys, q, out, k.new_empty((0, 0), dtype=accumulation_dtype(k.dtype)))

    def received(self) -> "Received":
        """What of it came from other ranks."""
        return Received(self.keys, self.guest_q).once_more()

    @property
    def guests(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, outputs and log-sum-exps."""
        return self.guest_q, self.guest_out, self.guest_lse


@dataclass(eq=False, slots=True)
class Received:
    """What came from other ranks in a layer's forward pass.

    Attributes:
        keys: `[rows, G * H + G * V]` keys and values.
        guest_q: `[guest rows, ...]`.
    """

    keys: torch.Tensor
    guest_q: torch.Tensor

    def once_more(self) -> "Received":
        """The same memory in tensors of their own: an operator's outputs get a history."""
        return Received(self.keys.detach(), self.guest_q.detach())


class Retention:
    """Decides for a micro-batch what of other ranks is kept until backward, and until recomputation.

    The first layer decides for all layers; all ranks decide alike, because fetching is an exchange.

    Attributes:
        layers_kept: layers whose attention is saved for backward at the same time.
        attention_calls: of one forward pass.
        keeps: whether received rows are kept until backward; None before the first layer.
    """

    def __init__(self, config: DistCAConfig, facts: PlanFacts) -> None:
        self._config, self._facts = config, facts
        self.layers_kept = self.attention_calls = 1
        self.keeps: bool | None = None
        self._waits: bool | None = None
        self._nothing: Kept | None = None

    def begin_forward_pass(self, layers_kept: int, attention_calls: int) -> None:
        """Notes how many layers the next pass has; see the attributes."""
        self.layers_kept, self.attention_calls = layers_kept, attention_calls

    def keeps_received(self, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> bool:
        """Returns whether this micro-batch keeps what it receives until backward.

        With `kv_residency="auto"` it does if all layers that hold something at the same time fit `kv_budget_gib` on
        the rank that receives most. Where attention itself is recomputed, that is one layer.
        """
        if self.keeps is None:
            setting = self._config.kv_residency
            if setting == "auto":
                self.keeps = kept_bytes(self._facts, q_TNH, k_TGH, v_TGV) * self.layers_kept <= self._budget_bytes
            else:
                self.keeps = setting == "keep"
        return self.keeps

    def waits_for_recomputation(self, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> bool:
        """Returns whether received rows of all layers wait until their attention is recomputed."""
        if self._waits is None:
            setting = self._config.kv_residency
            if setting == "auto" and self.keeps_received(q_TNH, k_TGH, v_TGV):
                of_all_layers = received_bytes(self._facts, q_TNH, k_TGH, v_TGV) * self.attention_calls
                self._waits = of_all_layers <= self._budget_bytes
            else:
                self._waits = setting == "keep"
        return self._waits

    def nothing(self, k: torch.Tensor) -> Kept:
        """Returns empty tensors. They are made once: new ones for each layer cost the host more; nothing is derived
        from them."""
        if self._nothing is None or self._nothing.keys.dtype != k.dtype:
            with torch.inference_mode(False):  # training may follow, whose tensors must not be of inference
                self._nothing = Kept.nothing(k)
        return self._nothing

    @property
    def _budget_bytes(self) -> float:
        return self._config.kv_budget_gib * 2**30


def kept_bytes(facts: PlanFacts, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> int:
    """Returns the bytes of one layer's `Kept` on the rank that receives most."""
    result_bytes = v_TGV.shape[2] * q_TNH.element_size() + accumulation_dtype(q_TNH.dtype).itemsize
    return _most_bytes(facts, k_TGH, v_TGV, q_TNH.shape[1] * (q_TNH.shape[2] * q_TNH.element_size() + result_bytes))


def received_bytes(facts: PlanFacts, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> int:
    """Returns the bytes of one layer's `Received` on the rank that receives most."""
    return _most_bytes(facts, k_TGH, v_TGV, q_TNH.shape[1:].numel() * q_TNH.element_size())


def _most_bytes(facts: PlanFacts, k_TGH: torch.Tensor, v_TGV: torch.Tensor, query_bytes: int) -> int:
    """Returns bytes of received keys and values, and of guests with `query_bytes` each, on the rank with the most."""
    key_bytes = (k_TGH.shape[1:].numel() + v_TGV.shape[1:].numel()) * k_TGH.element_size()
    received = zip(facts.key_rows_received, facts.guest_rows, strict=True)
    most = max((keys * key_bytes + queries * query_bytes for keys, queries in received), default=0)
    return most // facts.rows_per_token
