"""Groups: which ranks of a job train together, and the process groups that core attention opens among them.

A job may hold several trainings, each in its own group. Later code distinguishes ranks that hold tokens, ranks that
compute attention, and ranks of the group.

Exchanges have their own group, so they neither wait for FSDP's collectives nor get mixed up with them. Integers have a
gloo group, so agreement needs no device. Their deadlines are ours.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from distca_hf.comm.agreement import labels_of
from distca_hf.comm.grid import Grid, Scope, check_same_grids, grid_in_words
from distca_hf.comm.rollcall import RollCall
from distca_hf.comm.torch_transport import IN_THREAD, TorchTransport
from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.comm.whereabouts import Whereabouts
from distca_hf.errors import ConfigError, PeerLostError, first_line
from distca_hf.launched import launched_world_size
from distca_hf.telemetry import OF_THIS_RANK, get_logger
from distca_hf.torch_private import default_store, num_groups


log = get_logger(__name__)

# How long ranks wait for each other to begin before the missing ones are named.
QUIET_SECONDS = 30.0
# Time between two looks for ranks that have ended meanwhile.
LOOK_SECONDS = 1.0
# Stands at the meeting for a rank that has ended.
ENDED = "ended"


@dataclass(frozen=True)
class Members:
    """Ranks of a training: by scope with their numbers in the job, by role with their numbers in exchanges of rows.

    Every rank of a group holds tokens. Ranks without tokens are not in the group: they only compute, and are numbered
    after the ranks that share documents.
    """

    job: Sequence[int]  # ranks that were launched together, without ranks that hold no tokens
    grid: Grid
    num_extra: int = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None, num_extra: int = 0) -> "Members":
        """Returns the members of a group, which differ only in their data; without one, all ranks of the job."""
        if not is_initialized():
            return cls(range(1), Grid.flat(range(1), 0), num_extra)
        job = range(dist.get_world_size())
        ranks = job if group is None else sorted(dist.get_process_group_ranks(group))
        return cls(job, Grid.flat(ranks, dist.get_rank()), num_extra)

    @property
    def group(self) -> Sequence[int]:
        """Scope: ranks that train together."""
        return self.grid.members(Scope.GROUP)

    @property
    def are_the_job(self) -> bool:
        return len(self.group) == len(self.job)

    @property
    def row_ranks(self) -> Sequence[int]:
        """Scope: ranks that share documents. Rows are exchanged among them, and a loss counts all their labels."""
        return self.grid.members(Scope.ROWS)

    @property
    def layer_ranks(self) -> Sequence[int]:
        """Scope: ranks that run the same layers. They agree on every pass."""
        return self.grid.members(Scope.LAYERS)

    @property
    def token_ranks(self) -> range:
        """Role: ranks that hold tokens."""
        return range(len(self.row_ranks))

    @property
    def compute_ranks(self) -> range:
        """Role: ranks that compute attention."""
        return range(len(self.row_ranks) + self.num_extra)

    def ranks_per_node(self, launched_per_node: int) -> int:
        """Returns how many ranks that share documents also share a node: see `Grid.ranks_per_node`. If they are the
        whole job, that is the launcher's number."""
        if self.are_the_job and self.grid.is_flat:
            return launched_per_node
        return self.grid.ranks_per_node(launched_per_node)


def grid_of_mesh(
    mesh: DeviceMesh, data: str | Sequence[str], tensor: str | Sequence[str] = (), stages: str | Sequence[str] = ()
) -> Grid:
    """Returns the grid of a device mesh of all ranks of the job, by the names of its dimensions: see `Grid.of_mesh`.
    Raises ConfigError if it is not a mesh of all ranks with named dimensions, or they are named wrongly."""
    if not isinstance(mesh, DeviceMesh) or not mesh.mesh_dim_names:
        raise ConfigError(f"{mesh!r} must be a device mesh whose dimensions have names (mesh_dim_names)")
    ranks = mesh.mesh.cpu().numpy()
    return Grid.of_mesh(ranks, mesh.mesh_dim_names, dist.get_rank(), dist.get_world_size(), data, tensor, stages)


