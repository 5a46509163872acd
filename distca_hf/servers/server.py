"""Attention server: a process without weights and tokens that computes attention tasks of trainers.

    order      server
    open       answers the trainers, and opens the group for rows with them
    plan       routes it for its own rank
    call       attend(...), or attend_backward(...), on tensors of no rows: the same exchanges in the same order
    begin ...  notes the moments of a pass that trainers report, and writes a trace
    close      ends the group

Trainers post an order right before their own exchanges, which bring queries, keys and values and take results away.
Between two calls a server keeps plans, and the received rows that backward needs. A `Service` is the server's end of
one membership. Several are open at once if trainers have several plugins.

The process is a child of a supervisor (`servers/supervisor.py`), which restarts it if it dies.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from distca_hf.comm.rollcall import show_errors_once
from distca_hf.config import DistCAConfig, config_of
from distca_hf.errors import ConfigError, DistCAError, PeerLostError, PlanError, PlanMismatchError, StoreLostError
from distca_hf.kernels.interface import accumulation_dtype, spec_of
from distca_hf.launched import TRAINERS_GONE, launched_local_rank
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.runtime.attention import Attended, attend, attend_backward
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.retention import Kept
from distca_hf.servers.heartbeats import Heartbeat
from distca_hf.servers.job_store import has_ended, open_store
from distca_hf.servers.memberships import Invitation, Member, MembershipTransport
from distca_hf.servers.orders import DTYPES, CallOrder, Inbox, Kind, Order, PassOrder, Phase, PlanOrder
from distca_hf.servers.posted_plans import MeasuredCalls, ServedTraces
from distca_hf.servers.served_plans import plan_from_integers
from distca_hf.servers.speeds import Reading, Stopwatch, report
from distca_hf.servers.supervisor import LEAVING, is_running
from distca_hf.telemetry import OF_THIS_RANK, get_logger
from distca_hf.version import __version__


log = get_logger(__name__)

# Seconds between two looks for messages of trainers.
LOOK_SECONDS = 0.05
# Longest time for trainers to give up a membership after one of its exchanges has failed here.
GIVE_UP_SECONDS = 25.0
# Longest time that a server serves after SIGTERM or SIGINT if it cannot watch a trainer on its host: less than
# launchers wait before they kill.
LEAVE_SECONDS = 25.0


def main(arguments: Sequence[str]) -> int:
    """Serves as the child of a supervisor, and returns the exit status. `arguments` are the numbers of `serve_job`.
    Raises the errors of `serve_job`."""
    number, num_trainers, num_servers, restarts, pipe = map(int, arguments)
    os.set_inheritable(pipe, False)  # the supervisor must see it close
    show_errors_once()  # and so leave them for the launcher
    try:
        return serve_job(number, num_trainers, num_servers, restarts, pipe)
    except StoreLostError as error:
        log.error("attention server %d ends: %s", number, error)
        return TRAINERS_GONE


def serve_job(number: int, num_trainers: int, num_servers: int, restarts: int = 0, pipe: int | None = None) -> int:
    """Serves until the trainers' scripts have ended, and returns the exit status.

    Args:
        number: of this server, counted over all nodes.
        pipe: for heartbeats to its supervisor; None without one.

    Raises:
        StoreLostError: the launcher's store is gone.
        DistCAError: an order cannot be followed, or trainers were lost. The heartbeat goes on until the process ends:
            the message of the error is still on its way.
    """
    patience_seconds = DistCAConfig().timeouts.agreement_seconds
    heartbeat = Heartbeat(open_store(patience_seconds), number, restarts, pipe)
    server = Server(Member(number, restarts), num_trainers, heartbeat, patience_seconds)
    for one in LEAVING:
        signal.signal(one, server.note_signal)
    log.info("attention server %d of %d serves %d trainers", number, num_servers, num_trainers)
    heartbeat.begin(server.leave_lost_exchanges)
    status = server.run()
    heartbeat.end()
    return status


def without_rows(order: CallOrder, device: torch.device) -> Attended:
    """Returns tensors of the shapes in an order, without tokens: all that is computed here belongs to other ranks."""
    dtype = DTYPES[order.dtype]

    def none(heads: int, *dims: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(0, heads, *dims, device=device, dtype=dtype)

    return Attended(
        q_TNH=none(order.query_heads, order.query_dim),
        k_TGH=none(order.kv_heads, order.query_dim),
        v_TGV=none(order.kv_heads, order.value_dim),
        out_TNV=none(order.query_heads, order.value_dim),
        lse_TN=none(order.query_heads, dtype=accumulation_dtype(dtype)),
    )


@dataclass(eq=False)
class Service:
    """The server's end of one membership."""

    transport: MembershipTransport
    config: DistCAConfig
    device: torch.device
    report: Callable[[Reading], None]  # shows trainers the measurements since the membership began
    stopwatch: Stopwatch
    traces: ServedTraces
    # Live plans by number, with the rows kept for their backward passes, by slot.
    plans: dict[int, tuple[LivePlan, dict[int, Kept]]] = field(default_factory=dict)
    rows: dict[tuple[int, ...], Attended] = field(default_factory=dict)

    def take_plan(self, order: PlanOrder) -> None:
        """Routes a plan, and drops plans that no trainer holds any more. Raises PlanMismatchError if it is not the
        plan that the trainers made."""
        self.report(self.stopwatch.read())  # once per micro-batch, and not during its calls
        self.traces.write_complete()
        plan = plan_from_integers(order.integers)
        if plan.fingerprint != order.fingerprint:
            raise PlanMismatchError(
                f"micro-batch {order.micro_batch}: the plan that arrived has fingerprint {plan.fingerprint}, trainers "
                f"made {order.fingerprint}; install one version of distca_hf on all nodes"
            )
        routed = RoutedKinds.of(plan, self.transport.rank, order.num_chunks)
        kinds = PinnedKinds.prepare(routed, pin=self.device.type == "cuda")
        self.plans = {number: plan for number, plan in self.plans.items() if number >= order.oldest}
        live = LivePlan(
            order.micro_batch,
            kinds.planned(self.device, plan.fingerprint, MeasuredCalls(self.transport.rank, self.stopwatch)),
            self.transport,
            self.config,
        )
        self.plans[order.plan] = live, {}

    def plan(self, number: int) -> tuple[LivePlan, dict[int, Kept]]:
        """Returns the plan with a number, and the rows kept for it. Raises PlanError if there is no plan with this
        number."""
        if number not in self.plans:
            raise PlanError(f"a call names plan {number}, this server holds {', '.join(map(str, self.plans))}")
        return self.plans[number]

    @torch.no_grad()
    def call(self, order: CallOrder) -> None:
        """Makes an attention call. Raises PlanError if there is no plan with this number, or nothing was kept for
        it."""
        plan, kept = self.plan(order.plan)
        shapes = order[2:7]
        rows = self.rows.get(shapes)
        if rows is None:
            rows = self.rows[shapes] = without_rows(order, self.device)
        spec, slot = spec_of(*order.spec), order.slot
        plan.retention(spec).keeps = slot > 0
        if order.phase == Phase.FORWARD:
            _, _, received = attend(*rows[:3], spec, plan)
            kept.update({slot: received} if slot else {})
        elif slot and slot not in kept:
            raise PlanError(f"a call names slot {slot} of plan {order.plan}, and rows of {list(kept)} are kept here")
        else:
            of_forward = kept.pop(slot) if slot else Kept.nothing(rows.k_TGH)
            attend_backward(rows.out_TNV, rows, of_forward, spec, plan, order.has_sinks > 0)


