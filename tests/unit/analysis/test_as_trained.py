"""distca plan plans what training plans: the same documents, the same plan, the same work and bytes."""

import json
import random
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Trainer, TrainingArguments
from typer.testing import CliRunner

import distca_hf
from distca_hf.analysis.epoch import PackedEpoch, make_report, pack_epoch
from distca_hf.analysis.find_model import read_model_config
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.models import ModelShape
from distca_hf.analysis.request import PlanRequest, plan_micro_steps
from distca_hf.batches import base_loader
from distca_hf.batches.given import GivenPlanner
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.cli import app
from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.errors import PackingError
from distca_hf.integrations.models.decoder_layers import head_groups_of, token_bytes_of
from distca_hf.planning.plan import Plan, PlanFacts
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.testing import LoopbackTransport, run_ranks
from support.models import tiny_model
from support.thorough import is_thorough


# Query heads and KV heads: all KV heads, fewer groups than KV heads, one that 8 does not divide, no divisor but 1.
HEADS = ((4, 1), (4, 2), (8, 4), (32, 8), (24, 12), (16, 16), (64, 32), (40, 40), (22, 11))
TIMES = Path(__file__).parents[3] / "docs" / "benchmarks" / "kernel-times-h200-flash4.json"
LONG = [9000, 2500, 2500, 1200, *[700] * 12, *[90] * 60, *[1, 2, 3] * 9]


class OneOfMany(LocalTransport):
    """A transport for a loader without a model: a rank and the number of ranks."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = world_size // 2, world_size


@pytest.fixture(autouse=True)
def the_other_ranks_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the comparison of tokens at cuts: no other rank is there."""
    monkeypatch.setattr(base_loader, "check_cuts", lambda *given: None)


@cache
def model_of(heads: tuple[int, int]) -> nn.Module:
    """Returns a model with these numbers of query and KV heads."""
    query, key_value = heads
    return tiny_model(
        num_hidden_layers=1, hidden_size=8 * query, num_attention_heads=query, num_key_value_heads=key_value
    )


def shape_of(heads: tuple[int, int], folder: Path, number_type: str = "bfloat16") -> ModelShape:
    """Returns the shape that the command reads from the config.json of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    model_of(heads).config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": number_type}))
    return read_model_config(path)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], ModelShape]:
    folder = tmp_path_factory.mktemp("configs")
    return {heads: shape_of(heads, folder / f"{heads[1]}") for heads in HEADS}


def dataset_of(lengths: list[int]) -> Dataset:
    return Dataset.from_dict({"input_ids": [np.zeros(length, dtype=np.int32) for length in lengths]})


def loader_of(lengths: list[int], request: PlanRequest, heads: tuple[int, int], seed: int) -> PlacedLoader:
    """Returns the loader of one rank of a training with these sizes."""
    config = DistCAConfig(
        tokens_per_rank=request.tokens_per_rank, ranks_per_node=request.ranks_per_node, overlong=request.overlong
    )
    return PlacedLoader(
        dataset_of(lengths),
        PlacedPlanner(config, request.num_ranks, head_groups_of(model_of(heads))),
        OneOfMany(request.num_ranks),
        torch.device("cpu"),
        seed=seed,
        micro_steps=request.micro_steps,
    )


def bytes_of(facts: PlanFacts, shape: ModelShape) -> int:
    """Returns the bytes of a layer's forward pass, from rows that ranks send in training."""
    size = shape.token_bytes
    queries = sum(facts.query_rows_sent) * (size.query + size.output)
    return (sum(facts.key_rows_sent) * size.key_value + queries) // facts.rows_per_token


def check_same_step(
    lengths: list[int], request: PlanRequest, heads: tuple[int, int], seed: int
) -> tuple[list[Plan], PlacedLoader]:
    """Plans of the command and of the loader are equal, and so are their figures."""
    packed = pack_epoch(np.array(lengths), request, seed)
    plans = plan_micro_steps(request, packed.first_step(request.micro_steps))
    loader = loader_of(lengths, request, heads, seed)
    lives: list[LivePlan] = [batch["distca_plan"] for batch in islice(loader, request.micro_steps)]

    assert (packed.seed, packed.epoch.num_micro_batches) == (seed, len(loader))
    for number, (plan, live) in enumerate(zip(plans, lives, strict=True)):
        documents = [len(document.input_ids) for document in loader.documents(0, number)]
        assert plan.layout.document_tokens.tolist() == documents
        assert plan.fingerprint == live.fingerprint
        assert tuple(plan.work.tolist()) == live.facts.work
    figures = make_report(request, packed).figures
    assert figures.bytes_total == sum(bytes_of(live.facts, request.model) for live in lives)
    return plans, loader


