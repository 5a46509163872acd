"""A rank raises, is killed or stops in the middle of a step: the others name it and the place, and leave at once."""

import time
from pathlib import Path

import pytest

from support.harm import Harm, exchange_of, finished_steps, seconds_since_harm, train_until_harm
from support.ranks import start_ranks


WORLD = 3
HARMED = 1
LEAVE_SECONDS = 8.0


def _survivors(kind: str, step: int, layer: int, phase: str, folder: Path, deadline: float = 20.0) -> list[str]:
    """Runs into the harm; returns what the survivors said, all of them having left in time without another step."""
    harm = Harm(HARMED, exchange_of(step, layer, phase), kind)
    # A stopped rank never ends by itself: look for as long as the others may take.
    patience = deadline + LEAVE_SECONDS + 2 if kind == "stop" else 25.0
    outcomes = start_ranks(WORLD, train_until_harm, folder, harm, folder, deadline, timeout_seconds=patience)
    started = time.time() - max(outcome.seconds for outcome in outcomes)
    survivors = [outcome for outcome in outcomes if outcome.rank != HARMED]
    for outcome in survivors:
        assert outcome.exit_code == 1, outcome.output
        allowed = LEAVE_SECONDS + (deadline if kind == "stop" else 0.0)
        assert seconds_since_harm(folder, started + outcome.seconds) < allowed
        assert finished_steps(folder, outcome.rank) == step, "no step may be taken after the harm"
    return [outcome.output for outcome in survivors]


@pytest.mark.parametrize(
    ("step", "layer", "phase"), [(0, 0, "forward"), (1, 1, "forward"), (1, 1, "backward"), (2, 0, "backward")]
)
def test_a_rank_that_raises_is_named_with_its_words(step: int, layer: int, phase: str, tmp_path: Path) -> None:
    for output in _survivors("raise", step, layer, phase, tmp_path):
        assert "PeerLostError" in output
        assert f"micro-batch {step}, layer {layer}, {phase}" in output
        assert f"rank {HARMED} left: ValueError: this batch is bad" in output


@pytest.mark.parametrize("attempt", range(5))
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_killed_rank_is_named(phase: str, attempt: int, tmp_path: Path) -> None:
    step, layer = attempt % 3, attempt % 2
    for output in _survivors("kill", step, layer, phase, tmp_path):
        assert "PeerLostError" in output
        assert f"micro-batch {step}, layer {layer}, {phase}" in output
        assert f"rank {HARMED} does not answer" in output


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_stopped_rank_is_named_at_the_deadline(phase: str, tmp_path: Path) -> None:
    for output in _survivors("stop", 1, 1, phase, tmp_path, deadline=3.0):
        assert "StepTimeoutError" in output or "PeerLostError" in output
        assert f"micro-batch 1, layer 1, {phase}" in output
        assert f"rank {HARMED} does not answer" in output
