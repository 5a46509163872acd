"""Groups: which ranks of a job train together, and the process groups that core attention opens among them.

A job may hold several trainings, each in a group of its own. Three numbers are kept apart from here on: ranks that
hold tokens, ranks that compute attention, and ranks of the group.

Exchanges get a group of their own, so that they neither wait behind FSDP's collectives nor get mixed up with them.
Integers get a gloo group, so that agreement needs no device. Their deadlines are ours.

Row groups of trainers and attention servers are made to lose members. Torch has them in no list: frameworks see the
trainers alone. Gloo's exchanges are waited for on the host, in small steps. NCCL's run on the GPU, where kernels wait
for a lost member for ever, and all that is launched behind them waits, too. So their group is aborted: its kernels
end with rows of no meaning, in a fraction of a second, and the GPU goes on.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from distca_hf.comm.rollcall import RollCall
from distca_hf.comm.torch_transport import TorchTransport
from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.errors import ConfigError, PeerLostError, first_line
from distca_hf.launched import launched_world_size
from distca_hf.torch_private import (
    RowGroup,
    abort_group,
    all_to_all_of,
    connect_group,
    default_store,
    nccl_errors_end_no_process,
    num_groups,
)


# Longest time for ranks that have answered to connect with each other, over gloo and over NCCL, which prepares more.
MEET_SECONDS, NCCL_MEET_SECONDS = 10.0, 60.0
# Torch's own deadline for NCCL's exchanges: none. A lost member is noticed by its heartbeat, an exchange that does not
# end by `heartbeats.StreamProgress`.
NO_DEADLINE = timedelta(days=365)


@dataclass(frozen=True)
class Members:
    """Ranks of a training: by scope with their numbers in the job, by role with their numbers in the group.

    All ranks of a group are in both scopes and hold tokens. Attention servers are no ranks of the group: they compute,
    and have the numbers behind it.

    Attributes:
        job: ranks that were launched together, attention servers left out.
        group: ranks of the group, in ascending order.
        rank: number of this process in the group.
        num_servers: attention servers.
    """

    job: Sequence[int]
    group: Sequence[int]
    rank: int
    num_servers: int = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None, num_servers: int = 0) -> "Members":
        """Returns the members of a group; without one, all ranks of the job."""
        if not is_initialized():
            return cls(range(1), range(1), 0, num_servers)
        job = range(dist.get_world_size())
        if group is None:
            return cls(job, job, dist.get_rank(), num_servers)
        ranks = sorted(dist.get_process_group_ranks(group))
        if ranks == list(job):
            return cls(job, job, dist.get_rank(), num_servers)
        return cls(job, ranks, ranks.index(dist.get_rank()), num_servers)

    @property
    def are_the_job(self) -> bool:
        """Whether all ranks of the job are in the group."""
        return len(self.group) == len(self.job)

    @property
    def row_ranks(self) -> Sequence[int]:
        """Scope: ranks that share documents. Rows are exchanged among them, and a loss counts all their labels."""
        return self.group

    @property
    def layer_ranks(self) -> Sequence[int]:
        """Scope: ranks that run the same layers. They agree on every pass, and average gradients."""
        return self.group

    @property
    def token_ranks(self) -> range:
        """Role: ranks that hold tokens."""
        return range(len(self.group))

    @property
    def compute_ranks(self) -> range:
        """Role: ranks that compute attention."""
        return range(len(self.group) + self.num_servers)

    def ranks_per_node(self, launched_per_node: int) -> int:
        """Returns how many ranks of the group share a node; 0 if a launcher did not number nodes.

        Args:
            launched_per_node: ranks of the job on every node; 0 if that is not known.

        Raises:
            ConfigError: nodes hold unequally many of them.
        """
        if self.are_the_job or not launched_per_node:
            return launched_per_node
        nodes, counts = np.unique(np.array(self.group) // launched_per_node, return_counts=True)
        if (counts[:-1] != counts[0]).any() or counts[-1] > counts[0]:
            shown = ", ".join(f"{count} on node {node}" for node, count in zip(nodes, counts, strict=True))
            raise ConfigError(
                f"ranks of the group are unequally many per node ({shown}; {launched_per_node} of the job on each): "
                "give a group with as many on every node, or set ranks_per_node"
            )
        return int(counts[0])


def is_initialized() -> bool:
    """Returns whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def process_group_of(group: object) -> dist.ProcessGroup | None:
    """Returns the process group that was given as one, or as a device mesh of one dimension; None for None.

    Raises:
        ConfigError: it is neither; the mesh has several dimensions; or this process is not in it.
    """
    if group is None:
        return None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names: Sequence[object] = group.mesh_dim_names or range(group.ndim)
            raise ConfigError(
                f"group is a device mesh with {group.ndim} dimensions, {', '.join(map(repr, names))}: documents are "
                f"shared along one. Give it by name, for example group=mesh[{names[0]!r}]"
            )
        if group.get_coordinate() is None:
            raise _not_in(group.mesh.tolist())
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise _not_in(None)
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group={group!r} must be a torch.distributed process group or device mesh, not {type(group).__name__}"
        )
    return group


