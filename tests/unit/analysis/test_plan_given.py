"""`distca plan --batch-size`: its numbers are those of training and simulation, and even batches stay."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from distca_hf.analysis import given
from distca_hf.analysis.given import GivenAnswer, GivenMicroBatch, answer
from distca_hf.analysis.groups import Groups
from distca_hf.analysis.models import SimulatedModel, preset
from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.simulate.costs import Costs, Passes
from distca_hf.analysis.simulate.load import Load, nothing_sent, rows_placed
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.result import Result, WayFigures, simulate
from distca_hf.analysis.simulate.simulation import Simulation
from distca_hf.analysis.simulate.wires import Cluster, WireBytes
from distca_hf.batches.agreement import Returning
from distca_hf.batches.given import GivenPlanner
from distca_hf.batches.read_documents import DocumentReader
from distca_hf.cli import app
from distca_hf.config import DistCAConfig
from distca_hf.cost import Mask
from distca_hf.errors import PackingError
from distca_hf.layout import Layout
from distca_hf.planning.kinds import PlanTotals
from distca_hf.planning.plan import PlanFacts
from distca_hf.planning.row_moves import RowMoves, results_between
from distca_hf.prefixes import SharedPrefixes
from distca_hf.testing import LoopbackTransport, run_ranks
from support.thorough import is_thorough


LLAMA = SimulatedModel.of(preset("llama3-8b"))
WINDOWS = replace(LLAMA, window_layers=((Mask(64), 24),))
HYBRID = replace(LLAMA, mixer_layers=24)
WHOLE = replace(HYBRID, whole_documents=True)
RANKS = 4
LENGTHS = np.random.default_rng(5).lognormal(4.5, 1.2, 200).astype(np.int64).clip(1, 4000)


PLAIN = WayFigures("plain", "plain", False, False, 2.0, 1.0, None, 2**30, True, 1.0, 1.0, True, 1, 0.3, 0, 4000)
WAYS = [PLAIN, replace(PLAIN, key="given", is_ours=True, times_as_fast=2.0)]


def request_of(model: SimulatedModel = LLAMA, batch_size: int = 3, **options: object) -> SimulationRequest:
    return SimulationRequest(model, RANKS, 1, 2048, ranks_per_node=2, batch_size=batch_size, seed=7, **options)  # type: ignore[arg-type]


def trained(request: SimulationRequest, tokens: np.ndarray, groups: Groups | None = None) -> list[PlanFacts]:
    """What a training has of one micro-batch: where hidden states return, and where the loss is placed."""
    model = request.model
    documents = [torch.full((length,), 1000 + number) for number, length in enumerate(tokens.tolist())]
    labels = [document.clone() for document in documents]
    for row, path in enumerate([] if groups is None else groups.paths):
        for depth, prefix in reversed(list(enumerate(groups.prefix_tokens[row], start=1))):
            first = [other[:depth] for other in groups.paths].index(path[:depth])
            documents[row][:prefix], labels[row][:prefix] = len(documents) * depth + first, -100

    def run(transport: LoopbackTransport) -> list[PlanFacts]:
        mine = slice(transport.rank * len(tokens) // RANKS, (transport.rank + 1) * len(tokens) // RANKS)
        positions = torch.cat([torch.arange(len(document)) for document in documents[mine]])[None]
        of_model = model.heads.groups, model.heads.token_bytes(), model.masks
        config = DistCAConfig(ranks_per_node=request.ranks_per_node, shared_prefix_tokens=request.least_tokens)
        read = DocumentReader(packs_rows=True, shared_tokens=request.least_tokens).read
        of_rows = not model.whole_documents, model.flops
        planner, facts = GivenPlanner(config, transport, *of_model, read, *of_rows), list[PlanFacts]()
        batch = {"input_ids": torch.cat(documents[mine])[None], "labels": torch.cat(labels[mine])[None]}
        batch["position_ids"] = positions
        for returning in (Returning.STATES, Returning.LOSS):
            live = planner.plan(batch, returning=returning)
            assert live is not None
            facts.append(live.facts)
        sums = PlanTotals().plus(facts[0], model.flops).plus(facts[1], model.flops)
        assert planner.totals == sums
        return facts

    return run_ranks(RANKS, run)[0]


@pytest.mark.parametrize("model", [LLAMA, WINDOWS, HYBRID, WHOLE], ids=["full", "windows", "hybrid", "whole"])
def test_numbers_are_those_that_training_logs(model: SimulatedModel) -> None:
    request = request_of(model, accumulation=2, batches=1)
    planner = request.given_plans(places_rows=not model.whole_documents)
    batches = request.steps(LENGTHS)[0]
    ours = [GivenMicroBatch.of(request, planner, batch) for batch in batches]
    returned, placed = (list(facts) for facts in zip(*(trained(request, batch) for batch in batches), strict=True))
    found = GivenAnswer(
        request, "here", LENGTHS, ours, Result(4, 2, None, 3, 2048, 1.0, 1, 1, WAYS, []), find_profile("h200")
    )

    assert [one.facts for one in ours] == returned
    for loss_is_placed, facts in ((False, returned), (True, placed)):
        logged = PlanTotals().plus(facts[0], model.flops).plus(facts[1], model.flops)
        assert found.totals(loss_is_placed) == logged
    said = found.as_json()
    assert said["step_imbalance"] == found.totals(False).step_imbalance / 2
    assert said["step_imbalance_before"] > said["step_imbalance"] >= 1.0  # type: ignore[operator]
    assert found.places_rows is not model.whole_documents
    if model.whole_documents:
        assert said["step_imbalance_placed_loss"] is said["even_micro_batches"] is None
        assert said["token_imbalance"] == said["token_imbalance_before"]
    else:
        assert said["step_imbalance_placed_loss"] == pytest.approx(1.0, abs=0.03)
        assert said["token_imbalance"] == pytest.approx(1.0, abs=0.01)


def groups_of(rng: np.random.Generator, number: int, prompt: int = 1088) -> tuple[np.ndarray, Groups]:
    """Groups of four answers to prompts of about this many tokens, and as many other rows."""
    prompts = prompt + 64 * np.repeat(np.arange(number), 4)
    lengths = np.append(prompts + rng.integers(10, 900, 4 * number), rng.integers(10, 2000, number))
    paths = [(f"prompt {row // 4}",) if row < 4 * number else () for row in range(5 * number)]
    return lengths, Groups(paths, [*((prompt,) for prompt in prompts.tolist()), *[()] * number])


def trees_of(rng: np.random.Generator, number: int, prompt: int = 1088) -> tuple[np.ndarray, Groups]:
    """Trees of four rows, and as many other rows. Three rows of a tree have 640 more tokens in common than all four,
    and two of these another 640."""
    paths: list[tuple[str, ...]] = []
    prefixes: list[tuple[int, ...]] = []
    for row in range(4 * number):
        depth = min(row % 4, 2) + 1
        paths.append((f"prompt {row // 4}", "branch", "twig")[:depth])
        prefixes.append(tuple(prompt + 64 * (row // 4) + 640 * nested for nested in range(depth)))
    lengths = np.append(
        [prefix[-1] for prefix in prefixes] + rng.integers(10, 900, 4 * number), rng.integers(10, 2000, number)
    )
    return lengths, Groups([*paths, *[()] * number], [*prefixes, *[()] * number])


@pytest.mark.parametrize("model", [LLAMA, WINDOWS, HYBRID, WHOLE], ids=["full", "windows", "hybrid", "whole"])
@pytest.mark.parametrize("drawn", [groups_of, trees_of] if is_thorough() else [trees_of])
def test_shared_prefixes_are_those_of_training(
    drawn: Callable[..., tuple[np.ndarray, Groups]], model: SimulatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 256 + 64 x n tokens are shared up to their last token if hidden states return, and up to the block
    before it if the loss is placed. Which row holds a prompt depends on tokens, and with it the last permille."""
    lengths, groups = drawn(np.random.default_rng(3), 6)
    request = request_of(model, accumulation=2, batches=1)
    monkeypatch.setattr(given, "MOST_PLANNED_RANKS", 3 * RANKS * request.accumulation)
    found = answer(request, "here", lengths, find_profile("h200"), groups=groups)

    assert found.sharing is not None
    dealt = [batch for step in replace(request, batches=2).dealt_steps(lengths, groups) for batch in step]
    assert len(found.micro_batches) > len(dealt)
    for one, (tokens, of_rows) in zip(found.micro_batches, dealt, strict=False):
        for facts, expected in zip((one.facts, one.facts_placed_loss), trained(request, tokens, of_rows), strict=True):
            assert facts.shared_tokens == expected.shared_tokens
            assert facts.num_tokens - facts.shared_tokens == sum(facts.tokens) == sum(expected.tokens)
            assert facts.work_before == expected.work_before
            assert sum(facts.work) == pytest.approx(sum(expected.work), abs=RANKS)  # means over layers are whole
            assert (facts.tokens_before, sum(facts.head_tokens)) == (expected.tokens_before, sum(expected.head_tokens))
            assert facts.imbalance == pytest.approx(expected.imbalance, abs=0.02)
    shared = [one.facts.shared_tokens for one in found.micro_batches]
    of_loss = [one.facts_placed_loss.shared_tokens for one in found.micro_batches]
    said = found.as_json()["shared_prefixes"]
    assert isinstance(said, dict)
    assert said["tokens"] - said["computed_tokens"] == sum(shared)
    assert (said["groups"], said["documents"]) == (6, 24)
    if model is WHOLE:
        assert (said["unshared"], sum(shared)) == ("layers carry a state from token to token that cannot travel", 0)
        assert said["layers_flops"] == said["layers_flops_unshared"]
    else:
        assert sum(shared) > sum(of_loss) > 0
        assert said["layers_flops"] / said["layers_flops_unshared"] == pytest.approx(1 - said["saved_share"])
        assert said["attention_flops"] < said["attention_flops_unshared"]
        assert said["head_flops"] == said["head_flops_unshared"]


