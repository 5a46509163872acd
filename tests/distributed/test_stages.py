"""A pipeline of two stages with two data ranks each: every schedule trains as one process does, and writes an ordinary
checkpoint."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from packaging.version import Version
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from distca_hf import Pipeline
from distca_hf.analysis.simulate.step import rooms_for_hops
from distca_hf.comm.rollcall import cause_of
from distca_hf.errors import ConfigError, PackingError, PlanMismatchError
from distca_hf.pipelines.stages import DividedModel, StepInputs, StepLoss, save_parts
from support.data import random_dataset
from support.ranks import run_ranks
from support.staged import (
    DATA_RANKS,
    MICRO_BATCHES,
    NUM_LAYERS,
    SEED,
    STAGES,
    STEPS,
    TOKENS_PER_RANK,
    StagedTraining,
    Way,
    new_mesh,
    save_initial_model,
    train_in_one_process,
    training_dataset,
)
from support.staged_resuming import SAVED_AFTER_STEPS, read_elsewhere, resume, train_and_save


CAPACITY_TOKENS = DATA_RANKS * TOKENS_PER_RANK
WAYS = {
    "1F1B": Way("1F1B"),
    "1F1B, checkpointing": Way("1F1B", recompute=True),
    "interleaved": Way("Interleaved1F1B", chunks=2),
    "interleaved, checkpointing": Way("Interleaved1F1B", chunks=2, recompute=True),
    "interleaved, checkpointing, FSDP2": Way("Interleaved1F1B", chunks=2, recompute=True, wrapper="fsdp2"),
    "zero bubble, no wrapper": Way("ZBVZeroBubble", chunks=2, wrapper=""),
}
# Checkpoints that were written over one with as many parts, whose names were the usual ones.
WRITTEN_OVER_EQUAL_NAMES = {"1F1B, checkpointing", "interleaved, checkpointing", "zero bubble, no wrapper"}
RESUMED = ["1F1B, checkpointing", "interleaved, checkpointing, FSDP2"]
if Version(torch.__version__).release < (2, 13):  # connects parts by sending to its own rank, which gloo cannot
    del WAYS["zero bubble, no wrapper"]


def _train_all(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Every way on this rank. Each writes its checkpoint over that of another way, before it is kept."""
    mesh = new_mesh()
    results: dict[str, Any] = {}
    for name, way in WAYS.items():
        training = StagedTraining(checkpoint, way, mesh)
        if name == "1F1B":
            results["refused"] = _refused(training)
        if name in RESUMED:
            saved = train_and_save(training, folder / f"{name}, training")
            results[name], results[f"{name}, random numbers"] = saved
        else:
            results[name] = training.train()
        save_parts(training.parts, folder / "latest", training.plugin)
        if training.plugin.members.grid.number == 0:
            kept = folder / name
            kept.mkdir()
            for path in (folder / "latest").iterdir():
                (kept / path.name).write_bytes(path.read_bytes())
        training.plugin.close()
        if name in RESUMED:
            results[f"{name}, resumed"] = resume(checkpoint, folder / f"{name}, training", way, mesh)
    results["elsewhere"] = read_elsewhere(checkpoint, folder / f"{RESUMED[-1]}, training", mesh.size())
    under_autocast = StagedTraining(checkpoint, WAYS["1F1B"], mesh, autocast_dtype=torch.bfloat16)
    results["bfloat16"] = under_autocast.train(steps=1).losses
    in_half = StagedTraining(checkpoint, Way("1F1B", wrapper="fsdp2"), mesh, hidden_dtype=torch.bfloat16)
    results["bfloat16, FSDP2"] = in_half.train(steps=1)
    return results


def _refused(training: StagedTraining) -> dict[str, str]:
    """Words of the errors that ranks get for data that stages cannot train on."""
    stage, documents = training.plugin.members.grid.stage, training_dataset()["input_ids"]
    others = Dataset.from_dict({"input_ids": [[token - stage for token in document] for document in documents]})
    wrong: dict[str, tuple[type[Exception], dict[str, Any]]] = {
        "another seed": (PlanMismatchError, {"seed": SEED + stage}),
        "another setting": (PlanMismatchError, {"pipeline": Pipeline(STAGES, 1 + stage)}),
        "other tokens": (PlanMismatchError, {"dataset": others}),
        "a long document": (PackingError, {"dataset": random_dataset(4, lengths=(CAPACITY_TOKENS + 1,))}),
    }
    words = {}
    for name, (error, arguments) in wrong.items():
        with pytest.raises(error) as caught:
            next(training.batches(**arguments))
        words[name] = str(caught.value)
    batches = list(islice(training.batches(), MICRO_BATCHES))
    with pytest.raises(PlanMismatchError) as caught:
        training.step(StepInputs.of(batches[::-1] if stage else batches))
    words["another order"] = str(caught.value)
    training.step(StepInputs.of(batches))
    if stage == STAGES - 1:
        with pytest.raises(ConfigError, match=r"call loss\.begin\(step\) before schedule\.step"):  # that step is over
            training.loss(torch.zeros(1, 2, 8), torch.zeros(1, 2, dtype=torch.int64))
    dtype = torch.bfloat16 if stage else torch.float32
    part = DividedModel(training.model.checkpoint, training.model.pipeline, dtype).load(stage, training.plugin)
    with pytest.raises(PlanMismatchError) as caught:
        StepLoss(part).begin(StepInputs.of(batches))
    words["another dtype"] = str(caught.value)
    training.optimizer.zero_grad()
    return words | _refused_schedules(training, batches)


