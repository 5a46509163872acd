"""A rank raises, is killed or stops in the middle of a step: the others name it and the place, and leave at once."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import distca_hf
from support.harm import Harm, finished_steps, seconds_since_harm, train_until_harm
from support.ranks import start_ranks


WORLD = 3
HARMED = 1
ATTEMPTS = 5
# Five runs of three processes share the machine.
LEAVE_SECONDS = 15.0
PHASES = ("agreement", "forward", "backward")


def _survivors(harm: Harm, folder: Path, deadline: float = 20.0) -> list[str]:
    """Runs into the harm; returns what the survivors said, all of them having left in time without another step."""
    folder.mkdir(parents=True, exist_ok=True)
    endless = frozenset([HARMED] if harm.kind == "stop" else [])
    began = time.time()
    outcomes = start_ranks(
        WORLD, train_until_harm, folder, harm, folder, deadline, timeout_seconds=60.0, endless=endless
    )
    survivors = [outcome for outcome in outcomes if outcome.rank != HARMED]
    for outcome in survivors:
        assert outcome.exit_code == 1, outcome.output
        allowed = LEAVE_SECONDS + (deadline if harm.kind == "stop" else 0.0)
        assert seconds_since_harm(folder, began + outcome.seconds) < allowed
        assert finished_steps(folder, outcome.rank) == harm.step, "no step may be taken after the harm"
    return [outcome.output for outcome in survivors]


def _place(harm: Harm) -> str:
    place = f"micro-batch {harm.step}"
    return place if harm.phase == "agreement" else f"{place}, layer {harm.layer}, {harm.phase}"


def _many(kind: str, phase: str, batches: str, folder: Path, deadline: float = 20.0) -> list[tuple[Harm, list[str]]]:
    """The same harm at different steps and layers, all at once: most of the time is waiting."""
    harms = [Harm(HARMED, kind, attempt % 3, attempt % 2, phase, batches) for attempt in range(ATTEMPTS)]
    with ThreadPoolExecutor(ATTEMPTS) as pool:
        outputs = pool.map(
            lambda attempt: _survivors(harms[attempt], folder / f"{attempt}", deadline), range(ATTEMPTS)
        )
        return list(zip(harms, outputs, strict=True))


@pytest.mark.parametrize("batches", ["placed", "packs"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_raises_is_named_with_its_words(phase: str, batches: str, tmp_path: Path) -> None:
    for harm, outputs in _many("raise", phase, batches, tmp_path):
        for output in outputs:
            assert "PeerLostError" in output
            assert _place(harm) in output
            assert f"rank {HARMED} left: ValueError: this batch is bad" in output


@pytest.mark.parametrize("batches", ["placed", "packs"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_is_named(phase: str, batches: str, tmp_path: Path) -> None:
    for harm, outputs in _many("kill", phase, batches, tmp_path):
        for output in outputs:
            assert "PeerLostError" in output
            assert _place(harm) in output
            assert f"rank {HARMED} does not answer" in output


@pytest.mark.parametrize("batches", ["placed", "packs"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_stopped_rank_is_named_at_the_deadline(phase: str, batches: str, tmp_path: Path) -> None:
    for harm, outputs in _many("stop", phase, batches, tmp_path, deadline=4.0):
        for output in outputs:
            assert "StepTimeoutError" in output or "PeerLostError" in output
            assert _place(harm) in output
            assert f"rank {HARMED} does not answer" in output


def _reduce_until_a_rank_is_gone(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    distca_hf.DistCAPlugin().transport(torch.device("cpu"))
    torch.distributed.barrier()
    if rank == HARMED:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(torch.ones(1))


def test_a_rank_that_is_lost_in_a_collective_of_others_is_named_too(tmp_path: Path) -> None:
    outcomes = start_ranks(WORLD, _reduce_until_a_rank_is_gone, tmp_path, tmp_path, timeout_seconds=30.0)

    for outcome in outcomes:
        if outcome.rank != HARMED:
            assert outcome.exit_code == 1
            assert f"distca_hf: rank {HARMED} does not answer" in outcome.output