@pytest.mark.parametrize(
    ("heads", "ranks", "ranks_per_node", "micro_steps"),
    [(heads, *((8, 8, 1), (12, 8, 4))[number % 2]) for number, heads in enumerate(HEADS)],
)
def test_the_planned_step_is_the_first_of_training(
    heads: tuple[int, int],
    ranks: int,
    ranks_per_node: int,
    micro_steps: int,
    shapes: dict[tuple[int, int], ModelShape],
) -> None:
    """On one node and on several."""
    request = PlanRequest(ranks, 6000 // ranks * 2, ranks_per_node, micro_steps, shapes[heads])
    check_same_step(3 * LONG, request, heads, seed=0 if micro_steps == 1 else 2**40 + 3)


@pytest.mark.parametrize("seed", range(2))
def test_an_overlong_document_is_refused_wherever_it_is(seed: int, shapes: dict[tuple[int, int], ModelShape]) -> None:
    """Training refuses the dataset, and so does the command, also if that document comes much later."""
    lengths = [*[100] * 300, 2001, *[100] * 300]
    request = PlanRequest(4, 500, 2, 1, shapes[32, 8])

    with pytest.raises(PackingError, match=r"document 300 \(row 300\) has 2001 tokens"):
        loader_of(lengths, request, (32, 8), seed)
    with pytest.raises(PackingError, match="a document of 2001 tokens does not fit"):
        pack_epoch(np.array(lengths), request, seed).first_step(request.micro_steps)


@settings(max_examples=100 if is_thorough() else 20, deadline=None)
@given(data=st.data())
def test_any_step_is_the_first_of_training(data: st.DataObject, shapes: dict[tuple[int, int], ModelShape]) -> None:
    ranks = data.draw(st.integers(1, 17), label="ranks")
    tokens_per_rank = data.draw(st.integers(8, 300), label="tokens per rank")
    ranks_per_node = data.draw(st.integers(1, ranks + 1), label="ranks per node")
    micro_steps = data.draw(st.integers(1, 5), label="micro-steps")
    overlong: Any = data.draw(st.sampled_from(["error", "split", "truncate"]), label="overlong")
    longest = ranks * tokens_per_rank * (1 if overlong == "error" else 2)
    length = st.one_of(st.integers(1, longest), st.integers(1, min(longest, 40)))
    lengths = data.draw(st.lists(length, min_size=1, max_size=60), label="lengths")
    heads = data.draw(st.sampled_from(HEADS), label="heads")
    seed = data.draw(st.integers(0, 2**63 - 1), label="seed")
    request = PlanRequest(ranks, tokens_per_rank, ranks_per_node, micro_steps, shapes[heads], overlong=overlong)
    loader = loader_of(lengths, request, heads, seed)
    if len(loader) < micro_steps:
        with pytest.raises(PackingError, match=f"fill {len(loader)} of {micro_steps} micro-steps"):
            pack_epoch(np.array(lengths), request, seed).first_step(request.micro_steps)
    else:
        check_same_step(lengths, request, heads, seed)


def test_a_trainer_trains_on_what_the_command_prints(tmp_path: Path) -> None:
    """From the same saved dataset and config.json, by the Trainer's seed and its accumulation steps."""
    lengths = np.random.default_rng(3).integers(1, 400, 90).tolist()
    dataset = dataset_of(lengths)
    dataset.save_to_disk(tmp_path / "dataset")
    shape_of((16, 16), tmp_path)
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        seed=11,
        gradient_accumulation_steps=4,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
    )
    trainer = Trainer(model=model_of((16, 16)), args=args, train_dataset=dataset)
    distca_hf.DistCAPlugin(tokens_per_rank=1000).attach(trainer)
    loader = trainer.get_train_dataloader()
    facts = [batch["distca_plan"].facts for batch in islice(loader, 4)]
    trained = [fact.num_documents for fact in facts]
    arguments = ["plan", tmp_path / "dataset", "--gpus", 1, "--tokens-per-rank", 1000, "--micro-steps", 4]
    options = ["--model", tmp_path / "config.json", "--seed", 11]
    said = json.loads(CliRunner().invoke(app, [*map(str, arguments), *map(str, options), "--json"]).stdout)
    words = CliRunner().invoke(app, [*map(str, arguments), *map(str, options)]).stdout.split()

    assert said["documents"] == sum(trained)
    assert said["tokens"] == sum(fact.num_tokens for fact in facts)
    assert (said["seed"], said["epoch"], said["epoch_micro_batches"]) == (11, 0, len(loader))
    assert f"the first 4 of {len(loader)} micro-batches of epoch 0, seed 11" in " ".join(words)


