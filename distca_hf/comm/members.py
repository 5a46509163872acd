"""Members: which ranks of a job train together, and what each of them does.

A job may hold several trainings, each in a group of its own. Three numbers are kept apart from here on: ranks that
hold tokens, ranks that compute attention, and ranks of the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distca_hf.errors import ConfigError


@dataclass(frozen=True)
class Members:
    """Ranks of a training: by scope with their numbers in the job, by role with their numbers in the group.

    Today all ranks of a group are in both scopes and have both roles.

    Attributes:
        job: ranks that were launched together.
        group: ranks of the group, in ascending order.
        rank: number of this process in the group.
    """

    job: Sequence[int]
    group: Sequence[int]
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> "Members":
        """Returns the members of a group; without one, all ranks of the job."""
        if not is_initialized():
            return cls(range(1), range(1), 0)
        job = range(dist.get_world_size())
        if group is None:
            return cls(job, job, dist.get_rank())
        ranks = sorted(dist.get_process_group_ranks(group))
        if ranks == list(job):
            return cls(job, job, dist.get_rank())
        return cls(job, ranks, ranks.index(dist.get_rank()))

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
        return range(len(self.group))

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
