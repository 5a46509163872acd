"""Moving tasks: figures on the study's mixes, nodes, speeds, limits of bytes, and bad input."""

import numpy as np
import pytest

from distca_hf.cost import TokenBytes
from distca_hf.errors import ConfigError, PlanError
from distca_hf.layout import Layout, Topology
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.pieces import ALL_HEADS
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.rebalance.greedy import WorkGaps
from distca_hf.planning.transfers import bytes_between
from lib.planning.mixes import batch
from lib.planning.published_greedy import plan_published_greedy


TOKENS_PER_RANK = 262_144


def study_layout(mix: str, num_ranks: int, seed: int) -> Layout:
    """Documents of a benchmark's mix, or one giant among dust, filled in order: cut where ranks end."""
    if mix == "giant":
        return fill_in_order([TOKENS_PER_RANK] + [1024] * ((num_ranks - 1) * TOKENS_PER_RANK // 1024), num_ranks)
    return fill_in_order(batch(f"{mix}_256k", num_ranks, TOKENS_PER_RANK, TOKENS_PER_RANK, seed), num_ranks)


def largest_bytes(plan: Plan) -> int:
    between = bytes_between(plan, TokenBytes())
    return int(max(between.sum(axis=0).max(), between.sum(axis=1).max()))


@pytest.mark.parametrize("mix", ["pretrain", "prolong"])
@pytest.mark.parametrize(("num_ranks", "seeds", "most"), [(8, 4, 0.5), (64, 1, 0.45)])
def test_fewer_bytes_than_the_published_greedy(mix: str, num_ranks: int, seeds: int, most: float) -> None:
    ratios = []
    for seed in range(seeds):
        layout = study_layout(mix, num_ranks, seed)
        plan = plan_by_moving(layout, 8)
        greedy = plan_published_greedy(layout.document_tokens, num_ranks, TokenBytes(), 0.0)
        ratios.append(largest_bytes(plan) / largest_bytes(greedy))
        assert plan.imbalance <= 1.025

    assert np.mean(ratios) <= most


@pytest.mark.parametrize("mix", ["pretrain", "prolong", "giant"])
def test_heads_that_stay_together_are_balanced_as_well(mix: str) -> None:
    plan = plan_by_moving(study_layout(mix, 8, 0))

    assert plan.imbalance <= 1.025
    assert np.all(plan.tasks.head == ALL_HEADS)


def test_divided_heads_move_fewer_bytes() -> None:
    layout = study_layout("giant", 8, 0)

    assert largest_bytes(plan_by_moving(layout, 8)) < 0.5 * largest_bytes(plan_by_moving(layout))


def test_a_short_tail_is_computed_where_its_keys_are() -> None:
    """A document of 101K tokens, of which packing put 1K on the next rank."""
    plan = plan_by_moving(fill_in_order([101_000, 99_000], 2), 8)
    of_tail = plan.tasks.rank[(plan.tasks.document == 0) & (plan.tasks.stop == 101_000)]

    assert set(of_tail.tolist()) == {0}
    assert largest_bytes(plan) < 0.2 * largest_bytes(plan_in_place(plan.layout))


def test_nodes_level_among_themselves_first() -> None:
    """Two nodes, each with one long document: nothing has to travel between them."""
    layout = Layout.from_packs([[60_000], [10], [10], [60_000], [10], [10]])
    topology = Topology(6, 3)
    between = bytes_between(plan_by_moving(layout, 8, topology=topology), TokenBytes())

    assert between[:3, 3:].sum() == between[3:, :3].sum() == 0


def test_a_node_gives_what_it_has_too_much() -> None:
    gaps = WorkGaps.of([10, 2, 1, 1], [4.0, 4.0, 4.0, 4.0])
    across = gaps.between_nodes(Topology(4, 2))

    assert across == WorkGaps({0: 4.0}, {2: 3.0, 3: 3.0})
    # The ranks with the largest gaps come first.
    assert WorkGaps.of([10, 2, 4, 3, 1, 6], [4.0] * 6).between_nodes(Topology(6, 3)) == WorkGaps({0: 4.0}, {4: 2.0})


def test_dedicated_servers_compute_everything() -> None:
    layout = Layout.from_packs([[9000, 50, 1], [200] * 40, [], []])
    plan = plan_by_moving(layout, 8, speeds=[0, 0, 1, 3])
    plan.validate()

    assert plan.work[:2].sum() == 0
    assert plan.work[3] / plan.work[2] == pytest.approx(3, rel=0.1)


def test_a_limit_of_bytes_is_kept_at_the_price_of_balance() -> None:
    layout = study_layout("prolong", 8, 1)
    free = plan_by_moving(layout, 8)
    limit = largest_bytes(free) * 2 // 3
    tight = plan_by_moving(layout, 8, bytes_limit=limit)

    assert largest_bytes(tight) <= limit
    assert free.imbalance < tight.imbalance < plan_in_place(layout).imbalance
    assert plan_by_moving(layout, 8, bytes_limit=largest_bytes(free)).fingerprint == free.fingerprint


def test_a_limit_that_no_plan_meets_says_what_would_do() -> None:
    layout = fill_in_order([100_000], 2)
    with pytest.raises(PlanError, match=r"rank 0 has to send .* bytes_limit=1000;") as error:
        plan_by_moving(layout, 8, bytes_limit=1000)
    smallest = int(str(error.value).split("Set bytes_limit to at least ")[1].split(",")[0])

    assert largest_bytes(plan_by_moving(layout, 8, bytes_limit=smallest)) <= smallest


def test_a_limit_names_bytes_that_a_rank_of_capacity_0_has_to_send() -> None:
    """Its tokens cannot be computed where they are, which would send nothing."""
    layout = Layout.from_packs([[1000], [1000, 1000]])
    with pytest.raises(PlanError, match=r"rank 0 has to send [1-9]\d* bytes per layer, .* bytes_limit=100;") as error:
        plan_by_moving(layout, 8, speeds=[0, 1], bytes_limit=100)
    smallest = int(str(error.value).split("Set bytes_limit to at least ")[1].split(",")[0])

    assert plan_by_moving(layout, 8, speeds=[0, 1], bytes_limit=smallest).work[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speeds": [1]}, "1 numbers for 2 ranks"),
        ({"speeds": [1, -1]}, "rank 1 is -1.0"),
        ({"speeds": [1, float("nan")]}, "rank 1 is nan"),
        ({"speeds": [0, 0]}, "of all 2 ranks are 0"),
        ({"speeds": [1e308, 1e308]}, "of 2 ranks add up to inf"),
        ({"topology": Topology(4, 2)}, "4 ranks, the layout 2"),
        ({"head_groups": 0}, "head_groups=0"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_by_moving(Layout.from_packs([[10], [20]]), **arguments)