def test_steps_take_less_time_and_memory_where_prefixes_are_shared() -> None:
    lengths, groups = groups_of(np.random.default_rng(4), 12, 20_000)
    request, profile = replace(request_of(batches=3, batch_size=4), context_tokens=None), find_profile("h200")
    apart, _ = simulate(request, profile, lengths)
    shared, _ = simulate(request, profile, lengths, groups=groups)

    for key in ("given", "given_loss"):
        assert shared.way(key).step_seconds < 0.7 * apart.way(key).step_seconds
        assert shared.way(key).memory_bytes < apart.way(key).memory_bytes
        assert 0.4 < shared.way(key).shared_share < 0.75
        assert apart.way(key).shared_share == shared.plain.shared_share == 0
        utilisation = shared.way(key).utilisation
        assert utilisation is not None
        assert utilisation < 0.6, "only what is computed is useful work"
    # One rank shares if that saves a tenth of its tokens: of 256 + 64 tokens that are hashed 320 are equal.
    alone, pair = replace(request, gpus=1, batch_size=2), Groups([("a",)] * 2, [(330,)] * 2)
    for length, share in ((1601, 0.0), (1599, 320 / 3198)):
        saved = simulate(alone, profile, np.array([length, length]), groups=pair)[0].way("given").shared_share
        assert saved == pytest.approx(share)


