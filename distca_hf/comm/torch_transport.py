"""Transport over process groups of torch: rows over NCCL or gloo, integers over gloo, and a clean shutdown.

Gloo's threads must be idle before the interpreter shuts down. A thread releases an operation a moment after it has
finished, or much later on a busy machine. Tensors belong to Python objects, so it needs the GIL for that. If the
interpreter starts to shut down while the thread waits for the GIL, CPython ends the thread inside a C++ destructor.
The process then dies of SIGABRT with "terminate called without an active exception". A thread that asks even later
does no harm: torch then leaves the object where it is.

Ending a group waits for the same threads. DDP's reducer drops its group, and joins the group's threads, while it holds
the GIL. If it has the last reference to the group (`accelerator.end_training()` before the model is dropped), the
process hangs forever. So this transport holds the job's group, too, until its threads are idle.
"""

import atexit
import ctypes
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from distca_hf.comm.grid import Grid, Scope
from distca_hf.comm.rollcall import RollCall
from distca_hf.comm.transport import REMEMBERED_EXCHANGES, AllToAll, Traffic
from distca_hf.comm.whereabouts import Whereabouts
from distca_hf.errors import ConfigError, DistCAError, PeerLostError, PlanMismatchError, StepTimeoutError, first_line
from distca_hf.telemetry import get_logger, leave_for_launcher
from distca_hf.torch_private import (
    AllToAllFunction,
    RowGroup,
    all_to_all_of,
    collectives_started,
    ranks_of_groups,
)


log = get_logger(__name__)

# Description of groups that only a background thread uses.
IN_THREAD = "distca in a thread"
# Torch's name of gloo's threads, as Linux shows it.
GLOO_THREAD = "pt_gloo_runloop"
# Seconds between two looks at gloo's threads: one that waits for the GIL gets it meanwhile.
POLL_SECONDS = 0.001
# Looks in a row that must find all of them asleep. A thread that waits for the GIL sleeps, too, and a busy machine may
# not wake it between two looks.
QUIET_LOOKS = 20
# A thread that still computes is not a reason to wait longer.
LONGEST_WAIT_SECONDS = 2.0
# How often a wait for an operation of gloo is interrupted, to find out whether it is in vain.
PART = timedelta(seconds=1)
# Looks of a thread until it ends a process that no exception reaches. Usually errors of other ranks end it earlier.
LOOKS_IN_VAIN = 5
REMEDY = (
    "All ranks must run the same micro-batches: one that skips a batch (out of memory, a loss that is not finite), or "
    "has one more (unequal lengths, even_batches=False), leaves the others waiting. Skip it on all ranks, or on none"
)


