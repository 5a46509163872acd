"""The lines about a training: what they say is what is trained."""

import logging
from dataclasses import replace

import numpy as np
import pytest

import distca_hf
from distca_hf.batches import preview
from distca_hf.batches.meter import duration
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.preview import PLACED, PlacedData, Preview, count, second_line
from distca_hf.config import DistCAConfig
from distca_hf.cost import imbalance
from distca_hf.data.epochs import EpochPacker
from distca_hf.flops import StepCost, StepFlops
from distca_hf.layout import Layout
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.kinds import PlanTotals
from distca_hf.planning.plan import PlanFacts
from support.data import random_dataset, random_documents
from support.models import tiny_model
from support.readings import READING


# Of the micro-batches of `TWO`, matrices take 6 x 200 = 1,200, attention 0.7 x 4,000 = 2,800.
COST = StepCost(token_seconds=6.0, pair_seconds=0.7)
TWO = Preview(np.array([100, 100]), np.array([1000, 3000]), np.array([1.5, 3.5]), np.array([1.0, 1.0]))


def test_balance_share_and_speed_up_are_those_of_the_micro_batches() -> None:
    # In the order of the data attention took 0.7 x (1,500 + 10,500) = 8,400.
    assert second_line(TWO, COST, 4, "seen") == (
        "attention work of the busiest rank 2.50 -> 1.00 times the mean; attention is about 70% of a step; "
        "steps should be 2.40 times as fast as packed in order (seen)"
    )


def test_work_of_a_step_counts_tokens_and_the_head_where_batches_are_given() -> None:
    given = PlanTotals(1, imbalance_before=2.5, imbalance=1.0, token_imbalance_before=1.5, token_imbalance=1.0)
    counted = replace(given, step_imbalance_before=2.2, step_imbalance=1.1)

    # Before, matrices took 1,200 x 1.5 and attention 8,400.
    assert second_line(replace(TWO, given=counted), COST, 4, "seen") == (
        "work of the busiest rank in a step 2.20 -> 1.10 times the mean (its tokens 1.50 -> 1.00, attention 2.50 -> "
        "1.00); attention is about 70% of a step; layers should be 2.55 times as fast as without (seen)"
    )
    assert "attention work of the busiest rank 2.50 -> 1.00 times" in second_line(
        replace(TWO, given=given), None, 4, ""
    )


SERVED = replace(TWO, speeds=(1.0, 1.0, 1.0, 0.5, 0.5))


def test_servers_take_a_part_of_the_time_of_attention() -> None:
    # Three trainers, and servers that are one trainer together: attention takes 2,800 x 3 / 4.
    assert second_line(SERVED, COST, 3, "seen") == (
        "attention time of the busiest rank 2.50 -> 0.75 times the mean of the trainers; attention is about 70% of a "
        "step; steps should be 2.91 times as fast as packed in order (seen)"
    )


WAITED = replace(
    READING,
    seconds=3900.0,
    totals=PlanTotals(micro_batches=2, tokens=237_900_000, pairs=1e9, imbalance_before=4.62, imbalance=2.004),
    loader_wait_seconds=3.9,
    waited_seconds=46.8,
)


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, "1.2% for other ranks, mostly for rank 5"),
        ({"waited_seconds": 7.8}, "0.2% for other ranks"),
        ({"slowest_rank": None}, "1.2% for other ranks"),
    ],
)
def test_last_line_sums_up(changes: dict[str, float | None], end: str) -> None:
    reading = replace(WAITED, **changes)

    assert reading.in_words("trained 1,812 steps") == (
        "trained 1,812 steps: 237,900,000 tokens in 65 min, 61,000 per second; attention work of the busiest rank "
        f"2.31 -> 1.00 times the mean; waited 0.1% of the time for data, {end}"
    )


def test_numbers_are_read_easily() -> None:
    assert [count(1, "rank"), count(2, "rank"), count(1812, "micro-batch")] == [
        "1 rank",
        "2 ranks",
        "1,812 micro-batches",
    ]
    assert [duration(seconds) for seconds in (3.14, 119.9, 121.0, 7199.0, 7300.0)] == [
        "3.1 s",
        "119.9 s",
        "2 min",
        "120 min",
        "2.0 h",
    ]


# --- a look ahead


