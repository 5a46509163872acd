"""Plans with attention servers: ranks behind the trainers that hold nothing, and compute in proportion to their
speed."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distca_hf.cost import TokenBytes
from distca_hf.errors import ConfigError, PlanError
from distca_hf.layout import Layout, Topology
from distca_hf.placement.place import place
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.rebalance.greedy import WorkGaps
from distca_hf.planning.routing import LATE_SHARE, route
from distca_hf.planning.transfers import bytes_between
from distca_hf.servers.served_plans import Servers
from support.layouts import random_layout


LENGTHS = [16_000, *[500] * 64]
PACKS = [LENGTHS[:40], LENGTHS[40:]]


# --- layouts and topologies with servers


@pytest.mark.parametrize("num_servers", [1, 3])
def test_servers_hold_no_segments_and_no_rows(num_servers: int) -> None:
    for seed in range(20):
        trainers = random_layout(random.Random(seed), 1 + seed % 4)
        layout = trainers.with_extra_ranks(num_servers)
        layout.validate()

        assert layout.num_ranks == trainers.num_ranks + num_servers
        for rank in range(trainers.num_ranks):
            assert layout.held_by(rank) == trainers.held_by(rank)
        assert layout.rank_rows.tolist() == [*trainers.rank_rows.tolist(), *[0] * num_servers]
        assert not any(layout.held_by(trainers.num_ranks + server) for server in range(num_servers))
        assert layout.rank_rows.dtype == layout.rank_segments.dtype == np.int64


def test_servers_are_on_the_nodes_that_are_given() -> None:
    topology = Topology(5, 2).with_extra_ranks([1, 3, 0])

    assert topology.num_ranks == 8
    assert topology.node_of.tolist() == [0, 0, 1, 1, 2, 1, 3, 0]
    assert topology.num_nodes == 4
    assert [list(topology.ranks_of(node)) for node in range(4)] == [[0, 1], [2, 3], [4], []]


@pytest.mark.parametrize(("num_ranks", "nodes", "words"), [(2, (0, 1), "one must train"), (3, (-1,), "from 0 on")])
def test_wrong_nodes_are_refused(num_ranks: int, nodes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Topology(num_ranks, 2, nodes)


def test_nodes_level_with_their_own_servers_first() -> None:
    """Ranks of one node do not follow each other where servers are numbered after all trainers."""
    topology = Topology(4, 2).with_extra_ranks([1, 0])
    gaps = WorkGaps.of([10, 2, 9, 3, 0, 0], [4.0] * 6)

    assert gaps.within_nodes(topology) == [WorkGaps({0: 6.0}, {1: 2.0, 5: 4.0}), WorkGaps({2: 5.0}, {3: 1.0, 4: 4.0})]
    assert gaps.between_nodes(topology) == WorkGaps({}, {})


# --- the servers themselves


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"speeds": ()}, "at least one"),
        ({"speeds": (1.0, 0.0)}, "attention server 1 is 0.0"),
        ({"speeds": (-1.0,)}, "attention server 0 is -1.0"),
        ({"speeds": (float("nan"),)}, "is nan"),
        ({"speeds": (float("inf"),)}, "is inf"),
        ({"speeds": (1.0, 1.0), "nodes": (0,)}, "1 nodes for 2 attention servers"),
        ({"speeds": (1.0,), "nodes": (-1,)}, "from 0 on"),
    ],
)
def test_wrong_servers_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Servers(**given)


def test_servers_beside_several_nodes_need_to_say_where_they_are() -> None:
    with pytest.raises(ConfigError, match="trainers on 2 nodes: say on which node"):
        Servers((1.0,)).topology(Topology(4, 2))

    assert Servers((1.0,)).topology(Topology(2, 2)).node_of.tolist() == [0, 0, 0]
    assert Servers((1.0,), nodes=(1,)).topology(Topology(2, 2)).node_of.tolist() == [0, 0, 1]


# --- plans


@pytest.mark.parametrize("layout", [place(LENGTHS, 2), Layout.from_packs(PACKS)], ids=["placed", "packs"])
@pytest.mark.parametrize("head_groups", [1, 8])
@pytest.mark.parametrize("speeds", [(1.0,), (0.5, 0.2), (2.0,)])
def test_all_ranks_compute_for_the_same_time(layout: Layout, head_groups: int, speeds: tuple[float, ...]) -> None:
    plan = Servers(speeds).plan(layout, head_groups)
    plan.validate()
    times = plan.work / np.array([1.0, 1.0, *speeds])
    even = plan.work.sum() / (2 + sum(speeds))

    assert plan.speeds == (1.0, 1.0, *speeds)
    assert plan.imbalance == pytest.approx(times.max() * sum(plan.speeds) / plan.work.sum())
    assert plan.imbalance <= 1.01
    # Trainers may keep a little more than their share, and servers lack it.
    assert plan.work[2:].sum() > (sum(speeds) - 2 * 0.01) * even


@pytest.mark.parametrize("layout", [place(LENGTHS, 2), Layout.from_packs(PACKS)], ids=["placed", "packs"])
def test_trainers_may_leave_all_attention_to_servers(layout: Layout) -> None:
    plan = Servers((1.0, 0.5), trainers_attend=False).plan(layout, 8)
    plan.validate()

    assert plan.speeds == (0.0, 0.0, 1.0, 0.5)
    assert plan.work[:2].sum() == 0
    assert plan.imbalance <= 1.01


def test_a_slow_server_beside_many_trainers_gets_its_share() -> None:
    rng = random.Random(0)
    lengths = [min(60_000, int(rng.lognormvariate(8.3, 1.6)) + 16) for _ in range(40)]
    plan = Servers((0.2,)).plan(place(lengths, 8, head_groups=8), 8)

    assert plan.work[8] / plan.work.sum() == pytest.approx(0.2 / 8.2, rel=0.25)


def test_a_striped_layout_moves_no_more_bytes_than_without_servers() -> None:
    """Its stripes are left out, but tokens lie as the stripe spread them, and heads are divided all the same."""
    layout = place([500_000], 8, head_groups=8)
    in_place, plan = plan_in_place(layout, 8), Servers((1.0,)).plan(layout, 8)
    plan.validate()

    assert layout.stripes
    assert plan.imbalance <= 1.01
    assert (
        bytes_between(plan, TokenBytes()).sum(axis=1).max() < bytes_between(in_place, TokenBytes()).sum(axis=1).max()
    )


def test_work_stays_on_the_node_of_the_trainers_that_have_it() -> None:
    """Two nodes with one server each; the plan that knows nodes sends nothing between them."""
    layout = Layout.from_packs([[60_000], [10], [60_000], [10]])
    topology = Topology(4, 2)
    plan = Servers((1.0, 1.0), nodes=(1, 0)).plan(layout, 8, topology=topology)
    node_of = topology.with_extra_ranks([1, 0]).node_of

    assert (node_of[plan.pieces.owner] == node_of[plan.pieces.computing_rank]).all()
    assert plan.moves_queries


def test_a_topology_of_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="topology has 3 ranks, the layout 2 trainers"):
        Servers((1.0,)).plan(Layout.from_packs(PACKS), topology=Topology(3, 3))


# --- speeds of a plan


def test_the_fingerprint_of_a_plan_without_servers_is_the_one_it_always_was() -> None:
    """In every process, whatever the seed of its hashes."""
    layout = Layout.from_segments([8, 3, 1], [[(1, 0, 3), (0, 0, 2)], [(2, 0, 1), (0, 2, 8)]], [6, 7])

    assert plan_in_place(layout).fingerprint == 4258263881478547765


@pytest.mark.parametrize(
    ("speeds", "words"),
    [((1.0,), "1 speeds for 2 ranks"), ((1.0, -1.0), "rank 1 of speed -1.0"), ((0.0, 1.0), "rank 0 of speed 0.0")],
)
def test_wrong_speeds_are_refused(speeds: tuple[float, ...], words: str) -> None:
    plan = replace(plan_in_place(place(LENGTHS, 2)), speeds=speeds)
    with pytest.raises(PlanError, match=words):
        plan.validate()


# --- local calls beside results on their way


def times_before_results_leave(plan: Plan) -> list[float]:
    """Time of each rank less that of its deferred calls."""
    late = []
    for rank in range(plan.layout.num_ranks):
        routing = route(plan, rank)
        speed = plan.speeds[rank] if plan.speeds else 1.0
        square = sum(call.pairs for call in routing.local)
        late.append(routing.late_share * square / speed if square else 0.0)
    return (plan.time - np.array(late)).tolist()


@pytest.mark.parametrize("speeds", [(1.0,), (0.5, 0.2)])
def test_trainers_defer_as_much_as_they_compute_longer_than_servers(speeds: tuple[float, ...]) -> None:
    """Servers have no local calls to defer, and their results leave when those of trainers do."""
    plan = Servers(speeds).plan(place(LENGTHS, 2), 8)
    plan = replace(plan, speeds=(*plan.speeds[:2], *(speed * 1.25 for speed in speeds)))  # faster than expected
    leave = times_before_results_leave(plan)
    longest, mean = plan.time.max(), plan.time.mean()

    assert longest - mean * LATE_SHARE <= max(leave) < longest
    assert [route(plan, 2 + server).late_share for server in range(len(speeds))] == [0.0] * len(speeds)
    assert min(route(plan, rank).late_share for rank in range(2)) > 0
    for rank in range(2):
        assert leave[rank] == pytest.approx(max(leave))


def test_equal_speeds_defer_what_no_speeds_do() -> None:
    """Where all ranks have equal work, and enough of it is local."""
    plan = plan_in_place(place([4000] * 8, 4))

    for rank in range(4):
        with_speeds = route(replace(plan, speeds=(1.0,) * 4), rank).late_share
        assert route(plan, rank).late_share == pytest.approx(with_speeds) == pytest.approx(LATE_SHARE)
