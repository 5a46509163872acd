"""Call orders: what a trainer tells attention servers, and its own stopwatch, right before a call's exchanges."""

import torch

from distca_hf.flops import ATTENTION_BACKWARD
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.runtime.layer_kinds import LayerKinds
from distca_hf.runtime.retention import Slots
from distca_hf.servers.orders import Phase
from distca_hf.servers.posted_plans import PostedPlan
from distca_hf.servers.speeds import Stopwatch


class CallOrders:
    """Announces the calls of one planned micro-batch.

    Args:
        posted: the plan as attention servers have it; None if they take no part.
        kinds: the layers by their masks.
        slots: numbers of rows that servers keep.
        rank: of this process among those that share documents.
        stopwatch: measures this rank's kernels; None where nobody asks for their times.
    """

    def __init__(
        self, posted: PostedPlan | None, kinds: LayerKinds, slots: Slots, rank: int, stopwatch: Stopwatch | None
    ) -> None:
        self._posted, self._kinds, self._slots, self._rank, self._stopwatch = posted, kinds, slots, rank, stopwatch

    def forward(
        self, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor, spec: AttentionSpec, keeps: bool
    ) -> int:
        """Posts a call of forward to attention servers, if there are any.

        Args:
            keeps: whether they keep received rows until backward.

        Returns:
            The slot in which they do; 0: they do not.
        """
        if self._posted is None and self._stopwatch is None:
            return 0
        slot = self._slots.open() if keeps and self._posted is not None else 0
        self._announce(Phase.FORWARD, q_TNH, k_TGH, v_TGV, spec, slot)
        return slot

    def backward(
        self,
        q_TNH: torch.Tensor,
        k_TGH: torch.Tensor,
        v_TGV: torch.Tensor,
        spec: AttentionSpec,
        slot: torch.Tensor,
        has_sinks: bool = False,
    ) -> bool:
        """Posts a call of backward to attention servers, if there are any.

        Args:
            slot: of the same call of forward, see `Kept`. Servers keep it for one backward pass: for a second one rows
                are sent again.
            has_sinks: see `CallOrder`.

        Returns:
            Whether rows were kept, by this rank and by servers.
        """
        number = self._slots.close(slot)
        self._announce(Phase.BACKWARD, q_TNH, k_TGH, v_TGV, spec, number, has_sinks)
        return self._kinds.of(spec).retention.keeps is True if self._posted is None else number > 0

    def _announce(
        self,
        phase: Phase,
        q_TNH: torch.Tensor,
        k_TGH: torch.Tensor,
        v_TGV: torch.Tensor,
        spec: AttentionSpec,
        slot: int,
        has_sinks: bool = False,
    ) -> None:
        """Posts a call. Kernels that follow are measured as those of this call."""
        if self._posted is not None:
            self._posted.call(phase, q_TNH, k_TGH, v_TGV, spec, slot, has_sinks)
        if self._stopwatch is not None and not spec.window_tokens:
            facts, heads, dims = self._kinds.of(spec).plan.facts, q_TNH.shape[1], q_TNH.shape[2] + v_TGV.shape[2]
            flops = 2 * dims * heads * facts.work[self._rank] // facts.rows_per_token
            self._stopwatch.begin_call(flops if phase is Phase.FORWARD else round(ATTENTION_BACKWARD * flops))
