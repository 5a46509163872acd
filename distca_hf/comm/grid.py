"""Grid: the ranks of a training by stage, data rank and tensor rank, and the scopes of ranks that act together.

              tensor 0  1               tensor 0  1      Ranks 0 and 2, 1 and 3, 4 and 6, and 5 and 7 share documents.
    stage 0  data 0  0  1     stage 1  data 0  4  5      Ranks 0 to 3 run the same layers, and so do 4 to 7.
             data 1  2  3              data 1  6  7      Ranks 2 and 3 hold the same tokens.

Without other parallelism there is one stage and one tensor rank, and all ranks are in all scopes.

Ranks with different grids would wait for each other in different groups, until a deadline. So before groups are
opened, ranks tell each other their grids at the job's store, and compare them (`check_same_grids`). That takes no
collective.
"""

import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.errors import ConfigError


class Scope(enum.IntEnum):
    """Scopes: sets of ranks that do something together, the smallest first."""

    TENSOR = 0  # hold the same tokens, and divide layers between them
    ROWS = 1  # share documents: rows are exchanged among them, and a loss counts each label of theirs once
    LAYERS = 2  # run the same layers: they agree on every pass, and hold the same weights
    GROUP = 3  # train together: they take the same micro-batches, report, and leave after the same step


@dataclass(frozen=True)
class Grid:
    """Ranks of a group as [stages, data, tensor], and the place of this process among them.

    All ranks of one data rank hold the same tokens. Rows of documents travel only along data.
    """

    ranks: tuple[int, ...]  # numbers in the job, in the order of [stages, data, tensor]
    shape: tuple[int, int, int]
    rank: int

    @classmethod
    def flat(cls, ranks: Sequence[int], rank: int) -> "Grid":
        """Returns the grid of ranks that differ only in their data: the same object each time. `ranks` ascend."""
        return _flat(tuple(ranks), rank)

    @classmethod
    def of_mesh(
        cls,
        ranks: IntArray,
        names: Sequence[str],
        rank: int,
        num_ranks: int,
        data: str | Sequence[str],
        tensor: str | Sequence[str] = (),
        stages: str | Sequence[str] = (),
    ) -> "Grid":
        """Returns the grid of a device mesh. Several dimensions of one kind count as one, in the order given.

        Args:
            data: names of the dimensions along which ranks hold different documents (FSDP, DDP, replicas).
            tensor: along which they hold different parts of the same layers, and the same tokens.
            stages: along which they hold different layers.

        Raises:
            ConfigError: the mesh is not all ranks of the job, each once; a dimension is missing, named twice or not
                named; none is for data; or some tensor rank has its data ranks in another order than the first one.
        """
        kinds = {"stages": _names(stages), "data": _names(data), "tensor": _names(tensor)}
        order = [name for of_kind in kinds.values() for name in of_kind]
        _check_dimensions(names, np.shape(ranks), kinds)
        in_mesh = sorted(ranks.flatten().tolist())
        if in_mesh != list(range(num_ranks)):
            raise ConfigError(
                f"the device mesh is of {len(in_mesh)} ranks, {_some(in_mesh)}, and the job has {num_ranks}: a mesh "
                "with several dimensions must be all ranks of the job, each once. For trainings in parts of a job "
                "give each its group, along one dimension"
            )
        left_out = [name for name in names if name not in order]  # of one rank each
        axes = [list(names).index(name) for name in (*order, *left_out)]
        sizes = dict(zip(names, np.shape(ranks), strict=True))
        shape = tuple(int(np.prod([sizes[name] for name in of_kind])) for of_kind in kinds.values())
        grid = ranks.transpose(axes).reshape(shape)
        # Torch numbers ranks of a group in ascending order, and nodes are in that order.
        grid = grid[:, np.argsort(grid[0, :, 0])]
        unordered = np.argwhere(np.diff(grid, axis=1) < 0)
        if len(unordered):
            first_unordered = grid[unordered[0, 0], :, unordered[0, 2]].tolist()
            raise ConfigError(
                f"the device mesh has its data ranks in several orders: {_some(grid[0, :, 0].tolist())} share "
                f"documents, and so do {_some(first_unordered)}. Make it with init_device_mesh, so that ranks "
                "ascend along every dimension"
            )
        return cls(tuple(grid.flatten().tolist()), (shape[0], shape[1], shape[2]), rank)

    @property
    def is_flat(self) -> bool:
        """Whether all ranks are in all scopes."""
        return self.shape[0] == self.shape[2] == 1

    @cached_property
    def stage(self) -> int:
        return self._coordinates(self.rank)[0]

    @cached_property
    def data_rank(self) -> int:
        """Number of this process among ranks that share documents."""
        return self._coordinates(self.rank)[1]

    @cached_property
    def tensor_rank(self) -> int:
        """Number of this process among ranks that hold the same tokens."""
        return self._coordinates(self.rank)[2]

    @cached_property
    def number(self) -> int:
        """Number of this process in the group."""
        return self._number(self.rank)

    def members(self, scope: Scope) -> tuple[int, ...]:
        """Returns this process's ranks of a scope, as numbered in the job, in ascending order. Along data that is the
        order of data ranks."""
        return self._members[scope]

    def sets_of(self, scope: Scope) -> list[tuple[int, ...]]:
        """Returns all sets of ranks into which the scope divides the group, in the same order on all ranks."""
        grid = np.array(self.ranks).reshape(self.shape)
        if scope is Scope.GROUP:
            sets = [grid]
        elif scope is Scope.LAYERS:
            sets = list(grid)
        elif scope is Scope.TENSOR:
            sets = list(grid.reshape(-1, self.shape[2]))
        else:
            sets = [grid[stage, :, tensor] for stage in range(self.shape[0]) for tensor in range(self.shape[2])]
        return [tuple(sorted(ranks.flatten().tolist())) for ranks in sets]

    def same_tokens(self, ranks: Sequence[int]) -> list[list[int]]:
        """Returns places in `ranks` by data rank: ranks of one list hold the same tokens."""
        places: list[list[int]] = [[] for _ in range(self.shape[1])]
        for place, rank in enumerate(ranks):
            places[self._coordinates(rank)[1]].append(place)
        return [of_data_rank for of_data_rank in places if of_data_rank]

    def in_words(self) -> str:
        """Returns text for the shape: "2 stages x 4 data x 2 tensor ranks", "8 ranks"."""
        stages, data, tensor = self.shape
        kinds = [(stages, "stages"), (data, "data"), (tensor, "tensor")]
        if self.is_flat:
            return "1 rank" if data == 1 else f"{data:,} ranks"
        return f"{' x '.join(f'{size} {kind}' for size, kind in kinds if size > 1 or kind == 'data')} ranks"

    @cached_property
    def name(self) -> str:
        """This process in messages: "rank 5 (data 2, tensor 1)"."""
        return f"rank {self.label(self.rank)}"

    def label(self, rank: int) -> str:
        """Returns the number in the group of a rank of the job, with its place unless the grid is flat."""
        number = self._number(rank)
        if self.is_flat:
            return str(number)
        stage, data, tensor = self._coordinates(rank)
        places = (("stage", stage, self.shape[0]), ("data", data, self.shape[1]), ("tensor", tensor, self.shape[2]))
        return f"{number} ({', '.join(f'{name} {place}' for name, place, size in places if size > 1)})"

    def ranks_per_node(self, launched_per_node: int) -> int:
        """Returns how many ranks that share documents also share a node; 0 if a launcher did not number nodes. Raises
        ConfigError if nodes hold unequal numbers of them."""
        if not launched_per_node:
            return 0
        per_node = 0
        for ranks in self.sets_of(Scope.ROWS):
            nodes, counts = np.unique(np.array(ranks) // launched_per_node, return_counts=True)
            per_node = per_node or int(counts[0])
            if (counts[:-1] != per_node).any() or counts[0] != per_node or counts[-1] > per_node:
                shown = ", ".join(f"{count} on node {node}" for node, count in zip(nodes, counts, strict=True))
                these = "ranks of the group" if self.is_flat else f"data ranks, such as {_some(ranks)},"
                raise ConfigError(
                    f"{these} are unequally many per node ({shown}; {launched_per_node} of the job on each): "
                    "give a group with as many on every node, or set ranks_per_node"
                )
        return per_node

    @cached_property
    def _members(self) -> list[tuple[int, ...]]:
        """Sets of ranks that this process is in, by scope."""
        return [next(ranks for ranks in self.sets_of(scope) if self.rank in ranks) for scope in Scope]

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {rank: number for number, rank in enumerate(sorted(self.ranks))}

    def _number(self, rank: int) -> int:
        return self._numbers.get(rank, rank)  # attention servers are numbered after all others

    def _coordinates(self, rank: int) -> tuple[int, int, int]:
        """Returns stage, data rank and tensor rank of a rank."""
        place, (_, data, tensor) = self._place_of[rank], self.shape
        return place // (data * tensor), place // tensor % data, place % tensor


@cache
def _flat(ranks: tuple[int, ...], rank: int) -> Grid:
    return Grid(ranks, (1, len(ranks), 1), rank)


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _check_dimensions(names: Sequence[str], sizes: Sequence[int], kinds: dict[str, tuple[str, ...]]) -> None:
    """Checks that each dimension of a mesh is named once, and one of them for data."""
    shown = ", ".join(f"{name!r} ({size})" for name, size in zip(names, sizes, strict=True))
    named = [name for of_kind in kinds.values() for name in of_kind]
    if not kinds["data"]:
        raise ConfigError(
            f"no dimension of the device mesh, {shown}, is for data: name the one along which ranks hold other "
            'documents, for example data="dp"; a mesh without one gets a dimension of size 1'
        )
    for name in named:
        if name not in names:
            raise ConfigError(f"the device mesh has no dimension {name!r}; it has {shown}")
        if named.count(name) > 1:
            raise ConfigError(
                f"dimension {name!r} of the device mesh is named more than once; data, tensor and stages "
                f"are {', '.join(map(str, kinds.values()))}"
            )
    for name, size in zip(names, sizes, strict=True):
        if name not in named and size > 1:
            raise ConfigError(
                f"dimension {name!r} of the device mesh ({shown}) is neither data, nor tensor, nor stages: name it as "
                "one of them"
            )


def _some(ranks: Sequence[int]) -> str:
    """Returns ranks as text; only the first ones if there are many."""
    first = ", ".join(map(str, ranks[:8]))
    return f"ranks {first}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def check_same_grids(grid: Grid, told: Mapping[int, str]) -> None:
    """Compares the grids of all ranks that train together. `told` has the `grid_in_words` of each rank, by its number
    in the job. Raises ConfigError if a rank has another grid than the first one; names both."""
    first = min(told)
    other = next((rank for rank in sorted(told) if told[rank] != told[first]), None)
    if other is not None:
        on_first, on_other = (told[rank].partition(" ")[2] for rank in (first, other))
        raise ConfigError(
            f"{grid.name}: ranks divide the job in several ways: rank {first} of the job works on {on_first}, and "
            f"rank {other} on {on_other}. Call plugin.use_mesh with the same mesh and names on all ranks, and give "
            "plugin.dataloader the model on all of them, or on none"
        )


def grid_in_words(grid: Grid) -> str:
    """Returns a text that is equal on two ranks if their grids are: a checksum, and what a message says of it."""
    sets = [", ".join(map(str, ranks[:8])) for ranks in grid.sets_of(Scope.ROWS)[:2]]
    more = ", ..." if len(sets) > 1 else ""
    digest = hashlib.blake2b(json.dumps([grid.shape, grid.ranks]).encode(), digest_size=8).hexdigest()
    return f"{digest} {grid.in_words()} (documents shared by {' and by '.join(sets)}{more})"
