"""Measured speeds in a real training: plans follow the times that servers report, on all trainers alike."""

import os
from pathlib import Path
from typing import Any

import pytest

from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks
from support.training import quiet_arguments


TRAINERS, SERVERS, STEPS = 2, 2, 8
# Kernel times of a process over those of a trainer, and times that pass over kernel times.
SLOWNESS, IDLE = (1, 2), 4


def measure_by_work(slowness: int = 1) -> None:
    """Lets stopwatches of this process show times that follow from work, in place of those of a busy machine."""
    from distca_hf.servers.speeds import Reading, Stopwatch

    read = Stopwatch.read

    def invented(stopwatch: Stopwatch) -> Reading:
        flops = read(stopwatch).flops
        return Reading(flops, slowness * flops, IDLE * slowness * flops)

    Stopwatch.read = invented  # type: ignore[method-assign]


def measure_slow_server() -> None:
    """Makes the second server half as fast as all others."""
    measure_by_work(SLOWNESS[int(os.environ["RANK"]) - TRAINERS])


def train_both(folder: Path) -> list[tuple[list[tuple[int, ...]], list[dict[str, float]]]]:
    """Planned work of each rank in each step, and the logs, with placed batches and with packs."""
    from transformers import DataCollatorWithFlattening

    measure_by_work()
    return [train(folder, 1), train(folder, 6, data_collator=DataCollatorWithFlattening())]


def train(folder: Path, batch: int, **more: Any) -> tuple[list[tuple[int, ...]], list[dict[str, float]]]:
    from transformers import Trainer, TrainingArguments

    import distca_hf
    from distca_hf.integrations.models.forward_watch import watch_of

    work: list[tuple[int, ...]] = []

    class Watched(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, *arguments, **more)
            planner = watch_of(self.model).planner
            work.append((inputs["distca_plan"].facts if planner is None else planner.history[-1]).work)
            return loss

    arguments = quiet_arguments(
        folder, max_steps=STEPS, logging_steps=1, use_cpu=True, per_device_train_batch_size=batch
    )
    trainer = Watched(tiny_model(), TrainingArguments(**arguments), train_dataset=random_dataset(100), **more)
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=0 if more else 96, metrics="all")
    plugin.attach(trainer)
    trainer.train()
    plugin.close()
    return work, [log for log in trainer.state.log_history if "loss" in log]


def test_a_server_that_takes_twice_as_long_gets_half_of_the_work(tmp_path: Path) -> None:
    results = run_ranks(TRAINERS, train_both, tmp_path, tmp_path, servers=SERVERS, before_serving=measure_slow_server)

    for (work, logs), (same_work, _) in zip(*results, strict=True):
        assert work == same_work
        at_first, later = work[0], [sum(step) for step in zip(*work[-3:], strict=True)]
        assert at_first[3] / at_first[2] == pytest.approx(1.0, abs=0.1)
        assert later[3] / later[2] == pytest.approx(0.5, abs=0.1)
        assert later[2] / later[0] == pytest.approx(1.0, abs=0.1)
        assert [log["distca/server_busy_fraction"] for log in logs[-3:]] == pytest.approx([1 / IDLE] * 3)
