"""Parallel context: the settings of a training, and the ranks that share them.

Everything that trains together gets the same context. Models, loaders and callbacks neither open process groups nor
query them. A context belongs to one group of ranks: the whole job, or a part of it. Ranks are numbered within the
group; messages say "of the job" for the number in the job. The whole job may be a grid of stages, data and tensor
ranks. The ranks of a part differ only in data.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh  # integrations name it, too

from distca_hf.comm.agreement import CheckedTransport
from distca_hf.comm.averaging import named_ranks
from distca_hf.comm.grid import Grid, Scope
from distca_hf.comm.groups import Members as Members  # integrations name it, too
from distca_hf.comm.groups import default_device, grid_of_mesh, is_initialized, open_transport, process_group_of
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError, PlanError
from distca_hf.launched import check_launched_servers, launched_ranks_per_node, launched_servers
from distca_hf.planning.plan import ExtraRanks
from distca_hf.settings import described
from distca_hf.trace_file import TraceFile


if TYPE_CHECKING:
    from transformers import Trainer


class Annex:
    """What ranks without tokens add to a training: nothing here, for jobs without any."""

    def __init__(self, context: "ParallelContext") -> None:
        self._context = context

    @property
    def extra_ranks(self) -> ExtraRanks | None:
        """Launched ranks without tokens; None if there are none."""
        return None

    def check_grid(self, grid: Grid) -> None:
        """Refuses a grid of the ranks that train if ranks without tokens cannot compute for it. Raises ConfigError,
        which names the reason."""

    def transport(self, device: torch.device) -> Transport:
        """Returns the transport for training batches, see `ParallelContext.training_transport`."""
        return self._context.transport(device)

    def cannot_attach(self, trainer: "Trainer") -> Iterable[str]:
        """Returns reasons why a Trainer cannot train with ranks that may be lost."""
        return ()

    def attach(self, trainer: "Trainer", attachment: Any) -> None:
        """Adds to a Trainer what ranks without tokens need, until it is detached. An
        `integrations.trainer.attachment.Attachment` undoes it."""

    def attempts(
        self, model: torch.nn.Module, batches: Sequence[Mapping[str, Any]]
    ) -> Iterator[AbstractContextManager[object]]:
        """Yields attempts at an optimizer step, see `DistCAPlugin.attempts`."""
        yield nullcontext()

    def close(self) -> None:
        """Closes the connections of ranks without tokens."""


@described
@dataclass(kw_only=True)
class ParallelContext(DistCAConfig):
    """Settings, and the transports between the ranks that share them: one for each device.

    Raises:
        ConfigError: a field does not allow its value; the group cannot be used; or this process is not in the group.
    """

    group: dist.ProcessGroup | DeviceMesh | None = field(
        default=None,
        metadata={
            "help": "Ranks that train together: a process group, or a device mesh of one dimension; by default the "
            "whole job. Gradients must be averaged over the same ranks.",
            "default": None,
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._group = process_group_of(self.group)
        self._grid: Grid | None = None
        self._known_members: tuple[Members, Callable[[], object]] | None = None  # and the group of the job then
        self._node_size = self._find_node_size()
        self._transports: dict[torch.device, Transport] = {}
        self._thread_transports: list[Transport] = []
        self.trace_file = TraceFile(self.report_folder)
        check_launched_servers(self.attention_servers, self.trainers_attend, launched_servers())
        self.annex  # noqa: B018  refuses settings here

    @property
    def node_size(self) -> int:
        return self._node_size

    @property
    def members(self) -> Members:
        """Ranks that train together. Without a group, only this rank until the process group is initialised."""
        world, known = dist.group.WORLD, self._known_members
        if known is not None and world is not None and known[1]() is world:
            return known[0]
        members = Members.of(self._group, sum(launched_servers()))
        if self._grid is not None:
            members = replace(members, grid=self._grid)
        self._known_members = None if world is None else (members, weakref.ref(world))
        return members

    @cached_property
    def annex(self) -> Annex:
        """What ranks without tokens add; the plugin overrides this."""
        return Annex(self)

    @property
    def device(self) -> torch.device:
        """Device that training runs on, derived from the process groups and CUDA."""
        return default_device(self._group)

    def use_mesh(
        self,
        mesh: DeviceMesh,
        *,
        data: str | Sequence[str],
        tensor: str | Sequence[str] = (),
        stages: str | Sequence[str] = (),
    ) -> None:
        """Sets the role of each rank from the dimensions of a device mesh over all ranks of the job. Not needed if
        Transformers or Accelerate made the mesh: then it is read from the model.

        ```python
        mesh = init_device_mesh("cuda", (2, 4, 2), mesh_dim_names=("stage", "dp", "tp"))
        plugin.use_mesh(mesh, data="dp", tensor="tp", stages="stage")
        ```

        Call it before the plugin's first loader or model.

        Args:
            mesh: mesh over all ranks of the job, with named dimensions in any order.
            data: dimensions along which ranks hold different documents. Several count as one (replicas x shards).
            tensor: dimensions along which ranks hold parts of the same layers, and the same documents.
            stages: dimensions along which ranks hold different layers, as stages of a pipeline.

        Raises:
            ConfigError: the mesh is not all ranks of the job, each once; a dimension is missing, named twice or not
                named; none is for data; data ranks are unequally many per node; or the plugin has a group, attention
                servers, or another grid.
        """
        self.use_grid(grid_of_mesh(mesh, data, tensor, stages))

    def use_grid(self, grid: Grid) -> None:
        """Sets the grid of this context, before any transport is opened. The same grid may be set again at any time.

        Raises:
            ConfigError: see `use_mesh`.
        """
        members = self.members
        if grid == members.grid:
            return
        if self._grid is not None or self._transports:
            raise ConfigError(
                f"{members.grid.name}: this plugin works on {members.grid.in_words()} already (a loader, a model or "
                f"use_mesh said so), and is now given {grid.in_words()}. Give plugin.dataloader the model "
                "(model=...), call use_mesh before both, and use one plugin for each way of dividing the ranks"
            )
        if self._group is not None:
            raise ConfigError(
                f"{members.grid.name}: the plugin has a group, {named_ranks(members.group)}, whose ranks differ "
                f"only in data, and is now given {grid.in_words()}; leave group out"
            )
        self.annex.check_grid(grid)
        self._grid, self._known_members = grid, None
        self._node_size = self._find_node_size()

    def _find_node_size(self) -> int:
        """Returns the setting `ranks_per_node`, or the data ranks per node that the launcher reports; 0 if neither is
        known."""
        return self.ranks_per_node or self.members.ranks_per_node(launched_ranks_per_node())

    def transport(self, device: torch.device) -> Transport:
        """Returns the transport for tensors on `device`; the first call opens it, and is collective."""
        device = numbered(device)
        if device not in self._transports or self.is_outgrown(self._transports[device]):
            timeouts = self.timeouts
            self._check_accelerate()
            opened = open_transport(device, timeouts.exchange_seconds, timeouts.agreement_seconds, self.members)
            self._transports[device] = opened if not self.debug.check_exchanges else CheckedTransport(opened)
        return self._transports[device]

    def thread_transport(self) -> Transport:
        """Opens another transport of host memory, for one background thread. A collective call."""
        self._check_accelerate()
        patience = self.timeouts.agreement_seconds
        opened = open_transport(torch.device("cpu"), patience, patience, self.members, in_thread=True)
        self._thread_transports.append(opened)
        return opened

    def training_transport(self, device: torch.device) -> Transport:
        """Returns the transport for training batches. It includes ranks without tokens, if there are any; evaluation
        does not use them. The first call is collective."""
        return self.annex.transport(device)

    def is_outgrown(self, transport: Transport) -> bool:
        """Returns whether a transport is for a single process, because it was opened before the process group."""
        return len(transport.grid.ranks) == 1 and len(self.members.group) > 1

    def check_shares(self, members: Members, transport: Transport, micro_batch: int) -> None:
        """Checks that a placed micro-batch was divided among the ranks that share documents here.

        Raises:
            PlanError: its loader was made before there was a process group, and every rank would train on all
                documents; or the loader divides ranks in another way.
        """
        grid = members.grid
        if transport.grid is grid or transport.grid == grid:
            return
        if self.is_outgrown(transport):
            raise PlanError(
                f"{grid.name}, micro-batch {micro_batch}: the loader was made for a single process, and "
                f"{len(grid.ranks)} ranks train together: each would train on all documents. Create the process "
                "group (Accelerator, TrainingArguments) before plugin.dataloader"
            )
        of_batch = transport.grid
        if len(of_batch.ranks) == 1 or not is_initialized():  # ranks in threads have no group
            return
        raise PlanError(
            f"{grid.name}, micro-batch {micro_batch}: its loader works on {of_batch.in_words()}, and "
            f"{named_ranks(of_batch.members(Scope.ROWS))} share its documents; the model works on {grid.in_words()}, "
            f"and {named_ranks(members.row_ranks)} share documents. Use one plugin for both, and give "
            "plugin.dataloader the model (model=...)"
        )

    def __getstate__(self) -> dict[str, object]:
        """Returns the state without transports: a copy, or an unpickled context in another process, opens new ones."""
        own: dict[str, object] = {"_known_members": None, "_transports": {}, "_thread_transports": []}
        state = {**vars(self), **own, "trace_file": TraceFile(self.report_folder)}
        state.pop("annex", None)
        return state

    def close(self) -> None:
        """Destroys the process groups that were opened here. Models and loaders of this context cannot run any more.

        Scripts do not need this: groups end with the process. It is for programs that continue after training. If a
        group cannot be destroyed, the others still are, and its error is raised afterwards.
        """
        with ExitStack() as ends:
            for transport in (*self._transports.values(), *self._thread_transports):
                ends.callback(transport.close)
            ends.callback(self.annex.close)  # first of all
            self._transports.clear()
            self._thread_transports.clear()

    def _check_accelerate(self) -> None:
        """Checks that Accelerate trains the same number of ranks together."""
        from accelerate import PartialState

        if not PartialState._shared_state:  # without Accelerate, the maker of the process group averages gradients
            return
        processes, members = PartialState().num_processes, self.members
        if processes == len(members.group):
            return
        if not members.are_the_job:
            raise ConfigError(
                f"{members.grid.name}: the group of the plugin is {named_ranks(members.group)}, and Accelerate "
                f"averages gradients over {processes}: losses count only the labels of the group. Train without "
                "Trainer and Accelerate, under DDP or FSDP over this group; or leave it out of the plugin, to share "
                "documents between all ranks"
            )
        raise ConfigError(
            f"{len(members.group)} processes are in the process group, but Accelerate trains {processes} "
            "together: gradients would not be synchronised. On CPUs set use_cpu=True (TrainingArguments), "
            "Accelerator(cpu=True) or ACCELERATE_USE_CPU=true"
        )


@contextmanager
def shown_to_accelerate(loader: object) -> Iterator[None]:
    """Registers a loader with Accelerate while it is iterated, as Accelerate's own loaders do. So
    `accelerator.accumulate` steps at its last batch, and `gather_for_metrics` leaves nothing out."""
    from accelerate.state import GradientState

    if not GradientState._shared_state:  # no Accelerator was made
        yield
        return
    state = GradientState()
    state._add_dataloader(loader)
    try:
        yield
    finally:
        state._remove_dataloader(loader)


def numbered(device: torch.device | str) -> torch.device:
    """Returns a device by its unique name: a GPU with its number, by default the current one's."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device  # "cpu:0" is the same


def job_size() -> int:
    """Returns the number of ranks of the job, for models without a context."""
    return len(Members.of().job)
