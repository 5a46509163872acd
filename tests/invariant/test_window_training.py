"""Models whose layers have sliding windows, shorter than documents that are cut between ranks: training on several
ranks follows one process with sdpa."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.checkpointing import LAYER_CALLS
from support.ranks import run_ranks
from support.training import MANY_STEPS, References, Run, assert_same_curve, train, train_reference


RUNS = [
    Run("gemma3", 2, "fsdp2", "trainer", 1, checkpointing="non-reentrant", steps=MANY_STEPS),
    Run("gemma3", 2, "zero3", "trainer", 3, "refetch", checkpointing="reentrant"),
    Run("gemma3", 3, "ddp", "plain", 1, "keep"),
    Run("gemma3", 2, "ddp", "trainer", 1, checkpointing="selective"),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.wrap}-{run.loop}-{run.checkpointing}")
def test_losses_follow_one_process_sdpa(
    run: Run, references: References, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    how = run.accumulation, run.lora, run.steps
    initial_model = references.initial_models[run.model]
    expected = references.once((run.model, *how), lambda: train_reference(initial_model, *how))
    curve = run_ranks(run.world_size, train, tmp_path, run, initial_model)[0]

    assert len(curve.losses) == run.steps
    assert curve.layer_calls == LAYER_CALLS[run.checkpointing]
    assert_same_curve(curve, expected, record_property)
