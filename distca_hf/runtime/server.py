"""Attention server: a process without weights and without tokens, which computes attention tasks of trainers.

    order      server
    open       answers the trainers, and opens the group for rows with them
    plan       routes it for its own rank
    call       attend(...), or attend_backward(...), on tensors of no rows: the same exchanges in the same order
    close      ends the group

The operator of a trainer posts an order right before its own exchanges. Queries, keys and values arrive with these,
and results leave with them. Between two calls a server keeps nothing but plans.
"""

import os
import signal
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from distca_hf.comm.mailbox import Inbox, has_ended, open_store
from distca_hf.comm.orders import CallOrder, Kind, Order, Phase, PlanOrder
from distca_hf.comm.rosters import DTYPES, Invitation, RosterSize
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig, config_of
from distca_hf.errors import ConfigError, DistCAError, PlanError, PlanMismatchError
from distca_hf.kernels.interface import accumulation_dtype, spec_of
from distca_hf.launched import launched_local_rank
from distca_hf.planning.routing import rank_plan
from distca_hf.planning.wire import plan_from_integers
from distca_hf.runtime.attention import Attended, attend, attend_backward
from distca_hf.runtime.device_routing import PinnedRankPlan
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.retention import Kept
from distca_hf.telemetry import get_logger
from distca_hf.version import __version__


log = get_logger(__name__)

# Signals after which a server still serves: trainers end their step, and save. Launchers send them to all processes.
LEAVING = (signal.SIGTERM, signal.SIGINT)
# Longest time that a server serves after such a signal, where no trainer is on its host to be looked for: less than
# launchers wait before they kill.
LEAVE_SECONDS = 25.0


def serve_job(number: int, num_trainers: int, num_servers: int) -> int:
    """Serves until the trainers' scripts have ended, and returns the exit status. Called in a launched process instead
    of its script.

    Args:
        number: of this server, counted over all nodes.
        num_trainers, num_servers: of the job.

    Raises:
        DistCAError: an order cannot be followed; or trainers were lost.
    """
    server = Server(number, RosterSize(num_trainers, num_servers))
    for one in LEAVING:
        signal.signal(one, server.note_signal)
    return server.run()


