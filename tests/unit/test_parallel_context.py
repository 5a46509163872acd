"""Parallel context: settings, the ranks that follow them, and their transports; the plugin is its face for users."""

import copy
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from accelerate import PartialState
from torch.distributed import HashStore

from distca_hf import enable, parallel_context
from distca_hf.comm.agreement import CheckedTransport
from distca_hf.comm.grid import Grid
from distca_hf.comm.groups import Members
from distca_hf.comm.rollcall import RollCall
from distca_hf.comm.transport import LocalTransport
from distca_hf.config import Debug
from distca_hf.errors import ConfigError, PlanError, StoreLostError
from distca_hf.parallel_context import ParallelContext
from distca_hf.plugin import DistCAPlugin
from support.data import random_dataset
from support.fake_job import fake_job
from support.models import tiny_model


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_one_transport_is_opened_for_each_device() -> None:
    context = ParallelContext()
    transport = context.transport(CPU)

    assert isinstance(transport, LocalTransport)
    assert context.transport(torch.device("cpu:0")) is transport
    context.close()
    assert context.transport(CPU) is not transport


def test_a_connection_that_cannot_be_ended_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    context, closed = ParallelContext(), list[str]()
    transports = [context.transport(torch.device(device)) for device in ("cpu", "meta")]

    def fail() -> None:
        raise StoreLostError("the store is gone")

    monkeypatch.setattr(transports[1], "close", fail)
    monkeypatch.setattr(transports[0], "close", lambda: closed.append("cpu"))
    with pytest.raises(StoreLostError, match="the store is gone"):
        context.close()
    monkeypatch.setattr(transports[1], "close", lambda: closed.append("meta"))
    context.close()
    assert closed == ["cpu"]


def test_loader_of_a_device_without_a_number_is_for_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread asks torch for no current device: that is another one in every thread."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    plugin = DistCAPlugin(tokens_per_rank=192)
    loader = plugin.dataloader(random_dataset(20), device="cuda")

    assert loader.preparer.device == torch.device("cuda", 3)
    assert plugin.dataloader(random_dataset(20), device="cpu:0").preparer.device == CPU


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
def test_copied_plugin_has_connections_of_its_own(copied: Callable[[DistCAPlugin], DistCAPlugin]) -> None:
    plugin = DistCAPlugin(tokens_per_rank=64)
    transport = plugin.transport(CPU)
    other = copied(plugin)

    assert other == plugin
    assert other.transport(CPU) is not transport
    assert plugin.transport(CPU) is transport


def test_ranks_are_those_of_the_process_group_that_there_is() -> None:
    plugin = DistCAPlugin()
    sizes = []
    for world_size in (2, 4):
        with fake_job(world_size):
            sizes += [len(plugin.members.job), len(pickle.loads(pickle.dumps(plugin)).members.job)]
        sizes.append(len(plugin.members.job))
    assert sizes == [2, 2, 1, 4, 4, 1]


