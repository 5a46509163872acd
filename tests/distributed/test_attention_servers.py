"""Attention servers as real processes: training with them gives the numbers of sdpa in one process."""

from pathlib import Path

import pytest

from support.ranks import run_ranks
from support.training import Curve, Run, assert_same_curve, save_initial_model, train, train_reference


STEPS = 6


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_initial_model("llama", tmp_path_factory.mktemp("initial"))


@pytest.fixture(scope="module")
def references(initial: Path) -> dict[int, Curve]:
    return {accumulation: train_reference(initial, accumulation, False, STEPS) for accumulation in (1, 3)}


def _train(run: Run, folder: Path, initial: Path) -> Curve:
    return train(run, initial)


@pytest.mark.parametrize(
    ("servers", "run"),
    [
        (1, Run("llama", 1, "none", "plain", 1, steps=STEPS)),
        (1, Run("llama", 2, "ddp", "plain", 3, steps=STEPS)),
        (2, Run("llama", 2, "fsdp2", "trainer", 1, checkpointing="", steps=STEPS)),
    ],
    ids=lambda value: (
        "-".join(map(str, (value.world_size, value.wrap, value.loop))) if isinstance(value, Run) else f"{value}"
    ),
)
def test_losses_are_those_of_one_process(
    servers: int,
    run: Run,
    initial: Path,
    references: dict[int, Curve],
    tmp_path: Path,
    record_property: pytest.FixtureRequest,
) -> None:
    curves = run_ranks(run.world_size, _train, tmp_path, run, tmp_path, initial, servers=servers)

    assert_same_curve(curves[0], references[run.accumulation], record_property)