def is_initialized() -> bool:
    """Returns whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def process_group_of(group: object) -> dist.ProcessGroup | None:
    """Returns the process group given as such, or as a device mesh of one dimension; None for None. Raises ConfigError
    if it is neither, the mesh has several dimensions, or this process is not in it."""
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
    members: Members | None = None,
    in_thread: bool = False,
) -> Transport:
    """Opens a transport over all ranks of a group; a collective call of these ranks. One rank needs no group.

    Args:
        device: where the rows to exchange live; decides between NCCL and gloo.
        agreement_timeout_seconds: deadline for all ranks to come to an agreement; by default the same.
        members: the ranks; by default all of the initialised process group.
        in_thread: whether only a background thread uses it. Its calls come at any time between calls of training, so
            nothing looks for ranks that wait in vain.

    Raises:
        ConfigError: several processes were launched, but no process group is initialised yet; or torch cannot open
            groups only among these ranks; or ranks have other grids.
        PeerLostError: some ranks did not come; names them.
    """
    if launched_world_size() > 1 and not is_initialized():
        raise ConfigError(
            f"{launched_world_size()} processes were launched, but torch.distributed is not initialised; create "
            "the Accelerator, TrainingArguments or process group before the data loader"
        )
    members = Members.of() if members is None else members
    grid = members.grid
    if len(members.group) == 1:
        return LocalTransport()
    store = default_store()
    names = {} if grid.is_flat else {rank: f"rank {grid.label(rank)}" for rank in members.group}
    rollcall = RollCall(store, grid.rank, members.group, names=names)
    timeout, patience = (timedelta(seconds=x) for x in (timeout_seconds, agreement_timeout_seconds or timeout_seconds))
    on_gpus = device.type == "cuda"
    if not members.are_the_job:
        _check_no_split(on_gpus)
    began, padding = time.monotonic(), []
    gloo_group = partial(dist.new_group, backend="gloo", group_desc=IN_THREAD if in_thread else None)
    try:
        most_groups = _meet(store, members, patience)
        if not members.are_the_job:
            padding = _padding(members, most_groups)
        control_groups = _control_groups(members, gloo_group, patience)
        make = _nccl_group if on_gpus else gloo_group
        data_group = _new_group(members, Scope.ROWS, make, timeout)
        tensor_group = _new_group(members, Scope.TENSOR, make, timeout) if grid.shape[2] > 1 else None
    except RuntimeError as error:
        raise _nobody_came(rollcall, members, time.monotonic() - began, error) from error
    finally:
        for group in padding:
            dist.destroy_process_group(group)
    rollcall.announce_uncaught_errors()

    def whereabouts(transport: TorchTransport) -> Whereabouts:
        ranks, labels = grid.members(Scope.LAYERS), labels_of(transport, Scope.LAYERS)
        number = store.add(f"distca_hf/whereabouts/{grid.rank}", 1)  # of the transports that this rank has opened
        name, count, place = f"{'-'.join(map(str, ranks))}/{number}", transport.started, transport.place
        mine = store.clone()  # type: ignore[attr-defined]
        return Whereabouts(mine, name, grid.rank, ranks, labels, count, place, on_gpus)

    detector = None if in_thread else whereabouts
    return TorchTransport(data_group, control_groups, rollcall, device, grid, None, detector, tensor_group)


def _control_groups(
    members: Members, make: Callable[..., dist.ProcessGroup], patience: timedelta
) -> dict[Scope, dist.ProcessGroup]:
    """Opens the groups for integers, the widest scope first. Scopes of the same ranks share one."""
    groups: dict[Scope, dist.ProcessGroup] = {}
    opened: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for scope in (Scope.GROUP, Scope.LAYERS, Scope.ROWS):
        ranks = members.grid.members(scope)
        if ranks not in opened:
            opened[ranks] = _new_group(members, scope, make, patience)
        groups[scope] = opened[ranks]
    return groups


def _new_group(
    members: Members, scope: Scope, make: Callable[..., dist.ProcessGroup], timeout: timedelta
) -> dist.ProcessGroup:
    """Returns the group of this rank in a scope. All ranks of the job make all groups, in the same order; the ranks of
    a flat grid that is a part of the job make only their own."""
    if members.grid.is_flat:
        of_some = {} if members.are_the_job else {"ranks": list(members.group), "use_local_synchronization": True}
        return make(timeout=timeout, **of_some)
    groups = {ranks: make(timeout=timeout, ranks=list(ranks)) for ranks in members.grid.sets_of(scope)}
    return groups[members.grid.members(scope)]


def _nobody_came(rollcall: RollCall, members: Members, waited_seconds: float, error: RuntimeError) -> PeerLostError:
    """Returns the error to raise if groups could not be opened; it names the ranks that did not come."""
    ended: list[int] = []
    with suppress(RuntimeError):  # the store is gone, and `missing` says so
        ended = rollcall.ended()
    missing = "; ".join(rollcall.in_words(rollcall.missing(waited_seconds, ended or None)))
    late = f". A rank whose data takes longer needs a longer timeouts.agreement_seconds. Cause: {first_line(error)}"
    return PeerLostError(
        f"{members.grid.name} waited {waited_seconds:.0f} s for all {len(members.group)} ranks to open their "
        f"groups (at attach, at the first batch of plugin.dataloader, or at the first packed batch): "
        f"{missing or 'all ranks still answer'}{'' if ended else late}"
    )


def _nccl_group(timeout: timedelta, **among: Any) -> dist.ProcessGroup:
    """Opens a group whose exchanges overtake kernels. An exchange that waits for a multiprocessor until all blocks of
    an attention kernel have run would overlap with nothing."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(backend="nccl", timeout=timeout, pg_options=options, **among)


