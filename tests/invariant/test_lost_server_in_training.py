"""A server is lost inside a step of a real training: Trainer, SFTTrainer and a loop follow one process with sdpa."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_packs_training as packs
from torch import nn

from distca_hf.integrations.models.mixers import LOWEST_STATES
from support import training
from support.lost_server import ServerHarm, harm_server
from support.ranks import start_ranks
from support.thorough import is_thorough
from support.training import Curve, Run, assert_same_curve, save_initial_model, train_reference
from support.versions import skip_before


STEPS, LOST_AT = 4, 2
TRAINERS = 2
OF_ZERO3 = Run("llama", TRAINERS, "zero3", "sft", 3, steps=STEPS)


def train(run: Run | packs.Run, initial: Path, folder: Path, phase: str) -> tuple[Curve, int]:
    """Trains while a server is lost in the last micro-batch of a step; also returns how often a step ran again."""
    from distca_hf.servers.redo import RepeatableStep

    again, load, counts = [], training.load_model, RepeatableStep.counts

    def load_and_watch(*arguments: Any) -> nn.Module:
        model = load(*arguments)
        if os.environ["RANK"] == "0":
            ServerHarm(folder, LOST_AT * run.accumulation, phase).watch(model.model.layers[1])
        return model

    def noted(step: RepeatableStep) -> bool:
        does_count = counts(step)
        again.extend([] if does_count else [step])
        return does_count

    training.load_model = packs.load_model = load_and_watch
    RepeatableStep.counts = noted
    curve = training.train(run, initial) if isinstance(run, Run) else packs.train(run, initial)
    return curve, len(again)


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("initial")
    return {kind: save_initial_model(kind, folder / kind) for kind in ("llama", "qwen3_5")}


@pytest.mark.parametrize(
    ("run", "servers", "how", "phase"),
    [
        (Run("qwen3_5", TRAINERS, "fsdp2", "trainer", 3, steps=STEPS), 2, signal.SIGKILL, "backward"),
        (packs.Run("collator", "attach", TRAINERS, "fsdp2", 1, steps=STEPS), 2, signal.SIGKILL, "forward"),
        *([(OF_ZERO3, 1, signal.SIGKILL, "forward")] if is_thorough() else []),
    ],
    ids=lambda value: (
        str(value)
        if isinstance(value, int | str)
        else f"{type(value).__module__}-{getattr(value, 'model', 'llama')}-{value.wrap}"
    ),
)
def test_losses_follow_one_process(
    run: Run | packs.Run,
    servers: int,
    how: signal.Signals,
    phase: str,
    initial: dict[str, Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    if getattr(run, "model", "") == "qwen3_5":
        skip_before(LOWEST_STATES, "mixers of older ones keep documents whole")
    folder = initial[run.model if isinstance(run, Run) else "llama"]
    outcomes = start_ranks(
        TRAINERS,
        train,
        tmp_path,
        run,
        folder,
        tmp_path,
        phase,
        servers=servers,
        meanwhile=harm_server(tmp_path, TRAINERS, how),
        endless=frozenset({TRAINERS}),
    )

    others = [outcome for outcome in outcomes if outcome.rank != TRAINERS]
    assert [outcome.exit_code for outcome in others] == [0] * len(others), others
    if isinstance(run, Run):
        reference = train_reference(folder, run.accumulation, False, STEPS)
    else:
        reference = packs.train(replace(run, seam="none", world_size=1, wrap="none"), folder, "sdpa")
    for outcome in outcomes[:TRAINERS]:
        curve, again = outcome.result
        assert again >= 1  # a busy machine may lose another one
        assert curve.places_loss == isinstance(run, packs.Run)
        assert_same_curve(curve, reference, record_property)