class NoRows(NamedTuple):
    """Tensors of a layer without a token; all that is computed here belongs to other ranks."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    kept: Kept

    @classmethod
    def of(cls, order: CallOrder, device: torch.device) -> "NoRows":
        """Returns tensors of the shapes in an order."""
        dtype = DTYPES[order.dtype]

        def none(heads: int, *dims: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(0, heads, *dims, device=device, dtype=dtype)

        k = none(order.kv_heads, order.query_dim)
        return cls(
            q=none(order.query_heads, order.query_dim),
            k=k,
            v=none(order.kv_heads, order.value_dim),
            out=none(order.query_heads, order.value_dim),
            lse=none(order.query_heads, dtype=accumulation_dtype(dtype)),
            kept=Kept.nothing(k),
        )


@dataclass(eq=False)
class Service:
    """The server's end of one roster.

    Attributes:
        config: settings of the trainers' plugin.
        plans: live plans by number.
    """

    transport: Transport
    config: DistCAConfig
    device: torch.device
    plans: dict[int, LivePlan] = field(default_factory=dict)
    rows: dict[tuple[int, ...], NoRows] = field(default_factory=dict)

    def take_plan(self, order: PlanOrder) -> None:
        """Routes a plan, and drops those that no trainer holds any more.

        Raises:
            PlanMismatchError: it is not the plan that the trainers made.
        """
        plan = plan_from_integers(order.integers)
        if plan.fingerprint != order.fingerprint:
            raise PlanMismatchError(
                f"micro-batch {order.micro_batch}: the plan that arrived has fingerprint {plan.fingerprint}, trainers "
                f"made {order.fingerprint}; install one version of distca_hf on all nodes"
            )
        mine = rank_plan(plan, self.transport.rank, order.num_chunks)
        pinned = PinnedRankPlan.prepare(mine, pin=self.device.type == "cuda")
        self.plans = {number: live for number, live in self.plans.items() if number >= order.oldest}
        self.plans[order.plan] = LivePlan(
            order.micro_batch,
            {mine.mask: pinned.to(self.device)},
            mine.facts,
            self.transport,
            self.config,
            fingerprint=plan.fingerprint,
            may_keep=False,
        )

    @torch.no_grad()
    def call(self, order: CallOrder) -> None:
        """Makes an attention call.

        Raises:
            PlanError: there is no such plan.
        """
        plan = self.plans.get(order.plan)
        if plan is None:
            raise PlanError(f"a call names plan {order.plan}, this server holds {', '.join(map(str, self.plans))}")
        shapes = order[2:7]
        rows = self.rows.get(shapes)
        if rows is None:
            rows = self.rows[shapes] = NoRows.of(order, self.device)
        spec = spec_of(*order.spec)
        if order.phase == Phase.FORWARD:
            attend(rows.q, rows.k, rows.v, spec, plan)
        else:
            attended = Attended(rows.q, rows.k, rows.v, rows.out, rows.lse)
            attend_backward(rows.out, attended, rows.kept, spec, plan)


class Server:
    """Follows the orders in its mailbox, one after the other.

    Args:
        number: of this server.
        size: of every roster of the job.
    """

    def __init__(self, number: int, size: RosterSize) -> None:
        self._number, self._size = number, size
        self._patience_seconds = DistCAConfig().timeouts.agreement_seconds
        self._store = open_store(self._patience_seconds)
        self._inbox = Inbox(self._store, number)
        self._services: dict[int, Service] = {}
        self._trainers_here: list[int] = []
        self._signal: tuple[int, float] | None = None

    def note_signal(self, number: int, frame: object) -> None:
        """Notes that this process was asked to leave; trainers may still end a step and save."""
        if self._signal is None:
            self._signal = number, time.monotonic()

    def run(self) -> int:
        """Serves until the trainers have ended, and returns the exit status. For errors see `serve_job`."""
        log.info("attention server %d of %d serves %d trainers", self._number, self._size.servers, self._size.trainers)
        while True:
            order = self._inbox.next()
            if order is not None:
                self._follow(order)
            elif has_ended(self._store, self._number % self._size.trainers):
                status = 0
                break
            elif self._signal is not None and self._may_leave(*self._signal):
                status = 128 + self._signal[0]
                break
        for service in self._services.values():
            service.transport.close()
        return status

    def _may_leave(self, number: int, since: float) -> bool:
        """Returns whether no trainer can have another call, after a signal."""
        if not self._services:
            return True
        if self._trainers_here:
            return not any(map(_is_running, self._trainers_here))
        return time.monotonic() - since > LEAVE_SECONDS

    def _follow(self, order: Order) -> None:
        """Follows one order.

        Raises:
            DistCAError: it cannot be followed.
        """
        where = f"attention server {self._number}, roster {order.roster}"
        try:
            if order.kind is Kind.OPEN:
                self._services[order.roster] = self._open(order.roster)
                return
            service = self._services.get(order.roster)
            if service is None:
                raise PlanMismatchError(f"an order of kind {order.kind.name} came before the roster was opened")
            if order.kind is Kind.PLAN:
                service.take_plan(PlanOrder.of(order.numbers))
            elif order.kind is Kind.CALL:
                service.call(CallOrder.of(order.numbers))
            else:
                del self._services[order.roster]
                service.transport.close()
        except DistCAError as error:
            error.add_note(f"distca: {where}")
            raise

    def _open(self, roster: int) -> Service:
        """Answers an invitation, and opens the group with the trainers.

        Raises:
            ConfigError: this server cannot take part; the trainers get the same words.
        """
        invitation = Invitation.read(self._store, roster, self._patience_seconds)
        try:
            if invitation.version != __version__:
                raise ConfigError(
                    f"trainers run distca_hf {invitation.version}, attention server {self._number} runs "
                    f"{__version__}; install one version on all nodes"
                )
            config, device = config_of(invitation.settings), self._device(invitation.device_type)
        except Exception as error:  # of a driver, too: trainers would wait for an answer
            invitation.refuse(self._number, f"{type(error).__name__}: {error}")
            raise
        timeout_seconds = config.timeouts.exchange_seconds
        transport = invitation.accept(self._number, self._size, device, timeout_seconds)
        self._trainers_here = invitation.trainers_here(self._size)
        return Service(transport, config, device)

    def _device(self, kind: str) -> torch.device:
        """Returns the device to compute on.

        Raises:
            ConfigError: there is none of this kind.
        """
        if kind != "cuda":
            return torch.device(kind)
        local_rank, gpus = launched_local_rank(), torch.cuda.device_count()
        if local_rank >= gpus:
            raise ConfigError(
                f"attention server {self._number} needs GPU {local_rank} of its node, which has {gpus}: launch at "
                "most one process for each GPU"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)


def _is_running(process: int) -> bool:
    """Returns whether there is a process with this number on this host."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