def _not_in(ranks: Sequence[int] | None) -> ConfigError:
    """Returns the error to raise on a rank that is not in its group."""
    of = "" if ranks is None else f" of ranks {', '.join(map(str, ranks))}"
    return ConfigError(
        f"rank {dist.get_rank()} is not in the group{of} that was given to its plugin: give every rank the group that "
        "it is in, and make no plugin on ranks that are in none"
    )


def open_transport(
    device: torch.device,
    timeout_seconds: float,
    agreement_timeout_seconds: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Transport:
    """Opens a transport over all ranks of a group; a collective call of these ranks. One rank needs no group.

    Args:
        device: where the rows to exchange live; decides between NCCL and gloo.
        timeout_seconds: deadline of every exchange.
        agreement_timeout_seconds: deadline for all ranks to come to an agreement; by default the same.
        group: the ranks; by default all of the initialised process group.

    Raises:
        ConfigError: several processes were launched, but no process group is initialised yet; or torch cannot open
            groups among these ranks alone.
        PeerLostError: some ranks did not come; names them.
    """
    if launched_world_size() > 1 and not is_initialized():
        raise ConfigError(
            f"{launched_world_size()} processes were launched, but torch.distributed is not initialised; create "
            "the Accelerator, TrainingArguments or process group before the data loader"
        )
    members = Members.of(group)
    if len(members.row_ranks) == 1:
        return LocalTransport()
    store = default_store()
    rollcall = RollCall(store, dist.get_rank(), members.row_ranks)
    timeout, patience = (timedelta(seconds=x) for x in (timeout_seconds, agreement_timeout_seconds or timeout_seconds))
    on_gpus = device.type == "cuda"
    among: dict[str, Any] = {}
    if not members.are_the_job:
        among = {"ranks": list(members.row_ranks), "use_local_synchronization": True}
        _check_no_split(on_gpus)
    began, padding = time.monotonic(), []
    try:
        if not members.are_the_job:
            padding = _padding(store, members, patience)
        # Ranks come here when their data is ready, so the group with the longer deadline is where they meet.
        control_group = dist.new_group(backend="gloo", timeout=patience, **among)
        data_group = (
            _nccl_group(timeout, among) if on_gpus else dist.new_group(backend="gloo", timeout=timeout, **among)
        )
    except RuntimeError as error:
        raise _nobody_came(rollcall, members, time.monotonic() - began, error) from error
    finally:
        for alone in padding:
            dist.destroy_process_group(alone)
    rollcall.announce_uncaught_errors()
    return TorchTransport(data_group, control_group, rollcall, device, len(members.row_ranks))


def _nobody_came(rollcall: RollCall, members: Members, waited_seconds: float, error: RuntimeError) -> PeerLostError:
    """Returns the error to raise where groups could not be opened; it names the ranks that did not come."""
    missing = "; ".join(rollcall.missing_in_words(waited_seconds))
    return PeerLostError(
        f"rank {members.rank} waited {waited_seconds:.0f} s for all {len(members.row_ranks)} ranks to open their "
        f"groups (at attach, at the first batch of plugin.dataloader, or at the first packed batch): "
        f"{missing or 'all ranks still answer'}. A rank whose data takes longer needs a longer "
        f"timeouts.agreement_seconds. Cause: {first_line(error)}"
    )


def _nccl_group(timeout: timedelta, among: dict[str, Any]) -> dist.ProcessGroup:
    """Opens a group whose exchanges overtake kernels. One that waits for a free multiprocessor behind all blocks of an
    attention kernel would overlap with nothing."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(backend="nccl", timeout=timeout, pg_options=options, **among)


def _check_no_split(on_gpus: bool) -> None:
    """Refuses groups of some ranks where torch would split them off the default group, which takes all ranks of it.

    Raises:
        ConfigError: the default group is bound to a device.
    """
    if on_gpus and dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        raise ConfigError(
            f"rank {dist.get_rank()}: the process group was initialised with device_id, so that NCCL opens a group of "
            "some ranks on all ranks of the job alone; call torch.cuda.set_device and init_process_group without "
            "device_id, or leave group out"
        )


def _padding(store: Store, members: Members, patience: timedelta) -> list[dist.ProcessGroup]:
    """Opens groups of this rank alone, until all ranks of a group that is not the whole job are in equally many.

    Torch names a group that some ranks open alone by the number of groups that a rank is in. Ranks that are in
    unequally many would wait for each other under different names.
    """
    ranks, rank = members.row_ranks, dist.get_rank()
    store = PrefixStore(f"distca_hf/groups/{'-'.join(map(str, ranks))}", store)
    turn = store.add(f"turns/{rank}", 1)
    store.set(f"{turn}/{rank}", str(num_groups()))
    store.wait([f"{turn}/{other}" for other in ranks], patience)
    most = max(int(store.get(f"{turn}/{other}")) for other in ranks)
    return [dist.new_group([rank], backend="gloo", use_local_synchronization=True) for _ in range(most - num_groups())]


def default_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Returns the device that training runs on, as far as the process groups and CUDA say."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if is_initialized() and dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def open_row_group(store: Store, rank: int, num_ranks: int, device: torch.device, timeout_seconds: float) -> RowGroup:
    """Opens a group for rows; all ranks of it call this together.

    Args:
        store: where they meet, used by nothing else.
        device: where the rows live; decides between NCCL and gloo.
        timeout_seconds: deadline of an exchange over gloo.

    Raises:
        RuntimeError: some ranks did not come.
    """
    if device.type == "cuda":
        return _open_nccl(store, rank, num_ranks, device)
    timeout = timedelta(seconds=timeout_seconds)
    # All have just answered. One that is lost meanwhile would be waited for as long as for an exchange.
    group = dist.ProcessGroupGloo(store, rank, num_ranks, min(timeout, timedelta(seconds=MEET_SECONDS)))
    group.set_timeout(timeout)
    return group


def _open_nccl(store: Store, rank: int, num_ranks: int, device: torch.device) -> RowGroup:
    """Opens a group of NCCL that outlives its members, and connects all of them."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # see `_nccl_group`
    options._timeout = NO_DEADLINE
    options.config.blocking = 1  # a group that connects meanwhile refuses its first exchange
    with nccl_errors_end_no_process():
        group = dist.ProcessGroupNCCL(store, rank, num_ranks, options)
    in_time(lambda: _connect(group, num_ranks, device), NCCL_MEET_SECONDS, "ranks to connect over NCCL")
    return group


def _connect(group: RowGroup, num_ranks: int, device: torch.device) -> None:
    """Connects all ranks, and exchanges one element between any two: NCCL connects pairs in their first exchange."""
    with torch.cuda.device(device):
        connect_group(group, device)
        rows, each = torch.zeros(num_ranks, device=device), [1] * num_ranks
        all_to_all_of(group, device)(torch.empty_like(rows), rows, each, each).wait()
        torch.cuda.current_stream(device).synchronize()


def in_time(call: Callable[[], None], seconds: float, of: str) -> None:
    """Makes a call that may never return, in a thread that is left behind then.

    Args:
        of: names the call in the error.

    Raises:
        RuntimeError: it did not return in time. Errors of the call are raised here.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="distca-connect", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise RuntimeError(f"waited {seconds:g} s for {of}")
    if errors:
        raise errors[0]


def abort(group: RowGroup) -> None:
    """Ends all exchanges of a group of NCCL, from any thread; a group of gloo has nothing to abort."""
    if group.name() == "nccl":
        abort_group(group)
