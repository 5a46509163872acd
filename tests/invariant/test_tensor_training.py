"""Tensor parallelism beside distca: two tensor ranks of two data ranks each train as one process does.

One set of four processes runs all of them.
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from packaging.version import Version
from test_divided_models import clip_gradients
from test_packs_training import GLOBAL_BATCH, dataset
from test_packs_training import Run as PacksRun
from test_packs_training import train as train_on_packs
from transformers import AutoModelForCausalLM

from support.checkpointing import LAYER_CALLS, checkpointing_arguments, settings_of
from support.ranks import run_ranks
from support.shard_on_cpu import let_accelerate_shard_on_cpu
from support.thorough import is_thorough
from support.training import (
    CAPACITY_TOKENS,
    LEARNING_RATE,
    SEED,
    Curve,
    References,
    curve_of,
    quiet_arguments,
    train_reference,
    training_dataset,
)


pytestmark = pytest.mark.skipif(
    Version(transformers.__version__).release < (5, 19),
    reason="Transformers trains with tensor parallelism since 5.19",
)
STEPS = 3
DATA, TENSOR = 2, 2
LEFT = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Run:
    """How a training is computed.

    Attributes:
        batches: "placed", or "packs" of a collator.
        loop: "trainer" or "plain".
        checkpointing: a key of LAYER_CALLS.
        evaluate: the plugin's setting; "" without evaluation.
    """

    batches: str
    loop: str = "trainer"
    accumulation: int = 1
    checkpointing: str = ""
    evaluate: str = ""

    def __str__(self) -> str:
        more = f"accumulation{self.accumulation}" * (self.accumulation > 1), self.checkpointing, self.evaluate
        return "-".join(part for part in (self.batches, self.loop, *more) if part)


@dataclass(frozen=True)
class Seen:
    """What one rank has seen.

    Attributes:
        name: of the rank.
        bytes_sent, bytes_planned: in the plain loop; those of the plan are for all heads.
        evaluated: loss before training.
        evaluated_plainly: the same of Trainer alone on these ranks, with sdpa, where evaluation is local.
    """

    curve: Curve
    name: str
    bytes_sent: int = 0
    bytes_planned: int = 0
    evaluated: float = 0.0
    evaluated_plainly: float = 0.0


RUNS = [
    Run("placed", accumulation=2, checkpointing="non-reentrant", evaluate="distca"),
    Run("placed", "plain"),
    Run("packs", evaluate="local"),
    *([Run("packs", accumulation=2, checkpointing="selective")] if is_thorough() else []),
]


def load(folder: Path, implementation: str = "distca") -> Any:
    from accelerate.state import AcceleratorState
    from transformers.distributed import DistributedConfig

    AcceleratorState._reset_state()  # what the run before told it
    sizes = DistributedConfig(tp_size=TENSOR, fsdp_size=DATA)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation, distributed_config=sizes)


def evaluation_dataset() -> Dataset:
    return dataset("collator").select(range(12))


def make_trainer(model: Any, run: Run, folder: Path, **changes: Any) -> Any:
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    is_placed = run.batches == "placed"
    ranks = 1 if model.config._attn_implementation == "sdpa" or not dist.is_initialized() else DATA
    more: dict[str, Any] = (
        {"seed": SEED, "max_grad_norm": 1.0}
        if is_placed
        else {"per_device_train_batch_size": GLOBAL_BATCH // ranks, "dataloader_drop_last": True}
    )
    arguments = quiet_arguments(
        folder / "trainer",
        max_steps=STEPS,
        gradient_accumulation_steps=run.accumulation,
        per_device_eval_batch_size=1,
        **more,
        **checkpointing_arguments(run.checkpointing),
        **changes,
    )
    return Trainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=training_dataset() if is_placed else dataset("collator"),
        eval_dataset=evaluation_dataset() if run.evaluate else None,
        data_collator=None if is_placed else DataCollatorWithFlattening(),
    )


def make_plugin(run: Run, ranks: int = DATA) -> Any:
    import distca_hf

    return distca_hf.DistCAPlugin(
        tokens_per_rank=CAPACITY_TOKENS // ranks if run.batches == "placed" else 0,
        metrics="all",
        evaluate=run.evaluate or "local",
        **settings_of(run.checkpointing),
        debug=distca_hf.Debug(check_exchanges=run.accumulation > 1, check_weights_every_steps=2),
    )


def train_all(runs: Sequence[Run], folder: Path, initial: Path) -> list[Seen]:
    let_accelerate_shard_on_cpu()  # Accelerate knows no ParallelismConfig on CPUs
    return [train_in_plain_loop(initial, run) if run.loop == "plain" else train(run, folder, initial) for run in runs]


def evaluate(model: Any, run: Run, folder: Path) -> float:
    return float(make_trainer(model, run, folder).evaluate()["eval_loss"])


def train(run: Run, folder: Path, initial: Path) -> Seen:
    plain = evaluate(load(initial, "sdpa"), run, folder) if run.evaluate == "local" else 0.0
    trainer, plugin = make_trainer(load(initial), run, folder), make_plugin(run)
    plugin.attach(trainer)
    evaluated = trainer.evaluate()["eval_loss"] if run.evaluate else 0.0
    curve = curve_of(trainer)
    name = plugin.members.grid.name
    plugin.close()
    return Seen(curve, name, evaluated=evaluated, evaluated_plainly=plain)


def train_in_plain_loop(initial: Path, run: Run) -> Seen:
    import distca_hf

    model, plugin = load(initial), make_plugin(run)
    loader = plugin.dataloader(training_dataset(), SEED, model=model)
    distca_hf.enable(model, plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, foreach=False)
    transport, config = plugin.transport(torch.device("cpu")), model.config
    token_bytes = config.num_key_value_heads * 2 * config.head_dim * torch.float32.itemsize
    losses, norms, planned = [], [], 0
    for batch in islice(loader, STEPS):
        facts = batch["distca_plan"].facts
        rows = facts.key_rows_sent[transport.rank] + facts.key_rows_received[transport.rank]  # and their gradients
        planned += rows // facts.rows_per_token * config.num_hidden_layers * token_bytes
        loss = model.train()(**batch).loss
        loss.backward()
        norms.append(clip_gradients(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / (DATA * TENSOR))
    seen = Seen(Curve(losses, norms), plugin.members.grid.name, transport.traffic.bytes_sent, planned)
    plugin.close()
    return seen


@pytest.fixture(scope="module")
def trained(references: References, tmp_path_factory: pytest.TempPathFactory) -> dict[Run, list[Seen]]:
    """By run, what every rank has seen."""
    folder = tmp_path_factory.mktemp("ranks")
    by_rank = run_ranks(DATA * TENSOR, train_all, folder, RUNS, folder, references.initial_models["llama"])
    return {run: list(seen) for run, seen in zip(RUNS, zip(*by_rank, strict=True), strict=True)}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_losses_follow_one_process_sdpa(
    run: Run,
    trained: dict[Run, list[Seen]],
    references: References,
    record_property: Callable[[str, object], None],
) -> None:
    initial = references.initial_models["llama"]
    if run.batches == "placed":
        expected = references.once(
            ("llama", run.accumulation, False, STEPS),
            lambda: train_reference(initial, run.accumulation, lora=False, steps=STEPS),
        )
    else:
        alone = PacksRun("collator", "none", 1, "none", run.accumulation, steps=STEPS)
        expected = references.once(alone, lambda: train_on_packs(alone, initial, "sdpa"))

    for rank, seen in enumerate(trained[run]):
        curve = seen.curve
        assert seen.name == f"rank {rank} (data {rank // 2}, tensor {rank % 2})"
        assert len(curve.losses) == STEPS
        np.testing.assert_allclose(curve.losses, expected.losses, rtol=0, atol=1e-5)
        np.testing.assert_allclose(curve.gradient_norms, expected.gradient_norms, rtol=0, atol=1e-5)
        if run.loop == "trainer":
            before, after = curve.imbalance
            assert curve.layer_calls == LAYER_CALLS[run.checkpointing]
            assert after < max(1.1, before), (before, after)
            assert curve.places_loss == (run.batches == "packs")


def test_bytes_per_rank_are_those_of_the_plan_divided_by_tensor_ranks(trained: dict[Run, list[Seen]]) -> None:
    by_rank = trained[Run("placed", "plain")]

    assert any(seen.bytes_sent for seen in by_rank)
    assert [seen.bytes_sent for seen in by_rank] == [seen.bytes_planned // TENSOR for seen in by_rank]


def test_local_evaluation_is_that_of_trainer_alone(trained: dict[Run, list[Seen]]) -> None:
    for seen in trained[Run("packs", evaluate="local")]:
        assert seen.evaluated == pytest.approx(seen.evaluated_plainly, abs=1e-6)


def test_placed_evaluation_is_that_of_one_process(trained: dict[Run, list[Seen]], references: References) -> None:
    """The mean over micro-batches of all ranks together."""
    import distca_hf

    folder = references.initial_models["llama"]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    loader = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS).dataloader(evaluation_dataset(), shuffle=False)
    means = []
    for at in range(len(loader)):
        documents = [torch.from_numpy(document.input_ids)[None] for document in loader.documents(0, at)]
        labels = sum(ids.numel() - 1 for ids in documents)
        with torch.no_grad():
            losses = [model(input_ids=ids, labels=ids, num_items_in_batch=labels).loss.item() for ids in documents]
        means.append(sum(losses))

    run = next(run for run in RUNS if run.evaluate == "distca")
    for seen in trained[run]:
        assert seen.evaluated == pytest.approx(sum(means) / len(means), abs=1e-5)
