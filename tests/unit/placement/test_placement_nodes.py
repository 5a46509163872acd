"""Placement over nodes: what crosses them, what is striped, and that all of it stays within its figures."""

import gzip
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from distca_hf.cost import TokenBytes, imbalance
from distca_hf.errors import PackingError
from distca_hf.layout import Stripe, Topology
from distca_hf.placement.place import place
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.transfers import bytes_between


K = 1024
FOLDER = Path(__file__).parents[3] / "examples" / "lengths"


@cache
def lengths_of(name: str) -> np.ndarray:
    return np.array(json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes())), dtype=np.int64)


def batch(name: str, tokens: int, longest: int, seed: int) -> list[int]:
    """Documents of a file in random order, those from 10K on doubled, longer ones than `longest` cut."""
    lengths = lengths_of(name).copy()
    lengths[lengths >= 10 * K] *= 2
    batch: list[int] = []
    for drawn in np.random.RandomState(seed).permutation(lengths).tolist():
        left = min(drawn, tokens)
        tokens -= left
        batch += [longest] * (left // longest) + [left % longest] * (left % longest > 0)
        if tokens == 0:
            return batch
    raise AssertionError("the file is too short")


@pytest.mark.parametrize(("num_ranks", "tokens_per_rank"), [(64, 32 * K), (64, 128 * K), (512, 32 * K)])
def test_hardly_a_byte_crosses_nodes_when_documents_fit_ranks(num_ranks: int, tokens_per_rank: int) -> None:
    topology = Topology(num_ranks, 8)
    lengths = batch("pretrain", num_ranks * tokens_per_rank, tokens_per_rank, seed=1)
    plan = plan_in_place(place(lengths, num_ranks, topology=topology, head_groups=8), 8)

    sent = bytes_between(plan, TokenBytes())
    between_nodes = sent * (topology.node_of[:, None] != topology.node_of)
    assert max(between_nodes.sum(axis=0).max(), between_nodes.sum(axis=1).max()) <= 50_000_000
    assert imbalance(plan.work) <= 1.01
    assert np.ptp(plan.layout.rank_tokens) <= 1


@pytest.mark.parametrize("num_ranks", [8, 20, 64])
def test_a_document_over_several_nodes_is_balanced_in_work_counted_from_its_tasks(num_ranks: int) -> None:
    lengths = [num_ranks * 16 * K, *batch("prolong", num_ranks * 16 * K, 32 * K, seed=2)]
    plan = plan_in_place(place(lengths, num_ranks, topology=Topology(num_ranks, 8), head_groups=8), 8)

    assert len(plan.layout.stripes) >= 1
    assert imbalance(plan.work) <= (1.005 if num_ranks == 8 else 1.01)
    assert np.ptp(plan.layout.rank_tokens) <= 1


def test_a_document_of_all_ranks_is_one_stripe_on_one_node() -> None:
    layout = place([8 * 4096 + 3], 8, head_groups=8)

    assert layout.stripes == (Stripe(0, 0, 8 * 4096 + 3, 0, 8),)
    assert layout.segment_rank.tolist() == list(range(8))
    assert sorted(layout.segment_tokens.tolist()) == [4096] * 5 + [4097] * 3


@pytest.mark.parametrize(("head_groups", "striped"), [(1, False), (2, False), (4, True), (8, True), (32, True)])
def test_stripes_need_heads_to_divide(head_groups: int, striped: bool) -> None:
    """A document of 7.9 rank loads: worth 5 if every rank gets heads of its own, 6 with two ranks to a group, 8 with
    four."""
    lengths = [30_000] + [100] * 500

    assert bool(place(lengths, 8, head_groups=head_groups).stripes) == striped


@pytest.mark.parametrize(("documents", "striped"), [(1, True), (2, False)])
def test_stripes_are_for_documents_of_five_rank_loads(documents: int, striped: bool) -> None:
    lengths = [30_000] * documents + [100] * 500

    assert bool(place(lengths, 8, head_groups=8).stripes) == striped


def test_a_document_that_goes_on_to_another_node_is_striped_on_both() -> None:
    layout = place([40_000, 40_000, 40_000], 16, topology=Topology(16, 8), head_groups=8)

    crossing = {stripe.document for stripe in layout.stripes if stripe.stop < 40_000}
    assert len(crossing) == 1
    stripes = [stripe for stripe in layout.stripes if stripe.document in crossing]
    assert {stripe.first_rank for stripe in stripes} == {0, 8}
    assert sum(stripe.stop - stripe.start for stripe in stripes) >= 40_000 - 4096


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"num_ranks": 0}, ["on 0 ranks"]),
        ({"num_ranks": 4, "topology": Topology(8, 4)}, ["topology has 8 ranks", "on 4"]),
        ({"num_ranks": 2, "rank_shares": [1.0]}, ["1 rank_shares for 2 ranks"]),
        ({"num_ranks": 2, "rank_shares": [1.0, 0.0]}, ["rank 1", "0.0"]),
        ({"num_ranks": 2, "rank_shares": [1.0, float("nan")]}, ["rank 1", "nan"]),
    ],
    ids=str,
)
def test_numbers_that_disagree_are_refused(arguments: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(PackingError) as refused:
        place([10, 10], **arguments)  # type: ignore[arg-type]

    for part in parts:
        assert part in str(refused.value)
