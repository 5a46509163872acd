"""Reuse: where checkpointing recomputes attention, what came from other ranks in forward waits for it.

    forward     attend ── keys and queries of other ranks ──┐          backward    recompute, without an exchange
                                                            └────────▶

Otherwise the same rows would travel once more, just when gradients and weights of sharded layers travel, too. They
take less memory than attention outputs: only rows of documents that span ranks, and none of their queries if those
stay where they are.
"""

from typing import Any, Self

import torch

from distca_hf.integrations.attention_mode import FLASH_ATTN, AttentionMode
from distca_hf.runtime.op import flash_attn_again
from distca_hf.runtime.plans import find_plan
from distca_hf.runtime.residency import Came, waits_for_recomputation


class ReceivedRows:
    """The `context_fn` of checkpointed modules; called once for each region and forward pass."""

    def __call__(self) -> tuple[AttentionMode, "_Recomputing"]:
        came: list[Came | None] = []
        return AttentionMode(_Keeping(came)), _Recomputing(came)


class _Keeping:
    """Forward: keeps what every call received, if its plan says so."""

    def __init__(self, came: list[Came | None]) -> None:
        self._came = came

    def __call__(self, operator: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        outputs: tuple[torch.Tensor, ...] = operator(*args)
        if operator is FLASH_ATTN:
            q, k, v, _, plan = args
            waits = waits_for_recomputation(find_plan(plan), q, k, v)
            self._came.append(Came(outputs[2].detach(), outputs[3].detach()) if waits else None)
        return outputs


class _Recomputing(AttentionMode):
    """Recomputation: the same calls get what they received before."""

    def __init__(self, came: list[Came | None]) -> None:
        super().__init__(self._attend)
        self._came, self._taken = came, 0

    def __enter__(self) -> Self:
        self._taken = 0  # with `retain_graph` perhaps not for the first time
        super().__enter__()
        return self

    def _attend(self, operator: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        if operator is not FLASH_ATTN:
            outputs: tuple[torch.Tensor, ...] = operator(*args)
            return outputs
        if self._taken >= len(self._came):
            raise RuntimeError(
                f"recomputation made more than the {len(self._came)} attention calls of its forward pass; "
                "kv_residency='refetch' exchanges again"
            )
        came, self._taken = self._came[self._taken], self._taken + 1
        q, k, v, scale, plan = args
        return operator(*args) if came is None else flash_attn_again(q, k, v, scale, plan, came)