def test_even_batches_stay_and_take_as_long_as_plain_ones() -> None:
    request = request_of(checkpointing="none")
    rows = np.array([1000, 1000, 1010] * RANKS)  # in each rank's batch, within two percent
    rows[-1] += 5
    micro_batch = GivenMicroBatch.of(request, request.given_plans(places_rows=True), rows)
    simulation = Simulation(request, find_profile("h200"))
    plain, *ours = (simulation.step_seconds(way, [rows])[0] for way in simulation.ways())

    assert (micro_batch.stays, micro_batch.moved_tokens) == (True, 0)
    assert ours == [pytest.approx(plain, rel=1e-12)] * 2


def test_borders_take_copies_and_exchanges() -> None:
    """Rank 0 has 8,192 tokens, and sends half of them. Ids and positions go, hidden states return, and then their
    gradients go; with a placed loss labels go, and nothing returns."""
    costs = Costs(find_profile("h200"), LLAMA, False, Notes())
    cluster = Cluster(costs.profile, 2, 2, costs.notes)
    home, even = Layout.from_packs([[4096, 4096], []]), Layout.from_packs([[4096], [4096]])
    nothing = Passes(np.zeros(2), np.zeros(2))
    load = Load(even.rank_tokens, [nothing_sent(nothing, 32)])

    def exchange(num_bytes: float) -> float:
        sent, received = np.array([num_bytes, 0.0]), np.array([0.0, num_bytes])
        return float(cluster.exchange(WireBytes(sent, received), WireBytes(0 * sent, 0 * sent)).max())

    def copies(num_bytes: float) -> float:
        """Rank 0 gathers 8,192 rows and puts 4,096; each is read and written."""
        return float(costs.copy_seconds(2 * num_bytes * (8192 + 4096)))

    returned = rows_placed(costs, cluster, home, load, even, loss_is_placed=False)
    placed = rows_placed(costs, cluster, home, load, even, loss_is_placed=True)

    hidden = 2 * 4096
    expected = exchange(16 * 4096) + 2 * exchange(hidden * 4096) + copies(16) + 2 * copies(hidden)
    assert returned.further_seconds == pytest.approx(expected)
    assert placed.further_seconds == pytest.approx(exchange(24 * 4096) + copies(24))
    assert (returned.of_head.tolist(), placed.of_head.tolist()) == ([8192, 0], [4096, 4096])
    assert rows_placed(costs, cluster, even, load, even, loss_is_placed=True).further_seconds == 0.0