def test_ranks_of_a_group_do_not_go_on_as_processes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin may be asked for a loader before there is a process group, to count its steps."""
    plugin = DistCAPlugin(tokens_per_rank=192)
    batch = next(iter(plugin.dataloader(random_dataset(20))))
    model = enable(tiny_model(), plugin)
    monkeypatch.setattr(PartialState, "_shared_state", {})  # Accelerate may have counted this process alone before
    opened = LocalTransport()
    opened.world_size, opened.grid = 2, Grid.flat(range(2), 1)
    monkeypatch.setattr(Members, "of", lambda group, num_extra: Members(range(2), Grid.flat(range(2), 1)))
    monkeypatch.setattr(parallel_context, "open_transport", lambda *arguments: opened)

    with pytest.raises(
        PlanError, match="rank 1, micro-batch 0: the loader was made for a single process, and 2 ranks"
    ):
        model(**batch)
    assert plugin.transport(CPU) is opened


def test_exchanges_are_checked_if_that_is_asked_for() -> None:
    assert isinstance(ParallelContext(debug=Debug(check_exchanges=True)).transport(CPU), CheckedTransport)


# --- ranks of a node


@pytest.mark.parametrize(
    ("setting", "launched", "used"), [(0, None, 0), (0, "8", 8), (4, "8", 4), (4, None, 4)], ids=str
)
def test_ranks_of_a_node_are_as_launched_unless_a_setting_says_other(
    setting: int, launched: str | None, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launched is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", launched)

    context = ParallelContext(ranks_per_node=setting)
    assert (context.node_size, context.ranks_per_node, context.shared_settings()["ranks_per_node"]) == (
        used,
        setting,
        used,
    )


@pytest.mark.parametrize(
    ("group", "per_node"),
    [((0, 1, 2, 3), 4), ((4, 5), 2), ((0, 2, 4, 6), 2), ((1, 5, 9), 1), ((0, 1, 2, 4, 5, 6, 8), 3), (range(16), 4)],
    ids=str,
)
def test_ranks_of_a_group_are_counted_on_each_node(group: Sequence[int], per_node: int) -> None:
    """Of 16 ranks, 4 on a node. The last node may have fewer."""
    members = Members(range(16), Grid.flat(group, group[0]))

    assert members.ranks_per_node(4) == per_node
    assert members.are_the_job == (len(group) == 16)


@pytest.mark.parametrize("group", [(0, 4, 5), (0, 1, 2, 4, 8, 9, 10)], ids=str)
def test_group_of_unequally_many_ranks_per_node_is_refused(group: Sequence[int]) -> None:
    with pytest.raises(ConfigError, match=r"unequally many per node \(\d on node 0, .* or set ranks_per_node$"):
        Members(range(16), Grid.flat(group, 0)).ranks_per_node(4)


# --- groups


def test_group_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"group=\[0, 1\] must be .* process group or device mesh, not list"):
        DistCAPlugin(group=[0, 1])  # type: ignore[arg-type]


def test_settings_of_a_group_cannot_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISTCA_GROUP", "0,1")

    assert DistCAPlugin().group is None
    assert "DISTCA_GROUP: unknown setting" in caplog.text


def test_missing_ranks_are_named_by_both_numbers_where_they_differ() -> None:
    store = HashStore()
    RollCall(store, 3, (1, 3)).leave("ValueError: bad row")
    RollCall(store, 1, range(2)).leave("ValueError: bad row")

    calls = RollCall(store, 1, (1, 3), 0.0), RollCall(store, 0, range(2), 0.0)
    in_words = [list(call.in_words(call.missing())) for call in calls]

    assert in_words == [["rank 1 (rank 3 of the job) left: ValueError: bad row"], ["rank 1 left: ValueError: bad row"]]


# --- grids


def _grid(rank: int = 0) -> Grid:
    """Of 8 ranks, four data ranks of two tensor ranks each."""
    return Grid(tuple(range(8)), (1, 4, 2), rank)


def test_roles_and_scopes_of_a_grid() -> None:
    members = Members(range(8), _grid(5))

    assert (members.group, members.layer_ranks, members.row_ranks) == (tuple(range(8)), tuple(range(8)), (1, 3, 5, 7))
    assert (members.token_ranks, members.compute_ranks, members.are_the_job) == (range(4), range(4), True)
    assert members.ranks_per_node(4) == 2


def test_a_grid_decides_how_many_ranks_share_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for setting, used in ((0, 2), (1, 1)):
        context = ParallelContext(ranks_per_node=setting)
        context.use_grid(_grid())
        assert context.node_size == used


def test_the_same_grid_may_be_given_again_and_no_other_one() -> None:
    context = ParallelContext()
    context.use_grid(_grid())
    context.use_grid(_grid())

    with pytest.raises(ConfigError, match=r"works on 4 data x 2 tensor ranks already .* is now given 8 ranks"):
        context.use_grid(Grid.flat(range(8), 0))


def test_a_loader_from_before_keeps_its_grid() -> None:
    context = ParallelContext()
    context.transport(CPU)

    with pytest.raises(ConfigError, match="works on 1 rank already"):
        context.use_grid(_grid())


def test_servers_beside_a_grid_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCA_LAUNCHED_SERVERS", "1")
    context = DistCAPlugin(attention_servers="1")

    with pytest.raises(
        ConfigError, match="differ only in data, and these are 4 data x 2 tensor ranks; leave the serv"
    ):
        context.use_grid(_grid())


# --- attention servers


def test_measured_speeds_and_equal_gradients_in_every_run_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCA_LAUNCHED_SERVERS", "1")
    servers = {"attention_servers": "1", "deterministic": True}
    with pytest.raises(ConfigError, match="server_speed=0 measures speeds, which differ from run to run"):
        DistCAPlugin(**servers)
    given = DistCAPlugin(**servers, server_speed=0.5).annex.extra_ranks
    assert given is not None
    assert given.speeds == (0.5,)
    measured = DistCAPlugin(attention_servers="1").annex.extra_ranks
    assert measured is not None
    assert measured.speeds == (1.0,)
