"""A rank raises, is killed or stops in the middle of a step, skips a batch or has one more: the others name it and the
place, and leave at once."""

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

import distca_hf
from support.apart import WHERE, Apart, hurry, train
from support.harm import Harm, finished_steps, train_until_harm
from support.ranks import Outcome, run_ranks, start_ranks


WORLD = 3
HARMED = 1
# Runs of three processes that share the machine: most of their time is waiting.
AT_ONCE = 10
KINDS = ("stop", "kill", "raise")
PHASES = ("agreement", "forward", "backward")
BATCHES = ("placed", "packs")


def pairs(kinds: Sequence[str], places: Sequence[str]) -> list[tuple[str, str, str]]:
    """Every kind at every place; batches alternate."""
    return [
        (kind, place, BATCHES[(one + other) % 2])
        for one, kind in enumerate(kinds)
        for other, place in enumerate(places)
    ]


HARMS = pairs(KINDS, PHASES)
APART = pairs(("skips", "has one more", "exits"), WHERE)
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
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, tuple[Harm, Path, Future]]]:
    """Harms at different steps and layers: all runs, some of them at once, the longest first."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started: dict[Case, tuple[Harm, Path, Future]] = {}
        for number, case in enumerate(HARMS):
            kind, phase, batches = case
            harm, place = Harm(HARMED, kind, number % 3, number // 2 % 2, phase, batches), folder.joinpath(*case)
            started[case] = harm, place, pool.submit(_run, harm, place)
        yield started
        pool.shutdown(cancel_futures=True)


def _place(harm: Harm) -> str:
    place = f"micro-batch {harm.step}"
    return place if harm.phase == "agreement" else f"{place}, layer {harm.layer}, {harm.phase}"


@pytest.mark.parametrize(("kind", "phase", "batches"), HARMS)
def test_survivors_name_the_rank_and_the_place_and_leave_without_another_step(
    kind: str, phase: str, batches: str, runs: dict[Case, tuple[Harm, Path, Future]]
) -> None:
    harm, folder, run = runs[kind, phase, batches]
    survivors = [outcome for outcome in run.result() if outcome.rank != HARMED]
    assert len(survivors) == WORLD - 1
    for outcome in survivors:
        assert outcome.exit_code == 1, outcome.output  # it left, and did not wait for a deadline
        assert (folder / "harmed").exists()
        assert finished_steps(folder, outcome.rank) == harm.step, "no step may be taken after the harm"
        assert any(error in outcome.output for error in ERRORS[kind])
        assert _place(harm) in outcome.output
        assert f"rank {HARMED} {WORDS[kind]}" in outcome.output


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Apart, Future]]:
    """Runs in which a rank does something else than the others, some of them at once. Deadlines are the default ones;
    `scripts/faults/ranks_apart.py` has all kinds, places, batches and numbers of ranks, at the usual pace."""
    folder = tmp_path_factory.mktemp("apart")
    cases = [Apart(*case, HARMED) for case in APART]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            one: pool.submit(start_ranks, WORLD, train, folder / str(at), one, folder / str(at), True, {})
            for at, one in enumerate(cases)
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("kind", "where", "batches"), APART)
def test_ranks_that_wait_for_one_that_went_elsewhere_name_it_long_before_a_deadline(
    kind: str, where: str, batches: str, apart: dict[Apart, Future]
) -> None:
    case = Apart(kind, where, batches, HARMED)
    for outcome in apart[case].result():
        if outcome.rank != HARMED:
            assert outcome.exit_code == 1, outcome.output
            assert any(words in outcome.output for words in case.words()), outcome.output


def _wait_in_other_code(other_waits: bool) -> tuple[str, list[bool]]:
    """One rank comes late, or waits for a broadcast; the others wait in DDP's backward pass for its gradients."""
    hurry()
    transport = distca_hf.DistCAPlugin().transport(torch.device("cpu"))
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    counted = []
    for transport._on_gpu in (True, False):
        transport._other_groups = [], []
        counted.append(transport.started()[1] > 0)
    loss = wrapped(torch.ones(1, 2)).sum()
    if torch.distributed.get_rank() == HARMED:
        if other_waits:
            torch.distributed.broadcast(torch.ones(1), src=0)
        while len(transport._whereabouts.shown()) < WORLD:  # all have come no further for a while
            time.sleep(0.05)
        for _ in range(20):
            transport._whereabouts.look()  # as if much more time had passed
            transport._whereabouts._stalled_seconds += 1
    loss.backward()
    return str(transport._whereabouts.in_vain), counted


@pytest.mark.parametrize("other_waits", [False, True], ids=["slow", "waits"])
def test_ranks_that_wait_in_other_code_alone_end_unless_one_is_only_slow(other_waits: bool, tmp_path: Path) -> None:
    outcomes = start_ranks(WORLD, _wait_in_other_code, tmp_path, other_waits)

    for outcome in outcomes:
        if not other_waits:
            # Collectives of gloo count, but not on GPUs, where threads start them while the training goes on.
            assert (outcome.exit_code, outcome.result) == (0, ("None", [False, True])), outcome.output
            continue
        assert outcome.exit_code == 1, outcome.output
        places = (
            r"different places: .*test_lost_rank.py:\d+ .* on ranks 0 and 2, .*test_lost_rank.py:\d+ .* on rank 1\."
        )
        assert re.search(places, outcome.output), outcome.output
    ended_by_detector = [
        outcome for outcome in outcomes if "before its first micro-batch: ranks wait" in outcome.output
    ]
    assert bool(ended_by_detector) == other_waits


def _open_a_group_while_it_is_looked_at() -> tuple[bool, int]:
    """Whether the detector's thread lives on, and how many collectives of the new group are counted."""
    hurry()
    detector = (transport := distca_hf.DistCAPlugin().transport(torch.device("cpu")))._whereabouts
    register, before = distributed_c10d._new_process_group_helper, transport.started()[1]

    def register_slowly(*args: Any, **settings: Any) -> Any:
        registered, looks = register(*args, **settings), detector._looks
        while detector._looks < looks + 2 and detector._thread.is_alive():  # torch does not know its ranks yet
            time.sleep(0.01)
        return registered

    distributed_c10d._new_process_group_helper = register_slowly
    torch.distributed.all_reduce(torch.ones(1), group=torch.distributed.new_group())
    return detector._thread.is_alive(), transport.started()[1] - before


def test_a_group_may_open_while_the_detector_looks(tmp_path: Path) -> None:
    assert run_ranks(2, _open_a_group_while_it_is_looked_at, tmp_path) == [(True, 1)] * 2


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


def _open_groups_where_others_ended() -> set[int]:
    """How many collectives of a group of all ranks are counted, while other groups end and leave their memory."""
    transport, grown = distca_hf.DistCAPlugin().transport(torch.device("cpu")), set()
    for _ in range(60):
        own, *_ = [torch.distributed.new_group([rank]) for rank in (0, 1)][torch.distributed.get_rank() :]
        before = transport.started()[1]
        torch.distributed.destroy_process_group(own)
        del own
        of_all = torch.distributed.new_group()
        torch.distributed.all_reduce(torch.ones(1), group=of_all)
        grown.add(transport.started()[1] - before)
        torch.distributed.destroy_process_group(of_all)
        del of_all
        transport.started()
    return grown


def test_a_group_in_the_memory_of_another_one_counts(tmp_path: Path) -> None:
    assert run_ranks(2, _open_groups_where_others_ended, tmp_path) == [{1}] * 2
