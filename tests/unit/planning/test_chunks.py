"""ExchangeChunks: where prefixes are cut that arrive in several parts."""

import random

import numpy as np
import pytest

from distca_hf.config import DistCAConfig
from distca_hf.cost import Mask
from distca_hf.layout import Layout, Stripe, Topology
from distca_hf.planning.pieces import ALL_HEADS, Tasks, line_keys
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import rank_plan, route
from distca_hf.planning.transfers import NEVER, ExchangeChunks, key_transfers
from distca_hf.servers.served_plans import Servers
from support.layouts import random_layout, random_plan


# Rank 1 holds the ends of d0 and d1, and d2; rank 0 the beginnings.
PARTED = Layout.from_segments([12, 7, 3], [[(0, 0, 8), (1, 0, 4)], [(0, 8, 12), (1, 4, 7), (2, 0, 3)]])


def borders(
    chunks: ExchangeChunks, reader: int, document: int, head: int = ALL_HEADS, head_groups: int = 1
) -> list[int]:
    return chunks.borders_of(reader, line_keys(np.array([document]), np.array([head]), head_groups))[0].tolist()


def moved(layout: Layout, tasks: list[tuple[int, ...]], head_groups: int = 1) -> Plan:
    columns = np.array([(*task, ALL_HEADS)[:5] for task in tasks], dtype=np.int64).T.copy()
    plan = Plan(layout, Tasks.sort(*columns, head_groups=head_groups))
    plan.validate()
    return plan


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


def test_nothing_to_bring_is_cut_in_no_parts() -> None:
    chunks = ExchangeChunks.cut(plan_in_place(Layout.from_segments([3, 2], [[(0, 0, 3)], [(1, 0, 2)]])), 3)

    assert len(chunks.keys) == 0
    assert borders(chunks, 1, 1) == [0, NEVER, NEVER, NEVER]


def test_remote_queries_of_a_rank_are_divided_among_the_chunks() -> None:
    """Each document comes whole, in the chunk of its remote queries; local queries of the same document take it from
    there."""
    lengths = [4, 4, 4, 6]
    layout = Layout.from_segments(lengths, [[(0, 0, 4), (1, 0, 4), (2, 0, 4), (3, 0, 4)], [(3, 4, 6)]])
    tasks = [(0, 0, 4, 1), (1, 0, 4, 1), (2, 0, 4, 1), (3, 0, 2, 0), (3, 2, 4, 1), (3, 4, 6, 1)]
    chunks = ExchangeChunks.cut(moved(layout, tasks), 2)

    assert [borders(chunks, 1, document) for document in range(4)] == [[0, NEVER, NEVER]] * 2 + [[0, 0, NEVER]] * 2
    lines = line_keys(np.arange(4), np.full(4, ALL_HEADS), 1)
    assert chunks.of_remote_queries(np.ones(4, dtype=np.int64), lines).tolist() == [0, 0, 1, 1]


def test_groups_of_heads_are_guests_by_themselves() -> None:
    layout = Layout.from_segments([8], [[(0, 0, 4)], [(0, 4, 8)]], None, [Stripe(0, 0, 8, 0, 2)])
    plan = plan_in_place(layout, head_groups=4)
    chunks = ExchangeChunks.cut(plan, 2)

    for reader, groups in ((0, (0, 1)), (1, (2, 3))):
        assert [borders(chunks, reader, 0, group, 4) for group in groups] == [[0, NEVER, NEVER], [0, 0, NEVER]]


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


def test_rows_of_a_chunk_lie_together_and_in_order() -> None:
    """By hand: rank 1 of the layout above, in two chunks."""
    routing = route(plan_in_place(PARTED), 1, chunks=ExchangeChunks.cut(plan_in_place(PARTED), 2))

    assert routing.remote_kv_rows == 8 + 4
    assert routing.receive_counts.tolist() == [[8, 0], [4, 0]]
    assert routing.received_to_remote_kv.numbers.tolist() == list(range(12))
    assert routing.come_in_order
    told = [
        [
            (call.query_start, call.query_stop, call.key_start, call.key_stop, call.cu_seqlens_k.tolist())
            for call in far
        ]
        for far in routing.prefix_of_chunk
    ]
    assert told == [[(0, 4, 0, 8, [0, 8])], [(4, 7, 8, 12, [0, 4])]]

    sender = route(plan_in_place(PARTED), 0, chunks=ExchangeChunks.cut(plan_in_place(PARTED), 2))
    assert sender.send_rows.numbers.tolist() == list(range(12))
    assert sender.send_counts.tolist() == [[0, 8], [0, 4]]
    assert sender.shared_rows.numbers.tolist() == list(range(12))
    assert sender.send_in_shared.numbers.tolist() == sender.send_rows.numbers.tolist()


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


def test_one_chunk_has_one_routing(plan: Plan) -> None:
    for rank in range(NUM_RANKS):
        mine = rank_plan(plan, rank)
        assert mine.backward is mine.forward


def test_backward_has_one_chunk_and_reads_what_forward_kept(plan: Plan) -> None:
    """Rows arrive in chunks in forward; backward finds them in that order, and none is missing."""
    for rank in range(NUM_RANKS):
        mine = rank_plan(plan, rank, 3)
        assert (len(mine.forward.send_counts), len(mine.backward.send_counts)) == (3, 1)
        for counts in ("send_counts", "receive_counts"):
            assert np.array_equal(getattr(mine.forward, counts).sum(axis=0), getattr(mine.backward, counts)[0])
        in_order, kept = (
            np.sort(rows.numbers) for rows in (mine.backward.received_to_remote_kv, mine.backward.kept_to_remote_kv)
        )
        assert np.array_equal(in_order, kept)
        assert mine.backward.kept_to_remote_kv.total == mine.forward.received_to_remote_kv.total


def test_facts_are_the_same_on_all_ranks_and_in_any_number_of_chunks(plan: Plan) -> None:
    facts = [rank_plan(plan, rank, num_chunks).facts for rank in range(NUM_RANKS) for num_chunks in (1, 4)]

    assert all(each == facts[0] for each in facts)
    assert facts[0].work == tuple(plan.work.tolist())
    assert facts[0].key_rows_sent == tuple(key_transfers(plan).rows_between(NUM_RANKS).sum(axis=1).tolist())


def test_work_before_is_that_at_home_unless_given(plan: Plan) -> None:
    groups = plan.tasks.head_groups
    assert rank_plan(plan, 0).facts.work_before == tuple((plan.layout.rank_work * groups).tolist())
    assert rank_plan(plan, 0, work_before=np.array([1, 2, 3])).facts.work_before == (groups, 2 * groups, 3 * groups)
