"""Prefixes that given batches share: how ranks find them, and which passes share them."""

import logging
import tracemalloc
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from distca_hf.batches.agreement import Returning
from distca_hf.batches.document_gather import DocumentGather, begin_alike, to_share
from distca_hf.batches.given import LEARNT, GivenPlanner
from distca_hf.batches.read_documents import ENTRY, Batch, DocumentReader, Reading, take_reading
from distca_hf.config import DistCAConfig
from distca_hf.errors import PeerLostError
from distca_hf.kernels.interface import CallTensors
from distca_hf.prefixes import BLOCK_TOKENS, SharedPrefixes, num_hashes
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.testing import LoopbackTransport, run_ranks
from support.log_lines import KeptLines


LEAST = 100
READER = DocumentReader(packs_rows=True, shared_tokens=LEAST)
CONFIG = DistCAConfig(shared_prefix_tokens=LEAST)
CPU = torch.device("cpu")


def words(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 1000, (tokens,), generator=torch.Generator().manual_seed(seed))


PROMPT = words(300, 0)


def padded(*documents: torch.Tensor, side: str = "right", **columns: Any) -> Batch:
    longest = max(map(len, documents))
    ids, mask = torch.zeros(2, len(documents), longest, dtype=torch.int64)
    for row, document in enumerate(documents):
        at = slice(0, len(document)) if side == "right" else slice(longest - len(document), None)
        ids[row, at], mask[row, at] = document, 1
    return {"input_ids": ids, "attention_mask": mask} | columns


def answered(*lengths: int, seed: int = 1) -> list[torch.Tensor]:
    return [torch.cat([PROMPT, words(length, seed + at)]) for at, length in enumerate(lengths)]


def count_gathers(transport: LoopbackTransport) -> list[str]:
    """The places of gathers of documents."""
    places, gather = list[str](), transport.gather

    def noted(values: Sequence[int], where: str, *scope: Any) -> Any:
        places.extend([where] if "document" in where else [])
        return gather(values, where, *scope)

    transport.gather = noted  # type: ignore[method-assign]
    return places


@pytest.mark.parametrize(
    ("batch", "alike"),
    [
        (padded(*answered(5, 9)), True),
        (padded(*answered(5, 9), side="left"), True),
        (padded(*answered(5, 9), position_ids=torch.arange(309)[None]), True),
        # Positions of one row count its padding.
        (padded(*answered(5, 9), side="left", position_ids=torch.arange(309)[None]), False),
        (padded(*answered(5, 5), pixel_values=torch.ones(1, 2)), False),
        (padded(PROMPT[:LEAST], PROMPT[: LEAST + 5]), False),  # no token of its own would be left
        (padded(words(300, 1), words(300, 2)), False),
        (padded(torch.cat([words(1, 1), PROMPT]), torch.cat([words(1, 2), PROMPT])), False),
    ],
)
def test_documents_begin_alike_if_tokens_and_positions_are_equal(batch: Batch, alike: bool) -> None:
    assert begin_alike(to_share(READER.read(batch), True, False, LEAST), LEAST) == alike


def test_ranks_gather_all_hashes_only_if_documents_begin_alike() -> None:
    alike, apart = [padded(*answered(5)), padded(*answered(80))], [padded(words(150, rank)) for rank in range(2)]

    def run(transport: LoopbackTransport) -> list[int]:
        places = count_gathers(transport)
        for batches in (apart, alike):
            read = READER.read(batches[transport.rank])
            [batch] = DocumentGather(transport, 1, partial(list, [read]), 1, LEAST, f"documents {len(places)}").wait()
            assert (batch.hashes == []) == (batches is apart)
        return [len(places)]

    assert run_ranks(2, run) == [[3], [3]]


def attend(plan: LivePlan | None) -> None:
    """Begins a pass and its first call of attention, in which ranks show each other what follows."""
    assert plan is not None
    plan.begin_forward_pass(1, {})
    plan.forward_pass.agree_to_attend(plan.fingerprint, CallTensors((torch.float32,) * 3, ((4, 8),) * 3))


@pytest.mark.parametrize(
    ("returning", "unlearnt", "unshared", "shared", "says"),
    [
        (Returning.STATES, 0, "", 292, ""),
        (Returning.STATES, 0, "rows are random", 0, "rows are random"),
        # The last token of a prompt predicts a label.
        *((returning, 300, "", 292, "") for returning in (Returning.TOKEN_VALUES, Returning.LOSS)),
        *((returning, 228, "", 228, "") for returning in (Returning.TOKEN_VALUES, Returning.LOSS)),
        *((returning, 227, "", 212, "") for returning in (Returning.TOKEN_VALUES, Returning.LOSS)),
        (Returning.LOSS, 50, "", 0, LEARNT),
    ],
)
def test_tokens_that_predict_labels_are_shared_only_if_hidden_states_return(
    returning: Returning, unlearnt: int, unshared: str, shared: int, says: str
) -> None:
    batches = [padded(*answered(5, 70)), padded(words(40, 8))]
    for batch in batches:
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        batch["labels"][:, : 1 + unlearnt] = -100

    def run(transport: LoopbackTransport) -> int:
        planner = GivenPlanner(CONFIG, transport, read=READER.read, places_rows=True)
        for _ in range(2):
            plan = planner.plan(batches[transport.rank], returning=returning, unshared=lambda: unshared)
            assert plan is not None
            assert sum(plan.facts.tokens) == 675 + 40 - plan.facts.shared_tokens
        assert planner.returning == returning
        return plan.facts.shared_tokens

    logging.getLogger("distca_hf").addHandler(kept := KeptLines())
    try:
        results = run_ranks(2, run)
    finally:
        logging.getLogger("distca_hf").removeHandler(kept)

    assert results == [shared, shared]
    said = [line for line in kept.lines if "begin alike" in line]
    assert len(said) == bool(says)
    assert all(says in line for line in said)


