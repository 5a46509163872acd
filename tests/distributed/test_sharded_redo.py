"""Optimizer steps that run again on two ranks, whose gradients are sharded: they leave no trace."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_ranks
from support.redoing import Script, assert_equal_training, break_attention, initial_model, train_with_script


def both(folder: Path, wrap: str, accumulation: int, packs: bool) -> tuple[Any, Any, int]:
    """The same training undisturbed, and with steps that run again."""
    models = initial_model(), initial_model()  # the second one would be sharded by what the first one configures
    train = partial(train_with_script, folder=folder, wrap=wrap, accumulation=accumulation, packs=packs, steps=3)
    undisturbed, script = train(None, model=models[0]), Script(failed={1, 4}, from_call=4)
    break_attention(script, setattr)
    return undisturbed, train(script, model=models[1]), script.runs


@pytest.mark.parametrize(
    ("wrap", "accumulation", "packs"),
    [
        ("ddp", 3, True),
        ("fsdp1", 2, False),
        ("fsdp2", 3, False),
        ("zero1", 1, False),
        ("zero2 offloaded", 3, True),
        ("zero3", 3, True),
    ],
)
def test_sharded_gradients(wrap: str, accumulation: int, packs: bool, tmp_path: Path) -> None:
    ranks = run_ranks(2, both, tmp_path, tmp_path, wrap, accumulation, packs)

    for undisturbed, redone, runs in ranks:
        assert_equal_training(redone, undisturbed)
        assert runs == 3 + 2
        assert undisturbed[1]
