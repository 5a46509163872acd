"""Jobs whose ranks differ in more than data: rows go along data, and words to the ranks of their scope."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import distca_hf
from distca_hf.comm.agreement import WIDTH, Agreement, Occasion
from distca_hf.comm.grid import Grid, Scope
from distca_hf.comm.torch_transport import TorchGather, TorchTransport
from distca_hf.comm.transport import AllToAll, Transport
from distca_hf.errors import ConfigError, PlanMismatchError
from distca_hf.layout import Layout, Topology
from distca_hf.placement.given import place_given
from distca_hf.planning.row_moves import RowMoves
from distca_hf.runtime.row_moves import PassRows, PinnedRowMoves
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks, start_ranks


CPU = torch.device("cpu")
# The kinds of ranks of a mesh of 2 x 2, as `use_mesh` names them.
KINDS = {"tensor": {"data": "outer", "tensor": "inner"}, "stages": {"stages": "outer", "data": "inner"}}
ROWS = {"tensor": [(0, 2), (1, 3)], "stages": [(0, 1), (2, 3)]}


@dataclass
class Seen:
    """What one rank has seen."""

    name: str
    rows: list[float]
    gathered: dict[str, list[int]]
    labels: list[int]
    told: list[int]
    mismatch: str
    leaving: dict[int, int]
    groups: int
    refused: str
    bytes_moved: int


def _plugin(kind: str) -> distca_hf.DistCAPlugin:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=64)
    plugin.use_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")), **KINDS[kind])  # type: ignore[arg-type]
    return plugin


def _speak(kind: str) -> Seen:
    rank, plugin = dist.get_rank(), _plugin(kind)
    before = len(dist.distributed_c10d._world.pg_map)
    transport = plugin.transport(CPU)
    groups = len(dist.distributed_c10d._world.pg_map) - before
    rows = transport.exchange(AllToAll(torch.full((2, 1), float(rank)), [1, 1], [1, 1], "here")).wait()
    bytes_moved = _move_rows(transport)
    scopes = Scope.ROWS, Scope.LAYERS, Scope.GROUP
    gathered = {scope.name: [row[0] for row in transport.gather([rank], "here", scope).wait()] for scope in scopes}
    transport.traffic.leave_signal = 15 if rank == 3 else 0
    numbers = {"label_tokens": 10 * (transport.rank + 1)}
    agreement = Agreement.start(transport, Occasion.TAKE, 0, {"settings": 7}, numbers)
    labels, told = agreement.wait(Scope.ROWS)["label_tokens"], agreement.wait()["label_tokens"]
    try:
        Agreement.start(transport, Occasion.TAKE, 0, {"seed": int(rank == 1)}, {}).wait()
    except PlanMismatchError as error:
        mismatch = str(error)
    with pytest.raises(ConfigError) as caught:
        plugin.use_grid(Grid.flat(range(4), rank))
    leaving = transport.traffic.leaving
    plugin.close()
    name, refused = transport.grid.name, str(caught.value)
    return Seen(name, rows[:, 0].tolist(), gathered, labels, told, mismatch, leaving, groups, refused, bytes_moved)


def _move_rows(transport: Transport) -> int:
    """Moves six rows of data rank 0 to two ranks and home again; returns the bytes that this rank sent."""
    home = Layout.from_packs([np.array([6]), np.array([], dtype=np.int64)])
    moves = RowMoves.of(home, place_given(home, Topology(2, 2)), transport.rank)
    held, before = [6, 0][transport.rank], transport.traffic.bytes_sent
    rows = PassRows(PinnedRowMoves.prepare(moves, pin=False).to(CPU), transport, (1, held), "here", lambda: None)
    ids, states = torch.arange(held), torch.randn(held, 16, generator=torch.Generator().manual_seed(0))
    placed_ids, *_, placed_states = rows.move_in([ids, ids, states.requires_grad_()], differentiate=True)
    assert len(placed_ids) == 3
    home_states = rows.move_home([placed_states[None] * 2])[0]
    torch.testing.assert_close(home_states[0], 2 * states)
    home_states.square().sum().backward()  # d/dx of (2 x)^2
    torch.testing.assert_close(states.grad, 8 * states)
    return transport.traffic.bytes_sent - before


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_words_stay_in_their_scope(kind: str, tmp_path: Path) -> None:
    seen: list[Seen] = run_ranks(4, _speak, tmp_path, kind)

    for rank, of_rank in enumerate(seen):
        mine = next(list(ranks) for ranks in ROWS[kind] if rank in ranks)
        stage = list(range(4)) if kind == "tensor" else mine
        assert of_rank.name == f"rank {rank} ({'data' if kind == 'tensor' else 'stage'} {rank // 2}, " + (
            f"tensor {rank % 2})" if kind == "tensor" else f"data {rank % 2})"
        )
        assert of_rank.rows == mine
        assert of_rank.gathered == {"ROWS": mine, "LAYERS": stage, "GROUP": [0, 1, 2, 3]}
        assert of_rank.labels == [10, 20]  # each data rank once
        assert sorted(of_rank.told) == [10, 10, 20, 20]
        other = "data 0, tensor 1" if kind == "tensor" else "stage 0, data 1"
        assert f"1 on rank 1 ({other})" in of_rank.mismatch
        assert of_rank.leaving == {3: 15}
        # Rows, words of rows, words of the group; a stage's ranks are one of both. And shares of tensor ranks.
        assert of_rank.groups == 3 + (kind == "tensor")
        # Three rows of two ids and 16 numbers go in, 16 numbers come home, and gradients of 16 go both ways: whole
        # ones, or the halves of two tensor ranks.
        is_home = (rank // 2 if kind == "tensor" else rank % 2) == 0
        widths = [16 + 64, 64] if is_home else [64, 64]
        assert of_rank.bytes_moved == sum(3 * (width // 2 if kind == "tensor" else width) for width in widths)
        assert "ranks already (a loader, a model or use_mesh said so), and is now given 4 ranks" in of_rank.refused


def _lose_a_rank(_: Path) -> Any:
    """Rank 3 fails while those that share its documents wait for rows; all others go on."""
    transport = _plugin("tensor").transport(CPU)
    transport.gather([1], "before", Scope.GROUP).wait()
    if dist.get_rank() == 3:
        raise ArithmeticError("first cause")
    rows = torch.zeros(2, 1)
    return transport.exchange(AllToAll(rows, [1, 1], [1, 1], "exchange of rows")).wait().tolist()


def test_failed_exchange_asks_those_who_take_part_alone(tmp_path: Path) -> None:
    outcomes = start_ranks(4, _lose_a_rank, tmp_path, tmp_path)

    assert [outcome.result for outcome in outcomes] == [[[0.0], [0.0]], None, [[0.0], [0.0]], None]
    words = "rank 1 (data 0, tensor 1), exchange of rows: rank 3 (data 1, tensor 1) left: ArithmeticError: first cause"
    assert words in outcomes[1].output
    assert "does not answer" not in outcomes[1].output


def _mistakes(_: Path) -> dict[str, str]:
    """Meshes that cannot be used, and how they are refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def words(**named: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            distca_hf.DistCAPlugin(**named.pop("settings", {})).use_mesh(named.pop("mesh", mesh), **named)
        return str(caught.value)

    def others(kinds: dict[str, str]) -> str:
        plugin = distca_hf.DistCAPlugin()
        if dist.get_rank() == 1:
            plugin.use_mesh(mesh, **kinds)  # type: ignore[arg-type]
        elif kinds["data"] == "tp":
            plugin.use_mesh(mesh, data="dp", tensor="tp")
        with pytest.raises(ConfigError) as caught:
            plugin.transport(CPU)
        return str(caught.value)

    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    return {
        "no data": words(data=(), tensor="tp"),
        "part": words(mesh=half, data="tp"),
        "nameless": words(mesh=init_device_mesh("cpu", (4,)), data="dp"),
        "with a group": words(data="dp", tensor="tp", settings={"group": dist.group.WORLD}),
        "on one rank": others({"data": "dp", "tensor": "tp"}),
        "swapped on one rank": others({"data": "tp", "tensor": "dp"}),
    }


def test_meshes_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    for rank, words in enumerate(run_ranks(4, _mistakes, tmp_path, tmp_path)):
        assert "no dimension of the device mesh, 'dp' (2), 'tp' (2), is for data" in words["no data"]
        assert "mesh is of 2 ranks" in words["part"]
        assert "and the job has 4" in words["part"]
        assert "must be a device mesh whose dimensions have names" in words["nameless"]
        assert f"rank {rank}: the plugin has a group, ranks 0, 1, 2, 3 of the job" in words["with a group"]
        shown = "rank 0 of the job works on 4 ranks (documents shared by 0, 1, 2, 3), and rank 1 on 2 data x 2 tensor"
        assert shown in words["on one rank"]
        assert "(documents shared by 0, 2 and by 1, 3, ...), and rank 1 on" in words["swapped on one rank"]


def _train_flat(_: Path) -> tuple[int, list[tuple[int, int]], list[str]]:
    """Groups that are opened, and gathers (ranks, integers) and exchanges of a placed micro-batch and of a pack."""
    before = len(dist.distributed_c10d._world.pg_map)
    gathers: list[tuple[int, int]] = []
    gather = TorchTransport.gather

    def noted(transport: TorchTransport, values: Sequence[int], where: str, scope: Scope = Scope.ROWS) -> TorchGather:
        gathers.append((len(transport.grid.members(scope)), len(values)))
        return gather(transport, values, where, scope)

    TorchTransport.gather = noted  # type: ignore[method-assign]
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=128)
    model = distca_hf.enable(tiny_model(num_hidden_layers=1).train(), plugin)
    transport = plugin.transport(CPU)
    model(**next(iter(plugin.dataloader(random_dataset(lengths=(200,)))))).loss.backward()
    tokens = 120 if dist.get_rank() == 0 else 20
    ids = torch.arange(3, 3 + tokens)[None]
    model(input_ids=ids, labels=ids, position_ids=torch.arange(tokens)[None]).loss.backward()
    return len(dist.distributed_c10d._world.pg_map) - before, gathers, list(transport.traffic.recent)


def test_flat_job_has_two_groups_and_the_words_of_one_scope(tmp_path: Path) -> None:
    """What a job without other parallelism opens, says and sends; scopes cost it nothing."""
    for groups, gathers, exchanges in run_ranks(2, _train_flat, tmp_path, tmp_path):
        assert groups == 2  # rows, and words of all scopes
        # Of take, or of plan, documents (number, length and hash of one) and move; of attend, differentiate.
        placed, pack = [WIDTH] * 3, [WIDTH, 3, *[WIDTH] * 3]
        assert gathers == [(2, integers) for integers in [*placed, *pack]]
        places = [place.removeprefix("micro-batch 0, ").removeprefix("layer 0, ") for place in exchanges]
        of_layer = ["forward, keys", "backward, key gradients"]
        moves = [f"rows on their way {way}" for way in ("in, forward", "home, forward", "in, backward")]
        assert places == [*of_layer, moves[0], of_layer[0], *moves[1:], of_layer[1]]
