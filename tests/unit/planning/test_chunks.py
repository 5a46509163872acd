"""ExchangeChunks: where prefixes are cut that arrive in several parts."""

import random

import numpy as np
import pytest

from distca_hf.config import DistCAConfig
from distca_hf.cost import Mask
from distca_hf.layout import Layout, Topology
from distca_hf.planning.pieces import ALL_HEADS, line_keys
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import rank_plan
from distca_hf.planning.transfers import NEVER, ExchangeChunks, key_transfers
from distca_hf.servers.served_plans import Servers
from support.layouts import random_layout, random_plan


# Rank 1 holds the ends of d0 and d1, and d2; rank 0 the beginnings.
PARTED = Layout.from_segments([12, 7, 3], [[(0, 0, 8), (1, 0, 4)], [(0, 8, 12), (1, 4, 7), (2, 0, 3)]])


def borders(
    chunks: ExchangeChunks, reader: int, document: int, head: int = ALL_HEADS, head_groups: int = 1
) -> list[int]:
    return chunks.borders_of(reader, line_keys(np.array([document]), np.array([head]), head_groups))[0].tolist()


@pytest.mark.parametrize(
    ("layout", "mask", "count", "expected"),
    [
        # 4 x 8 and 3 x 4 pairs, where a rank has 56 on average. The last part has no end: nobody reads beyond.
        (PARTED, Mask(), 4, {(1, 0): [0, 2, 5, NEVER, NEVER], (1, 1): [0, 0, 0, 0, NEVER]}),
        # Rank 1 reads d0[2:8] for a window of 7 tokens: half of them in either chunk.
        (Layout.from_segments([12], [[(0, 0, 8)], [(0, 8, 12)]]), Mask(7), 2, {(1, 0): [0, 5, NEVER]}),
        (Layout.from_segments([16], [[(0, 0, 11)], [(0, 11, 16)]]), Mask(), 3, {(1, 0): [0, 3, 7, NEVER]}),
        (
            Layout.from_segments([16, 20], [[(0, 0, 15)], [(0, 15, 16), (1, 0, 20)]]),
            *(Mask(), 3, {(1, 0): [0, 0, 0, NEVER]}),
        ),
        (PARTED, Mask(), 3, {(1, 2): [0, NEVER, NEVER, NEVER], (0, 0): [0, NEVER, NEVER, NEVER]}),
        (PARTED, Mask(), 1, {(1, 0): [0, NEVER], (1, 1): [0, NEVER], (0, 2): [0, NEVER]}),
    ],
    ids=["equal work", "a window", "equal parts", "little work comes last", "nobody lacks it", "one chunk"],
)
def test_work_of_a_rank_is_divided_among_the_chunks(
    layout: Layout, mask: Mask, count: int, expected: dict[tuple[int, int], list[int]]
) -> None:
    """By (reader, document)."""
    chunks = ExchangeChunks.cut(plan_in_place(layout, mask=mask), count)

    assert {of: borders(chunks, *of) for of in expected} == expected
    assert chunks.borders_of(0, np.zeros(0, dtype=np.int64)).shape == (0, count + 1)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("head_groups", [1, 3])
def test_chunks_carry_together_what_one_carries(count: int, head_groups: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        plan = random_plan(rng, random_layout(rng, 4), head_groups)
        transfers, parts = key_transfers(plan), key_transfers(plan, ExchangeChunks.cut(plan, count))

        assert parts.rows_between(4).tolist() == transfers.rows_between(4).tolist()
        assert not transfers.chunk.any()
        assert set(parts.chunk.tolist()) <= set(range(count))


@pytest.mark.parametrize(
    ("settings", "num_ranks", "num_chunks"),
    [
        ({}, 8, 1),
        ({"ranks_per_node": 8}, 8, 1),
        ({"ranks_per_node": 8}, 4, 1),
        ({"ranks_per_node": 4}, 8, 4),
        ({"ranks_per_node": 1}, 2, 4),
        ({"exchange_chunks": 1, "ranks_per_node": 4}, 8, 1),
        ({"exchange_chunks": 7}, 8, 7),
    ],
)
def test_chunks_by_setting_and_topology(
    settings: dict[str, int], num_ranks: int, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One where links are fast, four between nodes, unless somebody says otherwise."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    config = DistCAConfig(**settings)
    assert config.num_chunks(config.topology(num_ranks)) == num_chunks


@pytest.mark.parametrize(("nodes", "num_chunks"), [((), 1), ((0, 0), 1), ((0, 1), 4)])
def test_servers_on_another_node_are_behind_slow_links(nodes: tuple[int, ...], num_chunks: int) -> None:
    servers = Servers((1.0, 1.0), nodes=nodes)

    assert DistCAConfig().num_chunks(servers.topology(Topology(2, 2))) == num_chunks


# --- what one rank needs of a plan


NUM_RANKS = 3


@pytest.fixture(params=range(4))
def plan(request: pytest.FixtureRequest) -> Plan:
    rng = random.Random(request.param)
    return random_plan(rng, random_layout(rng, NUM_RANKS), 2)


def test_facts_are_the_same_on_all_ranks_and_in_any_number_of_chunks(plan: Plan) -> None:
    facts = [rank_plan(plan, rank, num_chunks).facts for rank in range(NUM_RANKS) for num_chunks in (1, 4)]

    assert all(each == facts[0] for each in facts)
    assert facts[0].work == tuple(plan.work.tolist())
    assert facts[0].key_rows_sent == tuple(key_transfers(plan).rows_between(NUM_RANKS).sum(axis=1).tolist())


def test_work_before_is_that_at_home_unless_given(plan: Plan) -> None:
    groups = plan.tasks.head_groups
    assert rank_plan(plan, 0).facts.work_before == tuple((plan.layout.rank_work * groups).tolist())
    assert rank_plan(plan, 0, work_before=np.array([1, 2, 3])).facts.work_before == (groups, 2 * groups, 3 * groups)