def _check_no_split(on_gpus: bool) -> None:
    """Refuses groups of some ranks if torch would split them off the default group: that needs all of its ranks."""
    if on_gpus and dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        raise ConfigError(
            f"rank {dist.get_rank()}: the process group was initialised with device_id, so that NCCL opens a group of "
            "some ranks only on all ranks of the job; call torch.cuda.set_device and init_process_group without "
            "device_id, or leave group out"
        )


def _meet(store: Store, members: Members, patience: timedelta) -> int:
    """Waits for all ranks, whose data may be ready at different times, and logs which ones are missing after a while.
    A rank without distca_hf never comes. Returns the largest `num_groups` of the ranks. Raises RuntimeError if a rank
    has ended instead."""
    ranks, rank, of_job = members.group, members.grid.rank, store
    store = PrefixStore(f"distca_hf/groups/{'job' if members.are_the_job else '-'.join(map(str, ranks))}", of_job)
    turn = store.add(f"turns/{rank}", 1)
    keys = {other: f"{turn}/{other}" for other in ranks}
    store.set(keys[rank], f"{num_groups()} {grid_in_words(members.grid)}")
    is_over = threading.Event()

    def look() -> None:
        names_at = time.monotonic() + QUIET_SECONDS
        with suppress(RuntimeError):  # the store is gone, and the waiting thread says so
            asked = rollcall = None
            while not is_over.wait(min(LOOK_SECONDS, max(0.0, names_at - time.monotonic()))):
                if asked is None or rollcall is None:  # the other connection is waiting
                    asked = store.clone()  # type: ignore[attr-defined]
                    rollcall = RollCall(of_job.clone(), rank, ranks)  # type: ignore[attr-defined]
                for other in rollcall.ended():
                    asked.compare_set(keys[other], "", ENDED)  # all ranks stop waiting for it
                if time.monotonic() >= names_at:
                    names_at = math.inf
                    _name_missing(rank, [other for other in ranks if not asked.check([keys[other]])], ranks)

    looking = threading.Thread(target=look, name="distca-meeting", daemon=True)
    looking.start()
    try:
        store.wait([*keys.values()], patience)
    finally:
        is_over.set()
        looking.join(LOOK_SECONDS)
    told = {other: text.decode() for other, text in zip(ranks, store.multi_get([*keys.values()]), strict=True)}
    if ENDED in told.values():
        raise RuntimeError(ENDED)
    said = {other: text.partition(" ") for other, text in told.items()}
    check_same_grids(members.grid, {other: text for other, (_, _, text) in said.items()})
    return max(int(number) for number, _, _ in said.values())


def _name_missing(rank: int, missing: Sequence[int], ranks: Sequence[int]) -> None:
    """Logs, on the first rank that has come, which ones have not."""
    if missing and rank == next(other for other in ranks if other not in missing):
        log.warning(
            "rank %d waits for rank %s to begin with distca_hf: %d of %d ranks came within %.0f s. They may still "
            "read their data; a rank that trains without distca_hf, or in evaluation mode, never comes. Use "
            "--attach, DISTCA_ATTACH=1, plugin.attach(trainer) or distca_hf.enable(model, plugin), and "
            "model.train(), on all ranks",
            *(rank, ", ".join(map(str, missing)), len(ranks) - len(missing), len(ranks), QUIET_SECONDS),
            extra=OF_THIS_RANK,
        )


def _padding(members: Members, most_groups: int) -> list[dist.ProcessGroup]:
    """Opens groups of only this rank, until `num_groups` is equal on all ranks of a group that is not the whole job.

    Torch names a group that only some ranks open by this number. If it differs, ranks wait for each other under
    different names.
    """
    only_this = [members.grid.rank]
    return [
        dist.new_group(only_this, backend="gloo", use_local_synchronization=True)
        for _ in range(most_groups - num_groups())
    ]


def default_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Returns the device that training runs on, as far as the process groups and CUDA say."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if is_initialized() and dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
