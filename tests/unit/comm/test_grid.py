"""Grid: ranks by stage, data and tensor, without any process."""

from collections.abc import Sequence

import numpy as np
import pytest

from distca_hf.comm.grid import Grid, Scope
from distca_hf.errors import ConfigError


def _grid(rank: int = 0, shape: Sequence[int] = (2, 2, 2), **named: object) -> Grid:
    """Of a mesh made by counting, its dimensions called "pp", "dp" and "tp"."""
    mesh = np.arange(np.prod(shape)).reshape(shape)
    given = {"data": "dp", "tensor": "tp", "stages": "pp"} | named
    return Grid.of_mesh(mesh, ("pp", "dp", "tp"), rank, mesh.size, **given)  # type: ignore[arg-type]


# --- scopes


def test_flat_grid_has_all_ranks_in_all_scopes() -> None:
    grid = Grid.flat(range(4), 2)

    assert grid.is_flat
    assert [grid.members(scope) for scope in Scope] == [(2,)] + [(0, 1, 2, 3)] * 3
    assert [grid.sets_of(scope) for scope in Scope] == [[(0,), (1,), (2,), (3,)]] + [[(0, 1, 2, 3)]] * 3
    assert (grid.name, grid.in_words(), grid.data_rank, grid.number) == ("rank 2", "4 ranks", 2, 2)


@pytest.mark.parametrize("rank", range(8))
def test_scopes_of_stages_data_and_tensor(rank: int) -> None:
    grid = _grid(rank)
    stage, data, tensor = rank // 4, rank // 2 % 2, rank % 2

    assert grid.members(Scope.ROWS) == (4 * stage + tensor, 4 * stage + 2 + tensor)
    assert grid.members(Scope.LAYERS) == tuple(range(4 * stage, 4 * stage + 4))
    assert grid.members(Scope.GROUP) == tuple(range(8))
    assert (grid.stage, grid.data_rank, grid.number) == (stage, data, rank)
    assert grid.name == f"rank {rank} (stage {stage}, data {data}, tensor {tensor})"
    assert grid.in_words() == "2 stages x 2 data x 2 tensor ranks"


def test_sets_of_a_scope_are_in_one_order_on_all_ranks() -> None:
    """Every rank makes the process groups of all."""
    for scope, expected in {
        Scope.TENSOR: [(0, 1), (2, 3), (4, 5), (6, 7)],
        Scope.ROWS: [(0, 2), (1, 3), (4, 6), (5, 7)],
        Scope.LAYERS: [(0, 1, 2, 3), (4, 5, 6, 7)],
        Scope.GROUP: [tuple(range(8))],
    }.items():
        assert [_grid(rank).sets_of(scope) for rank in range(8)] == [expected] * 8


def test_names_leave_out_what_there_is_one_of() -> None:
    assert _grid(5, shape=(1, 4, 2)).name == "rank 5 (data 2, tensor 1)"
    assert _grid(5, shape=(1, 4, 2)).in_words() == "4 data x 2 tensor ranks"
    assert _grid(5, shape=(2, 4, 1)).name == "rank 5 (stage 1, data 1)"


def test_ranks_of_one_data_rank_hold_the_same_tokens() -> None:
    grid = _grid(6)

    assert grid.same_tokens(grid.members(Scope.LAYERS)) == [[0, 1], [2, 3]]
    assert grid.same_tokens(grid.members(Scope.ROWS)) == [[0], [1]]
    assert grid.same_tokens(grid.members(Scope.GROUP)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


# --- meshes


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)], ids=str)
def test_dimensions_of_a_mesh_may_be_in_any_order(order: tuple[int, ...]) -> None:
    """The ranks stay where they are; the mesh only has other axes."""
    mesh, names = np.arange(12).reshape(2, 3, 2), np.array(["pp", "dp", "tp"])
    grid = Grid.of_mesh(mesh.transpose(order), names[list(order)].tolist(), 7, 12, "dp", "tp", "pp")

    assert grid == _grid(7, shape=(2, 3, 2))


def test_tensor_parts_may_be_far_apart() -> None:
    mesh = np.arange(8).reshape(2, 4)
    grid = Grid.of_mesh(mesh, ("tp", "dp"), 5, 8, data="dp", tensor="tp")

    assert grid.members(Scope.ROWS) == (4, 5, 6, 7)
    assert grid.name == "rank 5 (data 1, tensor 1)"


def test_several_data_dimensions_count_as_one() -> None:
    """Replicas of shards: documents are shared by all of them."""
    mesh = np.arange(8).reshape(1, 2, 2, 2)
    names = ("pp", "dp_replicate", "fsdp", "tp")
    grid = Grid.of_mesh(mesh, names, 5, 8, data=("dp_replicate", "fsdp"), tensor="tp")

    assert grid.shape == (1, 4, 2)
    assert grid.members(Scope.ROWS) == (1, 3, 5, 7)


def test_data_dimensions_in_another_order_are_the_same_ranks() -> None:
    mesh = np.arange(8).reshape(2, 2, 2)
    names = ("dp_replicate", "fsdp", "tp")
    here, there = (Grid.of_mesh(mesh, names, 3, 8, data, "tp") for data in (names[:2], names[1::-1]))

    assert here == there


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"data": ()}, r"no dimension of the device mesh, 'pp' \(2\), 'dp' \(2\), 'tp' \(2\), is for data"),
        ({"data": "fsdp"}, "the device mesh has no dimension 'fsdp'; it has 'pp'"),
        ({"stages": ()}, r"dimension 'pp' of the device mesh .* is neither data, nor tensor, nor stages"),
        ({"tensor": "dp"}, "dimension 'dp' of the device mesh is named more than once"),
    ],
    ids=str,
)
def test_wrongly_named_dimensions_are_refused(named: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _grid(**named)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_ranks", [4, 12])
def test_mesh_that_is_not_all_ranks_is_refused(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"mesh is of 8 ranks, ranks 0, .*, 7, and the job has {num_ranks}"):
        Grid.of_mesh(np.arange(8).reshape(4, 2), ("dp", "tp"), 0, num_ranks, "dp", "tp")


def test_mesh_whose_data_ranks_are_in_several_orders_is_refused() -> None:
    mesh = np.array([[0, 3], [2, 1]])
    with pytest.raises(ConfigError, match="ranks 0, 2 share documents, and so do ranks 3, 1"):
        Grid.of_mesh(mesh, ("dp", "tp"), 0, 4, "dp", "tp")


# --- nodes


@pytest.mark.parametrize(
    ("shape", "launched", "per_node"),
    [((1, 8, 2), 8, 4), ((1, 2, 8), 8, 1), ((2, 4, 2), 8, 4), ((2, 8, 1), 8, 8), ((1, 3, 2), 4, 2), ((1, 4, 2), 0, 0)],
    ids=str,
)
def test_ranks_per_node_are_those_that_share_documents(
    shape: tuple[int, int, int], launched: int, per_node: int
) -> None:
    assert _grid(shape=shape).ranks_per_node(launched) == per_node


@pytest.mark.parametrize("shape", [(2, 6, 1), (2, 3, 2)], ids=str)
def test_data_ranks_unequally_many_per_node_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"data ranks, .*, are unequally many per node \(\d on node 0, \d on node 1"):
        _grid(shape=shape).ranks_per_node(8)
