"""A server is lost inside a step of a real training: Trainer, SFTTrainer and a loop follow one process with sdpa."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_lost_server
from torch import nn

from support import training
from support.ranks import start_ranks
from support.training import Curve, Run, assert_same_curve, save_initial_model, train_reference


STEPS, LOST_AT = 6, 2
TRAINERS = 2


def train(run: Run, initial: Path, folder: Path, phase: str) -> tuple[Curve, int]:
    """Trains while a server is lost in the last micro-batch of a step; also returns how often a step ran again."""
    from distca_hf.integrations.redo import Window

    again, load, counts = [], training.load_model, Window.counts

    def load_and_watch(*arguments: Any) -> nn.Module:
        model = load(*arguments)
        if os.environ["RANK"] == "0":
            test_lost_server.Harm(folder, LOST_AT * run.accumulation, phase).watch(model.model.layers[1])
        return model

    def noted(window: Window) -> bool:
        does_count = counts(window)
        again.extend([] if does_count else [window])
        return does_count

    training.load_model, Window.counts = load_and_watch, noted
    return training.train(run, initial), len(again)


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_initial_model("llama", tmp_path_factory.mktemp("initial"))


@pytest.mark.parametrize(
    ("run", "servers", "how", "phase"),
    [
        (Run("llama", TRAINERS, "fsdp2", "trainer", 3, steps=STEPS), 2, signal.SIGKILL, "backward"),
        (Run("llama", TRAINERS, "zero3", "sft", 3, steps=STEPS), 1, signal.SIGKILL, "forward"),
        (Run("llama", TRAINERS, "ddp", "plain", 3, steps=STEPS), 1, signal.SIGSTOP, "backward"),
    ],
    ids=lambda value: f"{value.wrap}-{value.loop}" if isinstance(value, Run) else str(value),
)
def test_losses_follow_one_process(
    run: Run,
    servers: int,
    how: signal.Signals,
    phase: str,
    initial: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    outcomes = start_ranks(
        TRAINERS,
        train,
        tmp_path,
        run,
        initial,
        tmp_path,
        phase,
        servers=servers,
        meanwhile=test_lost_server._harm(tmp_path, TRAINERS, how),
        endless=frozenset({TRAINERS}),
    )

    others = [outcome for outcome in outcomes if outcome.rank != TRAINERS]
    assert [outcome.exit_code for outcome in others] == [0] * len(others), others
    reference = train_reference(initial, run.accumulation, False, STEPS)
    for outcome in outcomes[:TRAINERS]:
        curve, again = outcome.result
        assert again == 1
        assert_same_curve(curve, reference, record_property)
