"""A rank raises, is killed or stops in the middle of a step: the others name it and the place, and leave at once."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

import distca_hf
from support.harm import Harm, finished_steps, train_until_harm
from support.ranks import Outcome, start_ranks


WORLD = 3
HARMED = 1
ATTEMPTS = 3
# Runs of three processes that share the machine: most of their time is waiting.
AT_ONCE = 10
KINDS = ("stop", "kill", "raise")
PHASES = ("agreement", "forward", "backward")
BATCHES = ("placed", "packs")
# What survivors say of the rank.
WORDS = {"raise": "left: ValueError: this batch is bad", "kill": "does not answer", "stop": "does not answer"}
ERRORS = {"raise": ("PeerLostError",), "kill": ("PeerLostError",), "stop": ("StepTimeoutError", "PeerLostError")}

Case = tuple[str, str, str]


def _run(harm: Harm, folder: Path) -> list[Outcome]:
    """Runs into the harm; how the ranks ended."""
    folder.mkdir(parents=True)
    endless = frozenset([HARMED] if harm.kind == "stop" else [])
    return start_ranks(WORLD, train_until_harm, folder, harm, folder, endless=endless)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, list[tuple[Harm, Path, Future]]]]:
    """The same harm at different steps and layers: all runs, some of them at once, the longest first."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started: dict[Case, list[tuple[Harm, Path, Future]]] = {}
        for case in product(KINDS, PHASES, BATCHES):
            kind, phase, batches = case
            harms = [Harm(HARMED, kind, attempt % 3, attempt % 2, phase, batches) for attempt in range(ATTEMPTS)]
            folders = [folder.joinpath(*case, str(attempt)) for attempt in range(ATTEMPTS)]
            started[case] = [
                (harm, place, pool.submit(_run, harm, place)) for harm, place in zip(harms, folders, strict=True)
            ]
        yield started
        pool.shutdown(cancel_futures=True)


def _place(harm: Harm) -> str:
    place = f"micro-batch {harm.step}"
    return place if harm.phase == "agreement" else f"{place}, layer {harm.layer}, {harm.phase}"


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_survivors_name_the_rank_and_the_place_and_leave_without_another_step(
    kind: str, phase: str, batches: str, runs: dict[Case, list[tuple[Harm, Path, Future]]]
) -> None:
    assert len(runs[kind, phase, batches]) == ATTEMPTS
    for harm, folder, run in runs[kind, phase, batches]:
        survivors = [outcome for outcome in run.result() if outcome.rank != HARMED]
        assert len(survivors) == WORLD - 1
        for outcome in survivors:
            assert outcome.exit_code == 1, outcome.output  # it left, and did not wait for a deadline
            assert (folder / "harmed").exists()
            assert finished_steps(folder, outcome.rank) == harm.step, "no step may be taken after the harm"
            assert any(error in outcome.output for error in ERRORS[kind])
            assert _place(harm) in outcome.output
            assert f"rank {HARMED} {WORDS[kind]}" in outcome.output


def _reduce_until_a_rank_is_gone(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    distca_hf.DistCAPlugin().transport(torch.device("cpu"))
    torch.distributed.barrier()
    if rank == HARMED:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(torch.ones(1))


def test_a_rank_that_is_lost_in_a_collective_of_others_is_named_too(tmp_path: Path) -> None:
    outcomes = start_ranks(WORLD, _reduce_until_a_rank_is_gone, tmp_path, tmp_path)

    for outcome in outcomes:
        if outcome.rank != HARMED:
            assert outcome.exit_code == 1
            assert f"distca_hf: rank {HARMED} does not answer" in outcome.output
