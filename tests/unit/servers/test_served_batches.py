"""Batches beside attention servers: their plans have more ranks than hold tokens."""

import logging
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from distca_hf.batches.given import EXTRA_RANKS, GivenPlanner
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.prepare import Cursor, Prepared
from distca_hf.batches.read_documents import DocumentReader
from distca_hf.config import CHUNKS_BETWEEN_NODES, DistCAConfig
from distca_hf.cost import imbalance
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import rank_plan
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.posted import PostingTransport
from distca_hf.servers.posted_plans import MeasuredCalls
from distca_hf.servers.served_plans import Servers
from distca_hf.testing import LoopbackTransport, run_ranks
from support.data import random_dataset
from support.layouts import packed_layout
from support.log_lines import KeptLines


SERVERS = Servers((1.0, 0.5))
LENGTHS = np.array([700, *[20] * 40])
CONFIG = DistCAConfig(tokens_per_rank=1024, pad_to_multiple_of=64)


# --- placed batches


def test_placed_batches_are_planned_with_servers_and_padded() -> None:
    plan = PlacedPlanner(CONFIG, 2, 4, SERVERS).plan(LENGTHS)
    plan.validate()

    assert plan.layout.rank_rows.tolist() == [768, 768, 0, 0]
    assert plan.speeds == (1.0, 1.0, 1.0, 0.5)
    assert (plan.work > 0).all()
    assert plan.imbalance < 1.1


@pytest.mark.parametrize(("nodes", "num_chunks"), [((), 1), ((0, 1), CHUNKS_BETWEEN_NODES)])
def test_servers_on_another_node_are_reached_in_chunks(nodes: tuple[int, ...], num_chunks: int) -> None:
    config = DistCAConfig(tokens_per_rank=64, ranks_per_node=2)

    assert PlacedPlanner(config, 2, 1, Servers((1.0, 1.0), nodes=nodes)).num_chunks == num_chunks
    assert PlacedPlanner(config, 2).num_chunks == 1


def prepared(transport: LoopbackTransport, servers: Servers | None) -> tuple[Prepared, list[int]]:
    """The first micro-batch of a rank, and the lengths of its documents."""
    config = DistCAConfig(tokens_per_rank=256, pad_to_multiple_of=1)
    loader = PlacedLoader(
        random_dataset(40), PlacedPlanner(config, transport.world_size), transport, torch.device("cpu")
    )
    preparer = replace(loader.preparer, planner=replace(loader.preparer.planner, extra_ranks=servers))
    epoch = loader._packed(Cursor())
    lengths = loader._source.document_tokens[epoch.micro_batch(0)]
    return preparer.prepare(epoch, Cursor()), lengths.tolist()


def test_a_prepared_batch_holds_the_plan_for_servers() -> None:
    batches = run_ranks(2, lambda transport: prepared(transport, SERVERS))
    plan = batches[0][0].plan
    lengths = batches[0][1]

    assert isinstance(plan, Plan)
    assert plan.layout.num_ranks == 4
    for rank, (batch, _) in enumerate(batches):
        assert batch.plan is not None
        assert batch.fingerprint == batch.plan.fingerprint == plan.fingerprint
        assert batch.columns["input_ids"].shape == (1, plan.layout.rank_rows[rank])
        assert batch.facts == batches[0][0].facts
        (routing,) = batch.kinds.plans.values()
        forward = routing.forward.to(torch.device("cpu"))
        assert (forward.num_rows // forward.rows_per_token, forward.exchanges) == (plan.layout.rank_rows[rank], True)
    facts = batches[0][0].facts
    assert facts.imbalance == plan.imbalance
    assert facts.imbalance_before == pytest.approx(imbalance(fill_in_order(lengths, 2).rank_work))


# --- packs of others


class Posting(PostingTransport):
    """Reaches servers, and notes the plans that are posted to them."""

    def __init__(self, transport: LoopbackTransport, posted: list[Plan | None]) -> None:
        self.among_trainers, self.extra_ranks, self.membership = transport, SERVERS, 1
        self._posted = posted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.among_trainers, name)

    def post(self, plan: Plan | None, micro_batch: int, num_chunks: int) -> MeasuredCalls:
        self._posted.append(plan)
        return MeasuredCalls(self.among_trainers.rank, None)


def packs_of(
    transport: LoopbackTransport, trains: bool, posted: list[Plan | None] | None = None
) -> tuple[LivePlan, GivenPlanner]:
    layout = packed_layout(random.Random(5), transport.world_size, 300)
    held = [stop - start for _, start, stop in layout.held_by(transport.rank)]
    positions = torch.cat([torch.arange(tokens) for tokens in held])[None]
    planner = GivenPlanner(CONFIG, transport if posted is None else Posting(transport, posted), 4)
    live = planner.plan({"input_ids": torch.zeros_like(positions), "position_ids": positions}, trains)
    assert live is not None
    assert live.facts  # planned now, in which all ranks take part
    return live, planner


def test_packs_that_are_trained_on_are_planned_with_extra_ranks() -> None:
    ordered: list[Plan | None] = []
    layout = packed_layout(random.Random(5), 3, 300)
    expected = SERVERS.plan(layout, 4, topology=CONFIG.topology(3))

    for rank, (live, planner) in enumerate(run_ranks(3, lambda transport: packs_of(transport, True, ordered))):
        assert live.fingerprint == expected.fingerprint
        facts = rank_plan(expected, rank, work_before=layout.rank_work).facts
        assert live.facts == facts.with_tokens(layout, layout)
        assert live.facts.imbalance_before == plan_in_place(layout).imbalance
        assert planner.totals.pairs == layout.rank_work.sum()
    assert [plan.fingerprint for plan in ordered if plan is not None] == 3 * [expected.fingerprint]


def test_packs_of_evaluation_use_no_server() -> None:
    ordered: list[Plan | None] = []
    without = run_ranks(3, lambda transport: packs_of(transport, True))
    evaluated = run_ranks(3, lambda transport: packs_of(transport, False, ordered))

    for (live, _), (same, _) in zip(evaluated, without, strict=True):
        assert (live.fingerprint, live.facts) == (same.fingerprint, same.facts)
        assert len(live.facts.work) == 3
    assert ordered == []


def test_documents_that_begin_alike_are_not_shared_with_servers_and_the_log_says_so() -> None:
    ids = torch.arange(80).expand(2, -1)
    reader = DocumentReader(packs_rows=True, shared_tokens=20)

    def run(transport: LoopbackTransport) -> int:
        config = DistCAConfig(shared_prefix_tokens=20)
        planner = GivenPlanner(config, Posting(transport, []), 4, read=reader.read, places_rows=True)
        for _ in range(2):
            live = planner.plan({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            assert live is not None
            assert live.facts.shared_tokens == 0
        return sum(live.facts.tokens)

    logging.getLogger("distca_hf").addHandler(kept := KeptLines())
    try:
        assert run_ranks(2, run) == [320, 320]
    finally:
        logging.getLogger("distca_hf").removeHandler(kept)
    said = [line for line in kept.lines if "begin alike" in line]
    assert len(said) == 2  # once on each rank
    assert all(line.endswith(EXTRA_RANKS) for line in said)