class Server:
    """Follows the orders in its mailbox, one after the other.

    Args:
        heartbeat: of this process; it also sees memberships that were lost.
        patience_seconds: deadline for trainers to write what they have announced.
    """

    def __init__(self, member: Member, num_trainers: int, heartbeat: Heartbeat, patience_seconds: float) -> None:
        self._member, self._num_trainers, self._heartbeat = member, num_trainers, heartbeat
        self._patience_seconds = patience_seconds
        self._store = open_store(patience_seconds)
        self._store.check_secret()
        self._inbox = Inbox(self._store, *member)
        self._services: dict[int, Service] = {}
        self._left: list[MembershipTransport] = []
        self._lost_memberships: set[int] = set()
        self._trainers_here: list[int] = []
        self._signal: tuple[int, float] | None = None

    def note_signal(self, number: int, frame: object) -> None:
        """Notes that this process was asked to leave. Trainers may still end a step and save."""
        if self._signal is None:
            self._signal = number, time.monotonic()

    def leave_lost_exchanges(self) -> None:
        """Aborts exchanges on the GPU with trainers that have given them up. Runs in the heartbeat's thread, because
        the main thread may wait for that GPU."""
        for membership, service in list(self._services.items()):
            if self._heartbeat.is_abandoned(membership):
                service.transport.abort()

    def run(self) -> int:
        """Serves until the trainers have ended, and returns the exit status. For errors see `serve_job`."""
        status: int | None = None
        while status is None:
            order = self._inbox.next()
            if order is not None:
                self._follow(order)
            else:
                status = self._status()
        for service in self._services.values():
            service.traces.end()
        for transport in (*(service.transport for service in self._services.values()), *self._left):
            transport.close()
        return status

    def _status(self) -> int | None:
        """Returns the exit status if there is nothing more to serve, else None."""
        are_gone = bool(self._trainers_here) and not any(map(is_running, self._trainers_here))
        if any(has_ended(self._store, trainer) for trainer in range(self._num_trainers)):
            return 0
        if self._signal is not None:
            number, since = self._signal
            is_patient = not self._trainers_here and time.monotonic() - since <= LEAVE_SECONDS
            is_served = bool(self._trainers_here) and not are_gone
            if not self._services or not (is_patient or is_served):  # no trainer can make another call
                return 128 + number
        if are_gone:  # checked before `has_ended`. If one of them failed, a launcher ends this process
            log.warning(
                "attention server %d ends: processes %s of trainers left without an end of their script (os._exit?)",
                self._member.server,
                ", ".join(map(str, self._trainers_here)),
                extra=OF_THIS_RANK,
            )
            return 0
        return None

    def _follow(self, order: Order) -> None:
        if order.membership in self._lost_memberships:  # posted before its trainer noticed
            return
        where = f"attention server {self._member.server}"
        try:
            self._act(order, where)
        except PeerLostError as error:
            if not self._is_lost(order.membership):
                raise
            log.warning("%s leaves membership %d: %s", where, order.membership, error)
            self._leave(order.membership)
        except DistCAError as error:
            error.add_note(f"distca: {where}, membership {order.membership}")
            raise

    def _act(self, order: Order, where: str) -> None:
        if order.kind is Kind.OPEN:
            service = self._open(order.membership)
            if service is not None:
                self._services[order.membership] = service
            return
        if order.membership not in self._services:
            raise PlanMismatchError(
                f"{where}: an order of kind {order.kind.name} is of membership {order.membership}, and open are "
                f"{', '.join(map(str, self._services)) or 'none'}; nothing was computed for it. Restart the job"
            )
        service = self._services[order.membership]
        if order.kind is Kind.PLAN:
            service.take_plan(PlanOrder.of(order.numbers))
        elif order.kind is Kind.CALL:
            service.call(CallOrder.of(order.numbers))
        elif order.kind is Kind.BEGIN_PASS:
            begun = PassOrder.of(order.numbers)
            service.traces.begin(service.plan(begun.plan)[0], begun.text)
        elif order.kind is Kind.END_FORWARD:
            ended = PassOrder.of(order.numbers)
            plan, _ = service.plan(ended.plan)
            plan.forward_pass.end(exchanges=False, backward_calls=ended.backward_calls)
        else:
            service.traces.end()
            self._leave(order.membership)

    def _is_lost(self, membership: int) -> bool:
        """Returns whether trainers have given a membership up, after one of its exchanges has failed here. Waits for
        their message. Trainers that have ended, or that a signal ended, give nothing up."""
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while time.monotonic() < deadline and self._status() is None:
            if self._heartbeat.is_abandoned(membership):
                return True
            time.sleep(LOOK_SECONDS)
        return False

    def _leave(self, membership: int) -> None:
        """Leaves a membership. Its group ends once none of its exchanges is under way."""
        self._heartbeat.leave(membership)
        self._lost_memberships.add(membership)
        service = self._services.pop(membership, None)
        if service is not None:
            self._left.append(service.transport)
        for transport in [one for one in self._left if one.is_at_rest]:
            self._left.remove(transport)
            transport.close()

    def _open(self, membership: int) -> Service | None:
        """Answers an invitation, and opens the group with the trainers; None if others are invited."""
        self._heartbeat.look_for(membership)
        invitation = Invitation.read(self._store, membership, self._patience_seconds)
        if self._member not in invitation.members:
            self._heartbeat.leave(membership)
            return None
        try:
            if invitation.version != __version__:
                raise ConfigError(
                    f"trainers run distca_hf {invitation.version}, attention server {self._member.server} runs "
                    f"{__version__}; install one version on all nodes"
                )
            config, device = config_of(invitation.settings), self._device(invitation.device_type)
        except Exception as error:  # even a driver's: trainers would wait for an answer
            invitation.refuse(self._member.server, f"{type(error).__name__}: {error}")
            raise
        show = partial(report, invitation.store, self._member.server)
        show(Reading())  # before the answer, so that trainers find it

        def lost() -> str | None:
            return "trainers lost an attention server" if self._heartbeat.is_abandoned(membership) else None

        timeout_seconds = config.timeouts.exchange_seconds
        transport = invitation.accept(self._member, self._num_trainers, device, timeout_seconds, lost)
        # Containers may share a host's name but not its processes.
        self._trainers_here = [one for one in invitation.trainers_here(self._num_trainers) if is_running(one)]
        traces = ServedTraces(self._member.server, device, Path(config.report_folder))
        return Service(transport, config, device, show, Stopwatch(device), traces)

    def _device(self, kind: str) -> torch.device:
        if kind != "cuda":
            return torch.device(kind)
        local_rank, gpus = launched_local_rank(), torch.cuda.device_count()
        if local_rank >= gpus:
            raise ConfigError(
                f"attention server {self._member.server} needs GPU {local_rank} of its node, which has {gpus}: "
                "launch at most one process for each GPU"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
