"""Residency: whether what came from other ranks stays in memory until backward, or is fetched again.

Kept are keys and values, and queries of guests with their outputs. Where attention is recomputed one layer after the
other, received rows of all layers may wait for that, too (`runtime.waiting`). Both decisions are the same on all ranks
and in all layers of a micro-batch: fetching is an exchange.
"""

from dataclasses import dataclass

import torch

from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.runtime.plans import LivePlan


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


def nothing_kept(plan: LivePlan, k: torch.Tensor) -> Kept:
    """Empty tensors. They are made once per plan: new ones for each layer cost the host more; nothing is derived from
    them."""
    if plan.nothing is None or plan.nothing[0].dtype != k.dtype:
        with torch.inference_mode(False):  # training may follow, whose tensors must not be of inference
            nothing = Kept.nothing(k)
        plan.nothing = nothing.keys, *nothing.guests
    return Kept(*plan.nothing)


def keeps_received(plan: LivePlan, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> bool:
    """Whether this micro-batch keeps what it receives; decided by its first layer.

    With `kv_residency="auto"` it does if all layers that hold something at the same time fit `kv_budget_gib` on the
    rank that receives most. Where attention itself is recomputed, that is one layer.
    """
    if plan.keeps_received is None:
        setting = plan.config.kv_residency
        if setting == "auto":
            budget = plan.config.kv_budget_gib * 2**30
            plan.keeps_received = kept_bytes(plan, q_TNH, k_TGH, v_TGV) * plan.layers_kept <= budget
        else:
            plan.keeps_received = setting == "keep"
    return plan.keeps_received


def waits_for_recomputation(plan: LivePlan, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> bool:
    """Whether received rows of all layers wait until their attention is recomputed; decided by the first layer."""
    if plan.waits_for_recomputation is None:
        setting, budget = plan.config.kv_residency, plan.config.kv_budget_gib * 2**30
        if setting == "auto" and keeps_received(plan, q_TNH, k_TGH, v_TGV):
            of_all_layers = received_bytes(plan, q_TNH, k_TGH, v_TGV) * plan.attention_calls
            plan.waits_for_recomputation = of_all_layers <= budget
        else:
            plan.waits_for_recomputation = setting == "keep"
    return plan.waits_for_recomputation


def kept_bytes(plan: LivePlan, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> int:
    """Bytes of one layer's `Kept` on the rank that receives most."""
    result_bytes = v_TGV.shape[2] * q_TNH.element_size() + accumulation_dtype(q_TNH.dtype).itemsize
    return _most_bytes(plan, k_TGH, v_TGV, q_TNH.shape[1] * (q_TNH.shape[2] * q_TNH.element_size() + result_bytes))


def received_bytes(plan: LivePlan, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> int:
    """Bytes of one layer's `Received` on the rank that receives most."""
    return _most_bytes(plan, k_TGH, v_TGV, q_TNH.shape[1:].numel() * q_TNH.element_size())


def _most_bytes(plan: LivePlan, k_TGH: torch.Tensor, v_TGV: torch.Tensor, query_bytes: int) -> int:
    """Of received keys and values, and of guests with so many bytes per query, on the rank where these are most."""
    facts = plan.facts
    key_bytes = (k_TGH.shape[1:].numel() + v_TGV.shape[1:].numel()) * k_TGH.element_size()
    received = zip(facts.key_rows_received, facts.guest_rows, strict=True)
    most = max((keys * key_bytes + queries * query_bytes for keys, queries in received), default=0)
    return most // facts.rows_per_token
