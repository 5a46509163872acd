"""Batches that others packed: training on several ranks follows one process with sdpa."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from datasets import Dataset
from test_training import MORE_RUNS as MORE_PLACED_RUNS
from test_training import RUNS as PLACED_RUNS

from distca_hf.integrations.models import hooks
from distca_hf.integrations.models.forward_watch import watch_of
from support.checkpointing import LAYER_CALLS, settings_of
from support.data import random_dataset
from support.ranks import run_ranks
from support.thorough import is_thorough
from support.training import (
    DISTRIBUTED_TYPES,
    MANY_STEPS,
    STEPS,
    Curve,
    References,
    assert_same_curve,
    computing_arguments,
    curve_of,
    load_model,
    quiet_arguments,
    sft_trainer,
)
from support.versions import skip_before


GLOBAL_BATCH = 4
LENGTHS = (3, 9, 17, 40, 100)


@dataclass(frozen=True)
class Run:
    """How packs come about, and how the same training is computed."""

    packs: str  # "collator", "packed dataset" (TRL's bfd) or "padding free"
    seam: str  # "callback" or "attach"
    world_size: int
    wrap: str
    accumulation: int
    checkpointing: str = ""  # a key of LAYER_CALLS
    lora: bool = False
    kv_residency: str = "auto"
    steps: int = STEPS
    prompt_tokens: int = 0  # with which all documents begin, and which are not learnt


def dataset(packs: str, prompt_tokens: int = 0) -> Dataset:
    """Documents of an epoch that ends within a few steps. TRL makes one of several, so that it needs more."""
    documents = random_dataset(40 if packs == "packed dataset" else 12, lengths=LENGTHS)
    if not prompt_tokens:
        return documents
    prompt, unlearnt = [5, 6, 7, 8] * (prompt_tokens // 4), [-100] * prompt_tokens
    answers = documents["input_ids"]
    return Dataset.from_dict(
        {"input_ids": [prompt + ids for ids in answers], "labels": [unlearnt + ids for ids in answers]}
    )


def train(run: Run, folder: Path, implementation: str = "distca") -> Curve:
    import distca_hf

    computing = computing_arguments(run.wrap, run.checkpointing, "LlamaDecoderLayer")
    model = load_model(folder, implementation, run.lora)
    model.config.use_cache = False
    plugin = distca_hf.DistCAPlugin(
        kv_residency=run.kv_residency,
        **settings_of(run.checkpointing),
        metrics="all",
        shared_prefix_tokens=run.prompt_tokens // 2,
    )
    callbacks = [distca_hf.DistCACallback(plugin)] if run.seam == "callback" else []
    trainer = _trainer(run, model, folder, callbacks, computing)
    if run.seam == "attach":
        plugin.attach(trainer)
    # Hooks of these tests only count calls, and would keep documents from sharing prefixes.
    with patch.object(hooks, "KNOWN_HOOKS", hooks.KNOWN_HOOKS | {"support"}):
        curve, watch = curve_of(trainer), watch_of(trainer.model)
    assert watch is None or (watch.planner.totals.shared_tokens > 0) == (run.prompt_tokens > 0)
    return curve


def _trainer(run: Run, model: Any, folder: Path, callbacks: list[Any], computing: dict[str, Any]) -> Any:
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    arguments = quiet_arguments(
        folder / "trainer",
        max_steps=run.steps,
        per_device_train_batch_size=GLOBAL_BATCH // run.world_size,
        gradient_accumulation_steps=run.accumulation,
        dataloader_drop_last=True,  # or ranks would repeat samples at the end of an epoch
        **computing,
    )
    documents = dataset(run.packs, run.prompt_tokens)
    if run.packs == "collator":
        args = TrainingArguments(**arguments)
        collator = DataCollatorWithFlattening()
        return Trainer(model=model, args=args, train_dataset=documents, data_collator=collator, callbacks=callbacks)
    packing = {"packing": True, "max_length": 100} if run.packs == "packed dataset" else {"max_length": None}
    return sft_trainer(model, documents, callbacks, padding_free=True, **packing, **arguments)


RUNS = [
    Run("collator", "attach", 2, "fsdp2", 3, "fsdp", kv_residency="refetch"),
    Run("packed dataset", "attach", 2, "ddp", 3, "trl", kv_residency="refetch"),
    Run("padding free", "attach", 4, "ddp", 1, "selective", kv_residency="keep"),
    Run("collator", "attach", 2, "zero2", 1, "reentrant", kv_residency="refetch"),
    Run("collator", "attach", 2, "zero3", 1, lora=True, prompt_tokens=80),
    Run("collator", "callback", 2, "ddp", 1, "selective", prompt_tokens=80),
]
MORE_RUNS = [
    Run("packed dataset", "callback", 2, "fsdp2", 1, "trl", steps=MANY_STEPS),
    Run("collator", "attach", 2, "zero1", 3, "selective", kv_residency="refetch"),
    Run("padding free", "callback", 2, "zero3", 1),
    Run("collator", "attach", 2, "fsdp1", 1, "non-reentrant"),
    Run("collator", "attach", 2, "fsdp2", 1, "offloaded, tiles", kv_residency="refetch"),
]


def name(run: Run) -> str:
    kind = "lora" * run.lora or "prompts" * bool(run.prompt_tokens)
    parts = run.packs, run.seam, run.wrap, run.world_size, run.accumulation, run.checkpointing, kind
    return "-".join(str(part) for part in parts if part)


def reference_of(run: Run, references: References) -> Curve:
    """The same training in one process with sdpa."""
    alone = Run(
        run.packs, "none", 1, "none", run.accumulation, lora=run.lora, steps=run.steps, prompt_tokens=run.prompt_tokens
    )
    return references.once(alone, lambda: train(alone, references.initial_models["llama"], "sdpa"))


@pytest.mark.parametrize("run", [*RUNS, *(MORE_RUNS if is_thorough() else ())], ids=name)
def test_losses_follow_one_process_sdpa(
    run: Run, references: References, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if run.wrap.startswith("fsdp") and run.checkpointing in ("fsdp", "reentrant"):
        skip_before("5.12", "with FSDP, Trainer of older ones checkpoints wrongly")
    expected = reference_of(run, references)
    curve = run_ranks(run.world_size, train, tmp_path, run, references.initial_models["llama"])[0]

    assert len(curve.losses) == run.steps
    assert curve.distributed_type == DISTRIBUTED_TYPES[run.wrap.rstrip("123")]
    assert curve.layer_calls == LAYER_CALLS[run.checkpointing]
    assert_same_curve(curve, expected, record_property)
    before, after = curve.imbalance
    assert after < 1.1 < before, (before, after)
    # Trainer reads the mean loss only. A callback does not know who reads what, and SFTTrainer reads logits.
    assert curve.places_loss == (run.packs == "collator" and run.seam == "attach")


OPTIONS: dict[str, tuple[Any, ...]] = {
    "wrap": ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"),
    "family": ("ddp", "fsdp", "zero"),
    "checkpointing": tuple(LAYER_CALLS),
    "checkpointed": (False, True),
    "accumulation": (1, 3),
    "lora": (False, True),
    "batches": ("placed", "foreign"),
    "packs": ("collator", "packed dataset", "padding free"),
    "model": ("llama", "qwen3"),
    "kv_residency": ("auto", "keep", "refetch"),
    "keeps": (False, True),
}
# Any two of a line, in any two values. Six ways to wrap in six forms would be too many: families of ways are.
PAIRWISE = (
    ("batches", "accumulation", "family", "checkpointing"),
    ("batches", "accumulation", "wrap", "checkpointed"),
    ("batches", "accumulation", "family", "checkpointed", "lora"),
    ("model", "keeps", "accumulation", "wrap"),
    ("model", "keeps", "accumulation", "checkpointing"),
    ("batches", "keeps", "lora"),
)
IMPOSSIBLE = {("ddp", "fsdp"), ("zero", "fsdp")}  # FSDP checkpoints what FSDP wraps


def options(run: Any) -> dict[str, Any]:
    only_of_others = {"packs": "", "model": "llama"}
    derived = {
        "family": run.wrap.rstrip("123"),
        "checkpointed": bool(run.checkpointing),
        "keeps": run.kv_residency != "refetch",  # the budget of auto is large enough
        "batches": "foreign" if isinstance(run, Run) else "placed",
    }
    return only_of_others | vars(run) | derived


def test_every_option_is_trained_twice_and_in_pairs() -> None:
    """In placed and foreign batches together; once without `--thorough`."""
    usual = [options(run) for run in (*PLACED_RUNS, *RUNS)]
    trained = {option for run in usual for option in run.items()}
    assert {(name, value) for name in OPTIONS for value in OPTIONS[name]} <= trained
    runs = usual + [options(run) for run in (*MORE_PLACED_RUNS, *MORE_RUNS)]
    counts = Counter(option for run in runs for option in run.items())
    assert [(name, value) for name in OPTIONS for value in OPTIONS[name] if counts[name, value] < 2] == []
    for one, other in {pair for line in PAIRWISE for pair in combinations(line, 2)}:
        trained = {(run[one], run[other]) for run in runs}
        assert set(product(OPTIONS[one], OPTIONS[other])) - trained <= IMPOSSIBLE, (one, other)
