"""A rank of the last stage ends in a step: all others name it, by its place among stages and data ranks, and leave."""

import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distca_hf.pipelines.stages import StepInputs
from support.ranks import start_ranks
from support.staged import MICRO_BATCHES, StagedTraining, Way, new_mesh, save_initial_model


HARMED = 3
# What all others say of it.
WORDS = {
    "raise": "left: ArithmeticError: first cause",
    "raise in backward": "left: ArithmeticError: first cause",
    "kill": "does not answer",
}


def _train_until_harm(checkpoint: Path, kind: str, folder: Path) -> None:
    """Two steps; in a layer of the second one a rank ends. A file is left for each step that ended."""
    training = StagedTraining(checkpoint, Way("1F1B"), new_mesh())
    batches = training.batches()
    for number in range(2):
        step = StepInputs.of(list(islice(batches, MICRO_BATCHES)))
        if number == 1 and dist.get_rank() == HARMED:
            layer = training.parts[0].layers[0]
            is_backward = kind == "raise in backward"
            register = layer.register_full_backward_pre_hook if is_backward else layer.register_forward_pre_hook
            register(lambda *given: _end(kind))
        training.step(step)
        (folder / f"{dist.get_rank()} ended {number}").touch()


def _end(kind: str) -> Any:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ArithmeticError("first cause")


@pytest.mark.parametrize("kind", WORDS)
def test_lost_rank_is_named_on_all_stages(kind: str, tmp_path: Path) -> None:
    checkpoint = save_initial_model(tmp_path / "checkpoint")
    outcomes = start_ranks(4, _train_until_harm, tmp_path / "ranks", checkpoint, kind, tmp_path)

    for outcome in outcomes[:HARMED]:
        assert outcome.exit_code == 1, outcome.output  # it left, and did not wait for a deadline
        assert f"rank {HARMED} (stage 1, data 1) {WORDS[kind]}" in outcome.output, outcome.output
    assert {path.name for path in tmp_path.glob("* ended *")} == {f"{rank} ended 0" for rank in range(4)}
