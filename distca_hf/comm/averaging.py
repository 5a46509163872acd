"""Averaging: checks that wrappers of a model average its gradients over the ranks that share documents.

A loss is scaled such that its mean over these ranks is the mean over their labels. Over more ranks it would be a mean
of means. Over fewer, groups of ranks would train different models.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distca_hf.comm.groups import Members
from distca_hf.errors import ConfigError
from distca_hf.torch_private import groups_of_fsdp1, running_objects, sharded_by_fsdp2


class Averaged(NamedTuple):
    """What averages gradients, and over which ranks of the job."""

    name: str
    # Groups of this rank, as ranks of the job. If there are two, the second connects equal shards, and both form a
    # grid.
    over: Sequence[Sequence[int]]
    # Whether the mesh of a weight, which may have other dimensions as well, may only divide the weight, as tensor
    # parallelism does; None for a wrapper.
    divides: bool | None = None

    def is_right(self, members: Members) -> bool:
        """Returns whether these are the ranks that share documents."""
        shared, first = set(members.row_ranks), set(self.over[0])
        if self.divides is not None:
            # If all ranks of the job hold different documents, the purpose of a mesh is unknown.
            are_the_job = members.are_the_job and members.grid.is_flat
            only_divides = self.divides and (first & shared == {members.grid.rank} or are_the_job)
            return first <= set(members.layer_ranks) and (shared <= first or only_divides)
        if len(self.over) == 1:
            return first == shared
        second = set(self.over[1])
        is_grid = first & second == {members.grid.rank} and len(first) * len(second) == len(shared)
        return is_grid and first | second <= shared


def check_averaging(model: nn.Module, members: Members) -> None:
    """Checks, within a forward pass of a model, that its wrappers average gradients over the ranks that share
    documents. Does not see gradients that a training loop averages itself. Raises ConfigError if a wrapper averages
    over other ranks; names it and both groups."""
    for averaged in averaging(model):
        if averaged.is_right(members):
            continue
        over = " and then ".join(named_ranks(ranks) for ranks in averaged.over)
        remedy = (
            "Give both the same ranks: the wrapper its process group or mesh, and the plugin the same one as group. "
            "Without a group all ranks of the job share documents"
            if members.grid.is_flat
            else f"Of {members.grid.in_words()} give DDP or FSDP the data dimensions of the mesh, all of them"
        )
        raise ConfigError(
            f"{members.grid.name}: {averaged.name} averages gradients over {over}, and "
            f"{named_ranks(members.row_ranks)} share documents: losses count the labels of these. "
            f"{remedy}"
        )


def averaging(model: nn.Module) -> Iterator[Averaged]:
    """Yields everything that averages gradients of a model, including its wrappers. Call within a forward pass."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # slow to import
    from torch.distributed.tensor import DTensor

    around = (caller for caller in running_objects() if isinstance(caller, nn.Module))
    for module in dict.fromkeys((*around, *model.modules())):  # a model knows nothing of the wrappers around it
        name = type(module).__name__
        if isinstance(module, nn.parallel.DistributedDataParallel):
            yield Averaged(name, [dist.get_process_group_ranks(module.process_group)])
        elif isinstance(module, FullyShardedDataParallel):
            groups = groups_of_fsdp1(module)
            if groups is not None:
                name = f"{name} ({module.sharding_strategy.name})"
                yield Averaged(name, [dist.get_process_group_ranks(group) for group in groups])
    sharded, ranks_of_meshes = sharded_by_fsdp2(model) or {}, dict[int, list[int]]()
    parameters: Iterator[tuple[str, Any]] = model.named_parameters()
    for name, parameter in parameters:
        if parameter in sharded or isinstance(parameter, DTensor):
            mesh: DeviceMesh = sharded[parameter].mesh if parameter in sharded else parameter.device_mesh
            if id(mesh) not in ranks_of_meshes:  # a mesh computes its ranks again whenever asked
                ranks_of_meshes[id(mesh)] = mesh.mesh.flatten().tolist()
            yield Averaged(f"the device mesh of {name}", [ranks_of_meshes[id(mesh)]], parameter not in sharded)


def named_ranks(ranks: Sequence[int]) -> str:
    """Names ranks of the job in messages."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of the job"
