"""One training run, computed in every supported way, gives the same losses: AdamW steps from one start."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.checkpointing import LAYER_CALLS
from support.ranks import run_ranks
from support.thorough import is_thorough
from support.training import (
    DISTRIBUTED_TYPES,
    MANY_STEPS,
    Curve,
    References,
    Run,
    assert_same_curve,
    train,
    train_reference,
)
from support.versions import skip_before


# With the runs of test_packs_training.py these train every option, and with `MORE_RUNS` all pairs: counted there.
RUNS = [
    Run("llama", 1, "none", "trainer", 1),
    Run("llama", 4, "ddp", "plain", 3),
    Run("llama", 2, "fsdp2", "plain", 1, "keep", steps=MANY_STEPS),
    Run("qwen3", 2, "fsdp2", "trainer", 1, checkpointing="selective"),
    Run("llama", 2, "zero1", "trainer", 1, checkpointing="non-reentrant"),
    Run("qwen3", 2, "zero2", "sft", 3, "keep", checkpointing="trl"),
    Run("qwen3", 2, "zero3", "trainer", 1, "keep", checkpointing="non-reentrant"),
    Run("llama", 2, "fsdp1", "trainer", 3, checkpointing="reentrant"),
    Run("llama", 2, "ddp", "trainer", 3, "refetch", checkpointing="non-reentrant", lora=True),
    Run("llama", 2, "fsdp2", "trainer", 3, checkpointing="offloaded, tiles"),
]
MORE_RUNS = [
    Run("qwen3", 1, "none", "plain", 3, "keep"),
    Run("qwen3", 2, "ddp", "trainer", 1, "refetch", checkpointing="reentrant"),
    Run("qwen3", 2, "fsdp2", "trainer", 1, "keep", checkpointing="fsdp"),
    Run("qwen3", 2, "zero1", "trainer", 1, "refetch"),
    Run("llama", 2, "zero2", "trainer", 1, "refetch"),
    Run("llama", 2, "zero3", "trainer", 3, "refetch"),
    Run("qwen3", 2, "fsdp1", "trainer", 1, "refetch"),
    Run("qwen3", 2, "fsdp2", "trainer", 1, "refetch", checkpointing="non-reentrant", lora=True),
    Run("llama", 2, "zero2", "trainer", 1, checkpointing="offloaded, tiles"),
    Run("qwen3", 2, "ddp", "trainer", 1, checkpointing="offloaded, tiles", lora=True),
]
PLAIN_CLASSES = {"none": "Qwen3ForCausalLM", "ddp": "DistributedDataParallel", "fsdp2": "FSDPLlamaForCausalLM"}


def name(run: Run) -> str:
    parts = run.model, run.wrap, run.world_size, run.loop, run.accumulation, run.checkpointing, "lora" * run.lora
    return "-".join(str(part) for part in parts if part)


def reference_of(run: Run, references: References) -> Curve:
    """The same training in one process with sdpa."""
    how = run.accumulation, run.lora, run.steps
    return references.once((run.model, *how), lambda: train_reference(references.initial_models[run.model], *how))


@pytest.mark.parametrize("run", [*RUNS, *(MORE_RUNS if is_thorough() else ())], ids=name)
def test_losses_follow_one_process_sdpa(
    run: Run, references: References, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if run.wrap.startswith("fsdp") and run.checkpointing in ("fsdp", "reentrant"):
        skip_before("5.12", "with FSDP, Trainer of older ones checkpoints wrongly")
    expected, initial_model = reference_of(run, references), references.initial_models[run.model]
    if run.world_size == 1:
        curve = train(run, initial_model)
    else:
        curve = run_ranks(run.world_size, train, tmp_path, run, initial_model)[0]

    wrapped = PLAIN_CLASSES[run.wrap] if run.loop == "plain" else DISTRIBUTED_TYPES[run.wrap.rstrip("123")]
    assert len(curve.losses) == run.steps
    assert curve.distributed_type == wrapped
    assert curve.layer_calls == LAYER_CALLS[run.checkpointing]
    assert_same_curve(curve, expected, record_property)