def test_rows_of_several_documents_are_read_as_the_loader_reads_them(tmp_path: Path) -> None:
    rows = [[5, 7], [3], [4, 4, 4]]
    tokens = [np.zeros(sum(row), dtype=np.int32) for row in rows]
    packed = Dataset.from_dict({"input_ids": tokens, "seq_lengths": rows, "length": [sum(row) for row in rows]})
    packed.save_to_disk(tmp_path / "packed")
    packed.to_parquet(tmp_path / "packed.parquet")

    assert read_lengths(tmp_path / "packed").tokens.tolist() == [5, 7, 3, 4, 4, 4]
    with pytest.raises(PackingError, match=r"packed\.parquet has a column seq_lengths"):
        read_lengths(tmp_path / "packed.parquet")


def packs(rng: random.Random, ranks: int, tokens: int) -> list[list[int]]:
    """Returns documents of each rank, from a packer that fills every rank."""
    made: list[list[int]] = []
    for _ in range(ranks):
        cuts = sorted({0, tokens, *(rng.randrange(1, tokens) for _ in range(rng.choice([0, 1, 4, 30])))})
        made.append([stop - start for start, stop in pairwise(cuts)])
    return made


@pytest.mark.parametrize(
    ("heads", "number_type"),
    [(heads, ("bfloat16", "float32", "float64")[number % 3]) for number, heads in enumerate(HEADS)],
)
def test_fixed_layouts_are_planned_as_packs_are(heads: tuple[int, int], number_type: str, tmp_path: Path) -> None:
    """Where documents in order fill ranks so that none spans two, they are the packs of these ranks. Training plans
    in 16-bit numbers, and the command in those of the config: plans depend on proportions alone."""
    ranks, tokens, ranks_per_node = 4, 600, 2
    config = distca_hf.DistCAPlugin(tokens_per_rank=tokens, ranks_per_node=ranks_per_node)
    shape = shape_of(heads, tmp_path, number_type)
    request = PlanRequest(ranks, tokens, ranks_per_node, 1, shape, layout="fixed")
    model = model_of(heads)
    for seed in range(3):
        lengths = packs(random.Random(seed), ranks, tokens)

        def plan(transport: LoopbackTransport) -> LivePlan:
            held = lengths[transport.rank]  # noqa: B023  called before the next round
            positions = torch.cat([torch.arange(length) for length in held])[None]
            planner = GivenPlanner(config, transport, head_groups_of(model), token_bytes_of(model))
            live = planner.plan({"input_ids": torch.zeros_like(positions), "position_ids": positions})
            assert live is not None
            assert live.facts  # planned now, in which all ranks take part
            return live

        live = run_ranks(ranks, plan)[0]
        [planned] = plan_micro_steps(request, [np.concatenate(lengths)])
        figures = make_report(request, PackedEpoch.of_batches([np.concatenate(lengths)])).figures

        assert planned.fingerprint == live.fingerprint
        assert tuple(planned.work.tolist()) == live.facts.work
        assert figures.bytes_total == bytes_of(live.facts, shape)


@pytest.mark.parametrize("setting", ["pad_to_multiple_of", "kernel_times"])
def test_the_environment_decides_other_settings_as_in_training(
    setting: str, monkeypatch: pytest.MonkeyPatch, shapes: dict[tuple[int, int], ModelShape]
) -> None:
    heads = (32, 8)
    plain, _ = check_same_step(LONG, PlanRequest(8, 2000, 8, 1, shapes[heads]), heads, seed=1)
    monkeypatch.setenv(f"DISTCA_{setting.upper()}", {"pad_to_multiple_of": "1", "kernel_times": str(TIMES)}[setting])
    changed, _ = check_same_step(LONG, PlanRequest(8, 2000, 8, 1, shapes[heads]), heads, seed=1)

    assert changed[0].fingerprint != plain[0].fingerprint