def _refused_schedules(training: StagedTraining, batches: list[dict[str, Any]]) -> dict[str, str]:
    """Words of the errors that the first stage gets before it has sent anything."""
    words, schedule = {}, training.schedule
    step = StepInputs.of(batches)
    for name, attribute, wrong in (
        ("scaled gradients", "scale_grads", True),
        ("no loss", "_loss_fn", None),
        ("more micro-batches", "_n_microbatches", MICRO_BATCHES // 2),
    ):
        right = getattr(schedule, attribute)
        training.loss.begin(step)  # of all stages
        setattr(schedule, attribute, wrong)
        if training.plugin.members.grid.stage == 0:
            with pytest.raises(RuntimeError) as caught:
                schedule.step(*step.arguments(training.parts), **step.keywords)
            words[name] = str(cause_of(caught.value))
        setattr(schedule, attribute, right)
    return words


class Runs:
    """All runs on ranks, and the reference."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoints"
        self.initial = save_initial_model(folder / "initial")
        self.by_rank = run_ranks(4, _train_all, folder / "ranks", self.initial, self.folder)
        self.expected, self.expected_model = train_in_one_process(self.initial)

    def of(self, way: str) -> list[Any]:
        return [results[way] for results in self.by_rank]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_gradients_are_those_of_one_process(way: str, runs: Runs) -> None:
    by_rank, expected = runs.of(way), runs.expected
    losses = [trained.losses for trained in by_rank if trained.losses]

    assert len(losses) == 2, "the last part is on one stage, which has two data ranks"
    for of_rank in losses:
        assert max(abs(loss - exact) for loss, exact in zip(of_rank, expected.losses, strict=True)) <= 1e-5
    for step, exact in enumerate(expected.gradients):
        seen: dict[str, int] = {}
        for trained in by_rank:
            for name, gradient in trained.gradients[step].items():
                seen[name] = seen.get(name, 0) + 1
                assert float((gradient - exact[name]).abs().max()) <= 1e-5, f"step {step}, {name}"
        assert seen == dict.fromkeys(exact, 2), "each weight is on the two data ranks of one stage"


@pytest.mark.skipif(
    Version(torch.__version__).release >= (2, 15), reason="torch 2.15 has room only for what is on its way"
)
@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("zero bubble")])
def test_torch_has_room_for_all_that_other_stages_send_in_a_step(way: str, runs: Runs) -> None:
    """As the estimate of memory says."""
    pipeline = Pipeline(STAGES, WAYS[way].chunks)
    rooms = [rooms_for_hops(stage, pipeline, MICRO_BATCHES) for stage in range(STAGES)]

    assert [trained.rooms for trained in runs.of(way)] == [rooms[0], rooms[0], rooms[1], rooms[1]]


@pytest.mark.parametrize("way", WAYS)
def test_ranks_exchange_twice_for_each_layer_and_micro_batch(way: str, runs: Runs) -> None:
    for trained in runs.of(way):
        assert trained.layers == NUM_LAYERS // STAGES
        assert trained.exchanges == [2 * trained.layers * micro_batches for micro_batches in trained.sharing]
        assert len(trained.sharing) == STEPS
        assert sum(trained.sharing) > MICRO_BATCHES * STEPS / 2, "ranks share documents in most micro-batches"


@pytest.mark.parametrize("way", WAYS)
def test_checkpoint_is_an_ordinary_one(way: str, runs: Runs) -> None:
    folder = runs.folder / way
    parts = STAGES * WAYS[way].chunks
    again = "-b" if way in WRITTEN_OVER_EQUAL_NAMES else ""
    files = [f"model-{number:05}-of-{parts:05}{again}.safetensors" for number in range(1, parts + 1)]
    model, info = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", output_loading_info=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    expected = dict(runs.expected_model.named_parameters())
    initial = dict(AutoModelForCausalLM.from_pretrained(runs.initial).named_parameters())

    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["config.json", "generation_config.json", "model.safetensors.index.json", *files]
    ), "nothing of the checkpoint that was there before"
    assert not any(info.values())
    assert json.loads((folder / "config.json").read_text()) == json.loads((runs.initial / "config.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in expected.values())
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            assert {index["weight_map"][name] for name in opened.keys()} == {file}
    for name, weight in model.named_parameters():
        assert float((weight - expected[name]).detach().abs().max()) <= 1e-4, name
        assert not torch.equal(weight, initial[name]), name


@pytest.mark.parametrize("way", RESUMED)
def test_resumed_training_is_bit_equal(way: str, runs: Runs) -> None:
    """With another learning rate in each step. The checkpoint is replaced by a later one."""
    for every, resumed in zip(runs.of(way), runs.of(f"{way}, resumed"), strict=True):
        assert resumed.rest.losses == every.losses[SAVED_AFTER_STEPS:]
        for gradients, expected in zip(resumed.rest.gradients, every.gradients[SAVED_AFTER_STEPS:], strict=True):
            assert gradients.keys() == expected.keys()
            assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())
    numbers = runs.of(f"{way}, random numbers")
    assert [resumed.random_numbers for resumed in runs.of(f"{way}, resumed")] == numbers
    assert len(set(map(tuple, numbers))) == 4
    assert [path.name for path in runs.folder.glob(f"{way}, training*")] == [f"{way}, training"]


def test_training_is_read_into_other_stages_and_data_ranks(runs: Runs) -> None:
    """Two stages of two parts and two data ranks (FSDP2) become four stages of one (DDP). In the midst of an epoch
    their steps would be of other documents."""
    way = RESUMED[-1]
    seen: list[str] = []
    expected = dict(AutoModelForCausalLM.from_pretrained(runs.folder / way).named_parameters())
    moments = {name: moment for of in runs.of(f"{way}, resumed") for name, moment in of.moments.items()}
    for weights, of_optimizer, refused in runs.of("elsewhere"):
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
        assert all(torch.equal(moment, moments[name]) for name, moment in of_optimizer.items())
        seen += weights
        assert "was saved in the middle of an epoch of a pipeline (micro_batch=" in refused
        assert "'num_ranks': 2, 'micro_steps': 4, 'pipeline': (2, 2)}; this loader has {" in refused
        assert "'num_ranks': 1, 'micro_steps': 4, 'pipeline': (4, 1)}" in refused

    assert sorted(seen) == sorted(expected) == sorted(moments)


def test_weights_in_float32_train_in_bfloat16(runs: Runs) -> None:
    """Stages send hidden states in float32 under autocast, and in bfloat16 where FSDP2 casts weights."""
    (loss,) = runs.by_rank[3]["bfloat16"]
    (loss_of_casts,) = runs.by_rank[3]["bfloat16, FSDP2"].losses

    assert len({loss, loss_of_casts, runs.of("1F1B")[3].losses[0]}) == 3
    assert abs(loss - runs.expected.losses[0]) < 5e-3
    assert abs(loss_of_casts - runs.expected.losses[0]) < 1e-2
    for rank in (0, 3):
        for name, gradient in runs.by_rank[rank]["bfloat16, FSDP2"].gradients[0].items():
            expected = runs.expected.gradients[0][name]
            assert gradient.dtype == torch.float32
            assert float((gradient - expected).norm()) <= 3e-2 * float(expected.norm()), name


def test_stages_with_other_data_take_no_batch(runs: Runs) -> None:
    first, last = runs.by_rank[0]["refused"], runs.by_rank[3]["refused"]

    begins = "rank 3 (stage 1, data 1), micro-batch 0: ranks disagree, nothing was sent: "
    assert "order of the step's micro-batches is 0, 1, 2, 3 on ranks 0 (stage 0, data 0)" in last["another order"]
    assert "3, 2, 1, 0 on ranks 2 (stage 1, data 0)" in first["another order"]
    hidden = "rows and hidden states that stages send is 96 x 64 x"
    for words in (first, last):
        assert f"{hidden} float32 on ranks 0 (stage 0, data 0) and 1" in words["another dtype"]
        assert "96 x 64 x bfloat16 on ranks 2 (stage 1, data 0) and 3" in words["another dtype"]
    assert last["another seed"].startswith(f"{begins}seed is 3 on")
    assert "3 on ranks 0 (stage 0, data 0) and 1 (stage 0, data 1), 4 on ranks 2 (stage 1" in first["another seed"]
    assert (
        "pipeline is (2, 1) on ranks 0 (stage 0, data 0) and 1 (stage 0, data 1), (2, 2) on ranks 2"
        in (first["another setting"])
    )
    assert last["other tokens"].startswith(f"{begins}contents of documents is ")
    assert (
        f"has {CAPACITY_TOKENS + 1} tokens, all data ranks together hold {CAPACITY_TOKENS}" in last["a long document"]
    )
    assert "part 0: Schedule1F1B was made with scale_grads=True" in first["scaled gradients"]
    assert "part 0: Schedule1F1B was made without loss_fn" in first["no loss"]
    assert "part 0: torch gave 2 micro-batches at once" in first["more micro-batches"]
