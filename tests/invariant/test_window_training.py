"""Models whose layers have sliding windows, shorter than documents that are cut between ranks, and sinks: training on
several ranks follows one process without distca."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.checkpointing import LAYER_CALLS
from support.ranks import run_ranks
from support.thorough import is_thorough
from support.training import MANY_STEPS, References, Run, assert_same_curve, train, train_reference


# Attention servers, which take no part in layers with windows, and the training.
RUNS = [
    (0, Run("gemma3", 2, "fsdp2", "trainer", 1, checkpointing="non-reentrant")),
    (0, Run("gemma3", 3, "ddp", "plain", 1, "keep")),
    (0, Run("gpt_oss", 2, "zero3", "trainer", 1, "refetch")),
    (1, Run("gpt_oss", 2, "ddp", "plain", 3)),
]
THOROUGH_RUNS = [
    (0, Run("gpt_oss", 2, "fsdp2", "trainer", 1, checkpointing="non-reentrant", steps=MANY_STEPS)),
]


def name(value: int | Run) -> str:
    if isinstance(value, int):
        return f"{value} servers"
    return "-".join(filter(None, (value.model, value.wrap, value.loop, value.checkpointing)))


@pytest.mark.parametrize(("servers", "run"), [*RUNS, *(THOROUGH_RUNS if is_thorough() else ())], ids=name)
def test_losses_follow_one_process(
    servers: int, run: Run, references: References, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    how = run.accumulation, run.lora, run.steps
    initial_model = references.initial_models[run.model]
    expected = references.once((run.model, *how), lambda: train_reference(initial_model, *how))
    curve = run_ranks(run.world_size, train, tmp_path, run, initial_model, servers=servers)[0]

    assert len(curve.losses) == run.steps
    assert curve.layer_calls == LAYER_CALLS[run.checkpointing]
    assert_same_curve(curve, expected, record_property)