def test_one_rank_may_keep_its_documents_apart() -> None:
    batches = [padded(*answered(5, 70)), padded(*answered(6, 8, seed=20))]

    def run(transport: LoopbackTransport) -> int:
        planner = GivenPlanner(CONFIG, transport, read=READER.read, places_rows=True)
        plan = planner.plan(batches[transport.rank], unshared=lambda: "rows are random" * transport.rank)
        assert plan is not None
        return plan.facts.shared_tokens

    assert run_ranks(2, run) == [292, 292]  # of two documents of four


@pytest.mark.parametrize("then", ["as planned", "random on a rank", "of placed loss"])
def test_plans_made_ahead_share_prefixes_unless_their_pass_must_not(then: str) -> None:
    batches = [[padded(*answered(5, 70)), padded(words(40, 8))], [padded(*answered(9, 30)), padded(*answered(50))]]

    def run(transport: LoopbackTransport) -> tuple[list[int], int]:
        planner, places = GivenPlanner(CONFIG, transport, read=READER.read, places_rows=True), count_gathers(transport)
        mine = [dict(of_step[transport.rank]) for of_step in batches]
        for batch in mine:
            batch[ENTRY] = Reading(READER, batch)
        readings = [reading for batch in mine if (reading := take_reading(batch)) is not None]
        by_tokens = {batch["input_ids"].data_ptr(): one.documents for batch, one in zip(mine, readings, strict=True)}
        planner._read_batch = lambda batch: by_tokens[batch["input_ids"].data_ptr()]  # type: ignore[assignment,return-value]
        planner.begin_step(readings[1:], 2, CPU)
        first = planner.plan(mine[0])
        attend(first)
        planner.end_pass()
        before = len(places)
        unshared = "rows are random" if then == "random on a rank" and transport.rank else ""
        returning = Returning.LOSS if then == "of placed loss" else Returning.STATES
        second = planner.plan(mine[1], returning=returning, unshared=lambda: unshared)
        assert first is not None
        assert second is not None
        return [first.facts.shared_tokens, second.facts.shared_tokens], len(places) - before

    expected = {
        "as planned": ([292, 2 * 292], 0),
        "random on a rank": ([292, 292], 2),
        "of placed loss": ([292, 0], 1),
    }
    assert run_ranks(2, run) == 2 * [expected[then]]


@pytest.mark.parametrize("fails", ["in its pass", "batches that follow", "planned ahead"])
def test_the_other_rank_hears_of_a_failure_after_an_agreement(fails: str) -> None:
    """Ranks exchange rows until they wait for documents, so none may leave before."""
    batches = [padded(*answered(5, 70)), padded(*answered(9, 30))]

    def fail(*may_move: bool) -> str:
        raise ValueError("no room")

    def run(transport: LoopbackTransport) -> str:
        planner, breaks = GivenPlanner(CONFIG, transport, read=READER.read, places_rows=True), transport.rank == 1
        mine = [dict(batches[transport.rank]) for _ in range(2)]
        for batch in mine:
            batch[ENTRY] = Reading(READER, batch)
        readings = [reading for batch in mine if (reading := take_reading(batch)) is not None]
        planner._read_batch = lambda batch: readings[batch is mine[1]].documents  # type: ignore[assignment,return-value]
        planner.begin_step(readings[1:], 2, CPU)
        meanwhile = fail if breaks and fails == "in its pass" else str
        plan = planner.plan(mine[0], meanwhile=meanwhile)
        if fails == "batches that follow" and breaks:
            planner._step.unshared = fail
        try:
            attend(plan)
        except (ValueError, PeerLostError) as error:
            assert fails == "in its pass"
            return str(error)
        try:
            planner.end_pass()
            attend(planner.plan(mine[1], meanwhile=fail if breaks else str))
        except (ValueError, PeerLostError) as error:
            return str(error)
        return "no error"

    other, failed = run_ranks(2, run)
    assert failed == "no room"
    assert "rank 1 could not do its part; see the error there" in other


def test_short_documents_take_no_memory_for_hashes_of_long_ones() -> None:
    lengths = np.array([200_000, *[8] * 3000, 300, 400_000, 100_000])
    hashes = [np.arange(1, count + 1) for count in num_hashes(lengths, 256)]
    tracemalloc.start()
    found = SharedPrefixes.find(lengths, hashes, 256)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 3 * 2**20
    assert found is not None
    assert sorted(found.order.tolist()) == list(range(len(lengths)))
    of_200k, of_100k = (256 + BLOCK_TOKENS * ((tokens - 1 - 256) // BLOCK_TOKENS) for tokens in (200_000, 100_000))
    assert found.first_own.tolist() == [of_100k, *[0] * 3001, of_200k, 256 + 2 * BLOCK_TOKENS]
