"""Batches that others packed: training on several ranks follows one process with sdpa."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from support.data import random_dataset
from support.models import VOCABULARY, save_tiny_model
from support.ranks import run_ranks
from support.training import Curve, load_model, quiet_arguments, sharding_arguments


STEPS = 30
GLOBAL_BATCH = 4
LENGTHS = (3, 9, 17, 60, 200)


@dataclass(frozen=True)
class Run:
    """How packs come about, and how the same training is computed."""

    packs: str  # "collator", "packed dataset" or "padding free"
    seam: str  # "callback" or "attach"
    world_size: int
    wrap: str
    accumulation: int
    checkpointing: bool = False
    lora: bool = False
    sort_packs: bool = False


def dataset() -> Dataset:
    return random_dataset(200, lengths=LENGTHS)


def train(run: Run, folder: Path, implementation: str = "distca") -> tuple[Curve, list[float]]:
    """Losses and gradient norms, and the imbalance before and after of every step."""
    import distca_hf

    sharding = sharding_arguments(run.wrap, "LlamaDecoderLayer")
    model = load_model(folder, implementation, run.lora)
    model.config.use_cache = False
    plugin = distca_hf.DistCAPlugin(sort_packs=run.sort_packs) if implementation == "distca" else None
    callbacks = [distca_hf.DistCACallback(plugin)] if plugin is not None and run.seam == "callback" else []
    trainer = _trainer(run, model, folder, callbacks, sharding)
    if plugin is not None and run.seam == "attach":
        plugin.attach(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    balance = [log[name] for name in ("distca/imbalance_before", "distca/imbalance") for log in logs if name in log]
    kind = trainer.accelerator.distributed_type.name
    return Curve([log["loss"] for log in logs], [log["grad_norm"] for log in logs], kind), balance


def _trainer(run: Run, model: Any, folder: Path, callbacks: list[Any], sharding: dict[str, Any]) -> Any:
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    arguments = quiet_arguments(
        folder / "trainer",
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL_BATCH // run.world_size,
        gradient_accumulation_steps=run.accumulation,
        dataloader_drop_last=True,  # or ranks would repeat samples at the end of an epoch
        gradient_checkpointing=run.checkpointing,
        **sharding,
    )
    if run.packs == "collator":
        args = TrainingArguments(**arguments)
        collator = DataCollatorWithFlattening()
        return Trainer(model=model, args=args, train_dataset=dataset(), data_collator=collator, callbacks=callbacks)

    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    packing = {"packing": True, "max_length": 200} if run.packs == "packed dataset" else {"max_length": None}
    return SFTTrainer(
        model=model,
        args=SFTConfig(padding_free=True, **packing, **arguments),
        train_dataset=dataset(),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),
        callbacks=callbacks,
    )


RUNS = [
    Run("collator", "callback", 2, "ddp", 1),
    Run("collator", "attach", 2, "fsdp2", 3),
    Run("packed dataset", "attach", 2, "ddp", 3, checkpointing=True),
    Run("packed dataset", "callback", 2, "fsdp2", 1),
    Run("padding free", "attach", 4, "ddp", 1, checkpointing=True),
    Run("packed dataset", "attach", 2, "ddp", 3, sort_packs=True),
    Run("collator", "callback", 2, "zero1", 3),
    Run("collator", "callback", 2, "zero2", 1, checkpointing=True),
    Run("padding free", "attach", 2, "zero3", 1),
    Run("packed dataset", "attach", 2, "zero3", 3, lora=True),
    Run("collator", "attach", 2, "fsdp1", 1, checkpointing=True),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("packs"))


@pytest.fixture(scope="session")
def references() -> dict[tuple[str, int, bool, bool], Curve]:
    return {}


@pytest.mark.parametrize(
    "run", RUNS, ids=lambda run: f"{run.packs}-{run.seam}-{run.wrap}-{run.world_size}-{run.accumulation}"
)
def test_losses_follow_one_process_sdpa(
    run: Run,
    folder: Path,
    references: dict[tuple[str, int, bool, bool], Curve],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    # Sorting chooses other packs for a step than Trainer would: then one process must sort, too.
    implementation, seam = ("distca", "attach") if run.sort_packs else ("sdpa", "none")
    alone = Run(run.packs, seam, 1, "none", run.accumulation, lora=run.lora, sort_packs=run.sort_packs)
    key = (run.packs, run.accumulation, run.lora, run.sort_packs)
    if key not in references:
        references[key] = run_ranks(1, train, tmp_path / "alone", alone, folder, implementation)[0][0]
    expected = references[key]
    curve, balance = run_ranks(run.world_size, train, tmp_path / "together", run, folder)[0]

    assert curve.distributed_type == {"ddp": "MULTI_CPU", "fsd": "FSDP", "zer": "DEEPSPEED"}[run.wrap[:3]]
    differences = [loss - reference for loss, reference in zip(curve.losses, expected.losses, strict=True)]
    drift = abs(sum(differences) / len(differences))
    record_property("largest loss difference, drift", f"{max(map(abs, differences)):.1e}, {drift:.1e}")
    assert max(map(abs, differences)) <= 1e-5
    assert drift <= 1e-6
    assert curve.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-4)
    before, after = sum(balance[:STEPS]) / STEPS, sum(balance[STEPS:]) / STEPS
    assert (before < 1.1) == run.sort_packs, balance
    assert after < min(1.1, before), balance