def data_of(num_documents: int, micro_steps: int, first: int = 0) -> PlacedData:
    config = DistCAConfig(tokens_per_rank=64, ranks_per_node=4, pad_to_multiple_of=1)
    lengths = np.array([len(document) for document in random_documents(num_documents)])
    planner = PlacedPlanner(config, num_ranks=4)
    packed = planner.regroup(EpochPacker(lengths, planner.capacity_tokens).epoch(0), lengths, micro_steps)
    return PlacedData(planner, lengths, packed, first, micro_steps, packed.num_micro_batches)


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("first", [0, 2])
def test_preview_of_a_short_epoch_is_what_will_be_trained(micro_steps: int, first: int) -> None:
    data = data_of(40, micro_steps, first)
    trained = range(first, data.per_epoch)
    lengths = [data.document_tokens[data.micro_batches.micro_batch(index)] for index in trained]
    before = [imbalance(fill_in_order(documents, 4).rank_work) for documents in lengths]
    after = [data.planner.plan(documents).imbalance for documents in lengths]

    assert 4 <= len(lengths) <= PLACED, "few enough for every one to be placed"
    assert data.preview.tokens.tolist() == [documents.sum() for documents in lengths]
    assert data.preview.pairs.tolist() == [sum(n * (n + 1) // 2 for n in documents.tolist()) for documents in lengths]
    np.testing.assert_allclose(data.preview.imbalance_before, before)
    np.testing.assert_allclose(data.preview.imbalance, np.mean(after))


def test_preview_of_a_long_epoch_looks_all_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    most, micro_steps = 48, 3
    monkeypatch.setattr(preview, "COUNTED", most)
    data = data_of(700, micro_steps)
    trained = range(data.per_epoch)
    lengths = [data.document_tokens[data.micro_batches.micro_batch(index)] for index in trained]
    before = np.mean([imbalance(fill_in_order(documents, 4).rank_work) for documents in lengths])

    assert len(lengths) > 2 * most
    assert most - micro_steps < len(data.preview.tokens) <= most
    assert data.preview.imbalance_before.mean() == pytest.approx(before, rel=0.03)


HOME = Layout.from_packs([[5], [2, 2]])


OF_PACKS = PlanFacts(
    num_documents=3,
    longest_document_tokens=5,
    work=(24, 24),
    work_before=(36, 12),
    key_rows_sent=(0, 0),
    rows_per_token=2,
    num_tokens=9,
).with_tokens(HOME, HOME)


def test_preview_of_packs_is_that_of_their_micro_batch() -> None:
    *values, speeds, given = vars(
        Preview.of(OF_PACKS, StepFlops.of(weights=5, trained_weights=5, pair_forward=2))
    ).values()

    assert [numbers.tolist() for numbers in values] == [[9], [24], [1.5], [1.0]]
    assert speeds == ()
    assert (given.token_imbalance_before, given.token_imbalance) == (10 / 9, 10 / 9)
    # 30 operations of a token, 6 of a pair: 150 + 108 and 120 + 36 before, 72 and 72 of attention after.
    assert given.step_imbalance_before == pytest.approx(2 * 258 / 414)
    assert given.step_imbalance == pytest.approx(2 * 222 / 414)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_speed_up_counts_what_shared_prefixes_save(num_ranks: int) -> None:
    facts = replace(OF_PACKS, work=(16, 16), shared_tokens=3)
    # Matrices of 9 and 6 tokens, unevenly divided as 10 to 9, and attention of 2 x 18 and 2 x 8 pairs.
    before, after = 6 * 9 * 10 / 9 + 0.7 * 36, 6 * 6 * 10 / 9 + 0.7 * 16
    line = second_line(Preview.of(facts), COST, num_ranks, "seen")
    assert f"layers should be {before / after:.2f} times as fast as without" in line


def test_head_counts_where_it_computes() -> None:
    """One weight of ten is the head's: it computes tokens of the batch, or those that layers computed."""
    facts = PlanFacts(2, 6, work=(10, 10), work_before=(18, 2), key_rows_sent=(0, 0), num_tokens=8)
    facts = facts.with_tokens(Layout.from_packs([[6], [2]]), Layout.from_packs([[4], [4]]))
    flops = StepFlops.of(weights=10, trained_weights=0, pair_forward=0, head_weights=1)

    before, after = facts.step_work(flops)
    assert (before.tolist(), after.tolist()) == ([240, 80], [40 * 3.6 + 24, 40 * 3.6 + 8])
    _, placed = replace(facts, head_tokens=facts.tokens).step_work(flops)
    assert placed.tolist() == [160, 160]


# --- written once, by whoever trains


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_loop_of_ones_own_writes_three_lines_and_one_for_every_epoch(caplog: pytest.LogCaptureFixture) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=512)
    model = distca_hf.enable(tiny_model(num_hidden_layers=1).train(), plugin)
    loader = plugin.dataloader(random_dataset(40), model=model)
    for _ in range(2):
        for batch in loader:
            model(**batch)

    of_model, of_data, of_balance, *of_epochs = lines_of(caplog)
    assert of_model.startswith("LlamaForCausalLM works. ")
    assert of_data == (
        f"{distca_hf.__version__}: 1 rank x 512 tokens on 1 node, kernel cpu; 40 documents, {loader.num_tokens:,} "
        f"tokens, longest 150 of 512 possible; {len(loader)} micro-batches per epoch"
    )
    assert of_balance.startswith("one rank: there is nothing to balance; attention is about ")
    assert [line.split(" in ")[0] for line in of_epochs] == [
        f"epoch {epoch}: {loader.num_tokens:,} tokens" for epoch in range(2)
    ]


def test_epoch_ends_with_its_line_where_the_plan_was_taken_out_of_batches(caplog: pytest.LogCaptureFixture) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=512)
    model = distca_hf.enable(tiny_model(num_hidden_layers=1).train(), plugin)
    for batch in plugin.dataloader(random_dataset(40), model=model):
        model(distca_plan=batch.pop("distca_plan"), **batch)

    assert lines_of(caplog)[-1].startswith("epoch 0: ")


def test_nobody_looks_ahead_where_lines_are_not_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "distca_hf")
    monkeypatch.setattr(PlacedData, "preview", property(lambda data: pytest.fail("looked ahead")))
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=512)
    model = distca_hf.enable(tiny_model(num_hidden_layers=1).train(), plugin)
    for batch in plugin.dataloader(random_dataset(40), model=model):
        model(**batch)
