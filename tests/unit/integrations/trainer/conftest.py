"""A Trainer of a tiny model."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from support.data import random_dataset
from support.models import tiny_model
from support.training import quiet_arguments


@pytest.fixture(scope="module", autouse=True)
def what_is_there_is_no_garbage() -> None:
    """Accelerate collects garbage after every training. Looking through what Trainers import late, and what earlier
    tests left, would take a sixth of the time of these tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Trainer]:
    """Makes a Trainer; arguments of `TrainingArguments` by name, the rest in `given`."""

    def make(
        dataset: Any = "random",
        model: Any = None,
        given: dict[str, Any] | None = None,
        kind: type[Trainer] = Trainer,
        **arguments: Any,
    ) -> Trainer:
        quiet = quiet_arguments(tmp_path / "run", **{"max_steps": 4, "use_cpu": True} | arguments)
        is_given = model is not None or "model_init" in (given or {})
        return kind(
            model=model if is_given else tiny_model(num_hidden_layers=1),
            args=TrainingArguments(**quiet),
            train_dataset=random_dataset(40) if isinstance(dataset, str) else dataset,
            **given or {},
        )

    return make
