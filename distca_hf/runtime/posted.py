"""Posted: a plan that ranks without tokens also have, and what they are told about it. Without these ranks no plan is
posted. See `distca_hf.servers`."""

from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch

from distca_hf.comm.transport import Transport
from distca_hf.cost import TokenBytes
from distca_hf.kernels.interface import AttentionSpec, Kernel
from distca_hf.planning.plan import ExtraRanks, Plan, PlanFacts
from distca_hf.runtime.pending_traces import NotedPass
from distca_hf.trace_file import TraceFile
from distca_hf.traces import RankTrace


class AnnouncedCall(NamedTuple):
    """An attention call that is about to exchange rows; `facts` are from the layers with its mask."""

    q_TNH: torch.Tensor
    k_TGH: torch.Tensor
    v_TGV: torch.Tensor
    spec: AttentionSpec
    facts: PlanFacts


class Posted(ABC):
    """The posted plan of a micro-batch; each attention call is announced to it."""

    ranks: tuple[int, ...] = ()  # numbers of the ranks without tokens, in the order of the plan
    room_bytes: float | None = None  # bytes that rows may take on each of them until backward; None if there are none

    def runs_again(self, error: Exception) -> bool:
        """Returns whether an error was the loss of one of them in a step that will run again. Until the step ends,
        attention returns zeros and exchanges nothing."""
        return False

    @abstractmethod
    def again(self) -> Self:
        """Posts the same plan again, for another pass."""

    @abstractmethod
    def forward(self, call: AnnouncedCall, keeps: bool) -> int:
        """Announces a forward call. If `keeps`, returns the slot in which ranks without tokens keep received rows
        until backward; 0 if they keep none."""

    @abstractmethod
    def backward(self, call: AnnouncedCall, slot: torch.Tensor, has_sinks: bool, keeps: bool) -> bool:
        """Announces a backward call, and returns whether all ranks kept rows for it.

        Args:
            slot: slot of the forward call, see `Kept`. Rows are kept for one backward pass, and sent again for a
                second one.
            has_sinks: whether output and log-sum-exp include sinks.
            keeps: whether this rank kept rows.
        """

    @abstractmethod
    def measured(self, kernel: Kernel, spec: AttentionSpec) -> Kernel:
        """Returns a kernel for this rank's part of announced calls, which may be measured."""

    @abstractmethod
    def traced(self, device: torch.device, file: TraceFile, token_bytes: TokenBytes, trace: RankTrace) -> NotedPass:
        """Returns what notes the moments of a beginning pass. Ranks without tokens also trace it, following this
        rank's `trace`, which has no calls yet."""


class PostingTransport(ABC):
    """Transport of a training rank that also reaches ranks without tokens, and posts plans to them."""

    among_trainers: Transport  # transport that reaches only the training ranks
    extra_ranks: ExtraRanks | None  # ranks without tokens that take part now; None if there are none
    membership: int  # number that changes whenever other ranks take part

    @abstractmethod
    def post(self, plan: Plan | None, micro_batch: int, num_chunks: int) -> Posted:
        """Posts the plan of a micro-batch.

        Args:
            plan: None if no rank without tokens takes part.
            num_chunks: number of chunks of its exchanges.
        """


def among_trainers(transport: Transport) -> Transport:
    """Returns the transport that reaches only training ranks."""
    return transport.among_trainers if isinstance(transport, PostingTransport) else transport