class TorchTransport:
    """Exchanges over a `torch.distributed` group (NCCL or gloo), integers over gloo groups next to it."""

    def __init__(
        self,
        data_group: RowGroup,
        # Gloo groups for integers, by scope; empty if no integers are sent.
        control_groups: Mapping[Scope, dist.ProcessGroup],
        rollcall: RollCall,
        device: torch.device,
        grid: Grid,  # ranks of all scopes; the group for rows may have more
        traffic: Traffic | None = None,
        # Makes this transport's detector of ranks that wait for each other in vain; None for no detector.
        whereabouts: Callable[["TorchTransport"], Whereabouts] | None = None,
        tensor_group: RowGroup | None = None,  # group for rows between tensor ranks; None if each has all of them
    ) -> None:
        self.rank = data_group.rank()
        self.grid = grid
        self.world_size = grid.shape[1]
        self.traffic = traffic or Traffic()
        row_groups = [data_group] if tensor_group is None else [data_group, tensor_group]
        self._all_to_all: dict[Scope, AllToAllFunction] = {
            scope: all_to_all_of(group, device)
            for scope, group in zip((Scope.ROWS, Scope.TENSOR), row_groups, strict=False)
        }
        cpu = torch.device("cpu")
        self._gather = {scope: all_to_all_of(group, cpu) for scope, group in control_groups.items()}
        self._rollcall = rollcall
        self._groups: list[RowGroup] = [*row_groups, *dict.fromkeys(control_groups.values())]
        self._num_row_groups = len(row_groups)
        self._under_way: set[dist.Work] = set()
        # The last exchange of each scope over NCCL: earlier ones end before it, and would keep received rows alive.
        self._latest: dict[Scope, dist.Work] = {}
        self._job_group = dist.group.WORLD  # held, not used: see above
        self._gathered = ("", 0)
        # What identified this process's groups when they were last looked at, and groups of other code among them.
        self._other_groups: tuple[list[object], list[dist.ProcessGroup]] = [], []
        self._on_gpu = device.type == "cuda"
        self._seconds_in_vain = 0
        atexit.register(self.at_exit)
        self._whereabouts = None if whereabouts is None else whereabouts(self)
        if self._whereabouts is not None:
            rollcall.places = self._whereabouts.texts
            self._whereabouts.begin(self._look)

    def exchange(self, asked: AllToAll) -> "TorchExchange":
        if not self._groups:
            raise self._closed(asked.where)
        received = asked.room() if asked.into is None else asked.into
        self.traffic.count(asked, self.rank)
        try:
            work = self._all_to_all[asked.scope](received, asked.rows, asked.receive_counts, asked.send_counts)
        except RuntimeError as error:
            raise self.failure(error, asked.where, scope=asked.scope) from error
        if self._on_gpu:
            self._latest[asked.scope] = work
        else:
            self._note(work)
        return TorchExchange(self, work, asked, time.monotonic(), received)

    def gather(self, values: Sequence[int], where: str, scope: Scope = Scope.ROWS) -> "TorchGather":
        if not self._groups:
            raise self._closed(where)
        self._gathered = where, self.traffic.exchanges
        # An all-to-all of equal rows: gloo sends them all at once, while an all-gather passes them from rank to rank.
        mine = np.empty((len(self.grid.members(scope)), len(values)), dtype=np.int64)  # quicker than torch
        mine[:] = values
        theirs = torch.from_numpy(np.empty_like(mine))
        try:
            work = self._gather[scope](theirs, torch.from_numpy(mine), [], [])
        except RuntimeError as error:
            raise self.failure(error, where, scope=scope) from error
        if self._whereabouts is not None:
            self._whereabouts.note_gather()  # while the integers travel
        self._note(work)
        return TorchGather(self, work, where, time.monotonic(), theirs, scope)

    def started(self) -> tuple[int, int]:
        """Returns how many exchanges of this transport, and collectives of other code among its ranks, this rank has
        started. When training on GPUs, gloo's collectives of other code do not count: threads that save checkpoints
        start them in any order."""
        (found, groups), (known, others) = ranks_of_groups(), self._other_groups
        if found != known:  # groups were opened or ended
            ranks, own = [*self.members(Scope.LAYERS)], self._groups
            alike = [one for one, of_one in groups.items() if sorted(of_one) == ranks]
            others = [one for one in alike if isinstance(one, dist.ProcessGroup) and one not in own]
            others = [one for one in others if one.group_desc != IN_THREAD]
            others = [one for one in others if not (self._on_gpu and one.name() == "gloo")]
            self._other_groups = found, others  # at once: the detector's thread calls this, too
        of_rows = self._groups[: self._num_row_groups]
        return sum(map(collectives_started, of_rows)), sum(map(collectives_started, others))

    def place(self) -> str:
        """Names the last collective call of this rank; empty if there was none."""
        where, exchanges = self._gathered
        return self.traffic.recent[-1] if self.traffic.exchanges > exchanges else where

    def members(self, scope: Scope) -> Sequence[int]:
        """Returns the ranks of a scope, numbered as for the roll call."""
        return self.grid.members(scope)

    def _closed(self, where: str) -> ConfigError:
        return ConfigError(
            f"{self.grid.name}, {where}: the plugin was closed; make another one, and enable the model with it"
        )

    def _note(self, work: dist.Work) -> None:
        """Notes an operation that is under way. Some are never waited for: a rank may fail in between."""
        if len(self._under_way) >= REMEMBERED_EXCHANGES:
            self._under_way = {earlier for earlier in self._under_way if not earlier.is_completed()}
        self._under_way.add(work)

    def wait_for(
        self, work: dist.Work, where: str, began: float, scope: Scope = Scope.ROWS, of_rows: bool = True
    ) -> None:
        """Waits for an operation of the ranks of a scope. `of_rows` says whether it exchanges rows, for which the GPU
        waits over NCCL, not the host.

        Raises:
            PeerLostError, StepTimeoutError: it failed; names the ranks and the place.
            PlanMismatchError: ranks wait for each other at different places; names these.
        """
        try:
            if self._whereabouts is None or (of_rows and self._on_gpu):
                self.traffic.wait_for(work)
            elif not self.traffic.has_ended(work, PART):
                self._wait_on(work, where, self._whereabouts)
        except PlanMismatchError:
            raise
        except RuntimeError as error:
            raise self.failure(error, where, began, scope) from error
        finally:
            if work in self._under_way and work.is_completed():
                self._under_way.discard(work)

    def _wait_on(self, work: dist.Work, where: str, whereabouts: Whereabouts) -> None:
        """Waits until a slow operation of gloo has ended, or cannot end any more."""
        try:
            whereabouts.waits_for = where
            while not self.traffic.has_ended(work, PART):
                if whereabouts.in_vain is not None:
                    raise PlanMismatchError(f"{self.grid.name}, {where}: {whereabouts.in_vain}. {REMEDY}")
        finally:
            whereabouts.waits_for = None

    def _look(self) -> None:
        """Ends this process if ranks wait in vain and no exception can reach this one, because it is in other code or
        waits for a GPU. Runs in the detector's thread."""
        assert self._whereabouts is not None
        message = self._rollcall.in_vain = self._whereabouts.in_vain
        if message is None or self._whereabouts.waits_for is not None:
            return
        self._seconds_in_vain += 1
        if self._seconds_in_vain > LOOKS_IN_VAIN:
            place = self.place() or "before its first micro-batch"
            message = f"PlanMismatchError: {self.grid.name}, {place}: {message}. {REMEDY}"
            log.error(message)
            self._rollcall.leave(message)
            leave_for_launcher(message)
            os._exit(1)

    def close(self) -> None:
        """Ends all groups, and joins their threads unless an operation is still under way."""
        atexit.unregister(self.at_exit)
        self._end_looking()
        let_gloo_threads_rest()
        self._end(self._groups)
        self._rollcall.be_silent()

    def at_exit(self) -> None:
        """Ends gloo's groups before the interpreter ends, because their threads need it to the last.

        NCCL's group stays: ending it may wait for a GPU.
        """
        self._end_looking()
        self._rollcall.leave_in_order(self.place())
        groups = [group for group in self._groups if group.name() == "gloo"]
        if not self._is_at_rest():
            for group in groups:  # one more reference, or a destructor joins threads that wait for other ranks
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._end(groups)
        let_gloo_threads_rest()

    def _end_looking(self) -> None:
        if self._whereabouts is not None:
            self._whereabouts.end()

    def _is_at_rest(self) -> bool:
        return all(work.is_completed() for work in (*self._under_way, *self._latest.values()))

    def _end(self, groups: Sequence[RowGroup]) -> None:
        """Takes groups from torch's list and drops them. Dropping the last reference to a group joins its threads."""
        for group in groups:
            with suppress(ValueError):  # torch has no such group in its list, or all groups were ended before
                dist.destroy_process_group(group)  # type: ignore[arg-type]
        self._groups = []
        if self._is_at_rest():
            self._all_to_all.clear()
            self._gather.clear()

    def failure(
        self, error: RuntimeError, where: str, began: float | None = None, scope: Scope = Scope.ROWS
    ) -> DistCAError:
        """Returns the error to raise for a failed operation of the ranks of a scope. It names the lost ranks, if they
        are known."""
        waited_seconds = 0.0 if began is None else time.monotonic() - began
        lost = self._rollcall.missing(waited_seconds, self.members(scope))
        recent = "; ".join(list(self.traffic.recent)[-3:]) or "none"
        missing = "; ".join(self._rollcall.in_words(lost)) or "all ranks still answer"
        message = f"{self.grid.name}, {where}: {missing}. Last exchanges: {recent}. Cause: {first_line(error)}"
        known: DistCAError = PeerLostError(message)
        if "timed out" in str(error).lower():
            known = StepTimeoutError(
                f"{message}. Deadlines are timeouts.exchange_seconds and timeouts.agreement_seconds."
            )
        known.lost_ranks = self._rollcall.causes(lost)
        return known