def test_results_of_shared_rows_return_to_all_their_batches() -> None:
    """Rank 0 holds the prompt of both ranks: no row goes in, and hidden states and their gradients of the prompt cross
    once each. Rank 0 gathers 4,196 rows for itself and 4,096 for rank 1, and puts 4,196."""
    costs = Costs(find_profile("h200"), LLAMA, False, Notes())
    cluster, home = Cluster(costs.profile, 2, 2, costs.notes), Layout.from_packs([[4196], [4196]])
    placed = home.sharing(SharedPrefixes.of_spans([[(0, 0, 4196)], [(0, 0, 4096), (1, 4096, 4196)]], [0, 1]))
    nothing, hidden = Passes(np.zeros(2), np.zeros(2)), 2 * 4096
    load = Load(placed.rank_tokens, [nothing_sent(nothing, 32)])
    sent, received = np.array([hidden * 4096.0, 0.0]), np.array([0.0, hidden * 4096.0])
    exchange = float(cluster.exchange(WireBytes(sent, received), WireBytes(0 * sent, 0 * sent)).max())
    copies = costs.copy_seconds(2 * 16 * 2 * 4196.0) + 2 * costs.copy_seconds(2 * hidden * (2 * 4196.0 + 4096))

    returned = rows_placed(costs, cluster, home, load, placed, loss_is_placed=False).further_seconds
    assert returned == pytest.approx(2 * exchange + float(copies))
    for rank, of_rank in enumerate(results_between(home, placed).tolist()):
        moves = RowMoves.of(home, placed, rank).shared_home
        assert moves is not None
        assert moves.received_counts == of_rank


def test_ranks_take_batches_in_turns_and_rows_are_cut() -> None:
    request = request_of(batch_size=2, accumulation=2, batches=30)
    steps = request.steps(np.array([*range(1, 25), 9000]))
    first = np.concatenate(steps[0])

    assert [[len(batch) for batch in step] for step in steps] == [[8, 8]] * 30
    assert len(set(first.tolist())) == 16, "no row twice in an epoch"
    assert max(int(batch.max()) for step in steps for batch in step) == 2048
    with pytest.raises(PackingError, match=r"15 rows are too few for one step: 4 data ranks x 2 rows x 2 micro-steps"):
        request.steps(np.arange(1, 16))
    with pytest.raises(PackingError, match=r"9000 tokens is longer than the 8192 .* --context 8192 cuts longer ones"):
        replace(request, context_tokens=None, model=replace(LLAMA, longest_document_tokens=8192)).steps(
            np.full(30, 9000)
        )


def run(*options: str) -> str:
    done = CliRunner().invoke(app, [*options, "--json"])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(LENGTHS.tolist()))
    return path


def test_plan_and_simulate_agree(lengths: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "MOST_PLANNED_RANKS", 16)
    options = ["--batch-size", "3", "--context", "2048", "--micro-steps", "2", "--liger"]
    planned = json.loads(run("plan", str(lengths), "--gpus", "4", *options))
    simulated_all = json.loads(run("simulate", str(lengths), "--gpus", "4", *options, "--batches", "1"))
    (simulated,) = simulated_all["simulations"]

    assert planned["ways"] == simulated["ways"]
    assert [way["key"] for way in planned["ways"]] == ["plain", "given", "given_loss"]
    assert (simulated["batch_size"], simulated["tokens_per_rank"]) == (3, None)
    printed = CliRunner().invoke(app, ["plan", str(lengths), "--gpus", "4", *options]).output
    assert f"{planned['step_imbalance']:.2f} if results return" in " ".join(printed.split())
    (choice,) = (one["in_short"] for one in simulated_all["simulations"])
    for answered, said in (
        (planned, planned["in_short"]),
        (simulated_all, f"4 GPUs x 3 rows, 2 micro-steps: {choice}"),
    ):
        lengths.write_text(json.dumps(answered))
        assert json.loads(run("report", str(lengths)))["summary"] == [said]


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("plan", "--gpus 4", "give the first for placed batches, the second for"),
        ("plan", "--gpus 4 --tokens-per-rank 99 --context 9", "--context 9 cuts rows of --batch-size"),
        ("plan", "--gpus 4 --batch-size 2 --tokens-per-rank 9 --compare", "--tokens-per-rank, --compare: only for"),
        ("plan", "--gpus 4 --batch-size 0", "--batch-size 0 must be between 1 and"),
        ("simulate", "--batch-size 2 --tokens-per-rank 9", "--tokens-per-rank 9 asks for placed batches"),
        ("simulate", "--batch-size 2 --pipeline 2", "--pipeline needs placed batches"),
    ],
)
def test_options_that_contradict_each_other_are_refused(command: str, options: str, words: str, lengths: Path) -> None:
    done = CliRunner().invoke(app, [command, str(lengths), *options.split()])

    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