@dataclass(eq=False, slots=True)
class TorchExchange:
    """An all-to-all under way. Keeps the sent rows alive until they have left."""

    transport: TorchTransport
    work: dist.Work
    asked: AllToAll
    began: float
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.transport.wait_for(self.work, self.asked.where, self.began, self.asked.scope)
        return self.received


@dataclass
class TorchGather:
    """An all-gather of integers under way."""

    transport: TorchTransport
    work: dist.Work
    where: str
    began: float
    received: torch.Tensor
    scope: Scope

    def wait(self) -> list[list[int]]:
        self.transport.wait_for(self.work, self.where, self.began, self.scope, of_rows=False)
        rows: list[list[int]] = self.received.tolist()
        return rows


def let_gloo_threads_rest() -> None:
    """Waits until all threads of gloo sleep, also for groups that other code has opened and still holds."""
    deadline, quiet = time.monotonic() + LONGEST_WAIT_SECONDS, 0
    while quiet < QUIET_LOOKS and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)  # a thread that waits for the GIL gets it, or is awake
        quiet = 0 if "R" in gloo_thread_states() else quiet + 1


def gloo_thread_states() -> str:
    """Returns a letter for every thread of gloo in this process: R if it runs or could run, S if it sleeps.

    Empty if the system has no /proc.
    """
    letters, threads = [], "/proc/self/task"  # as text: with paths a look takes three times as long
    for thread in os.listdir(threads) if os.path.isdir(threads) else ():
        try:
            with open(f"{threads}/{thread}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(") ")
        except OSError:  # it ended meanwhile
            continue
        if name == GLOO_THREAD:
            letters.append(rest[0])
    return "".join(letters)
