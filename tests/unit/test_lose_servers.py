"""The program that loses attention servers says what grows from loss to loss, and which differences are too large."""

import importlib
import math
import signal
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from distca_hf.servers.heartbeats import MOST_LOSSES, LostServers
from support import lost_servers_training
from support.commands import REPOSITORY


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "faults")
    return importlib.import_module("lose_servers")


def test_sizes_that_only_vary_do_not_grow(program: ModuleType) -> None:
    files = [60, 68, 62, 75, 70, 66, 74, 69, 72, 74]
    sizes = [program.Sizes(2225 + 4 * at, 16_458 + 30 * at, 17, number) for at, number in enumerate(files)]

    assert program.grown(sizes) == {}


def test_every_size_that_grows_is_named(program: ModuleType) -> None:
    sizes = [program.Sizes(1000 + 40 * at, 10_000 + 300 * at, 17 + at, 60 + 3 * at) for at in range(10)]

    assert program.grown(sizes) == pytest.approx({"mebibytes": 40, "gpu_mebibytes": 300, "threads": 1, "files": 3})


def test_the_first_loss_and_a_few_say_nothing(program: ModuleType) -> None:
    settled = [program.Sizes(100, 0, 10, 50), *[program.Sizes(2000, 9000, 30, 90)] * 8]

    assert program.grown(settled) == {}
    assert program.grown([program.Sizes(100 * at, 0, at, at) for at in range(1, 5)]) == {}


def test_a_thread_for_every_third_loss_is_growth_and_slopes_are_told_before(program: ModuleType) -> None:
    sizes = [program.Sizes(2000, 9000, 17 + at // 3, 70) for at in range(10)]

    assert [*program.grown(sizes)] == ["threads"]
    assert program.grown(sizes[:4]) == {}
    assert program.slopes(sizes[:4]) == pytest.approx({"mebibytes": 0, "gpu_mebibytes": 0, "threads": 0.5, "files": 0})
    assert program.slopes(sizes[:2]) == {}


@pytest.mark.parametrize(
    ("grows", "told"),
    [(1, "files: +9.00 from loss to loss, which is growth\nGROWTH of files: exit status 1\n"), (0, "nothing grows\n")],
)
def test_growth_is_told_before_the_training_without_servers(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], grows: int, told: str
) -> None:
    trainings = []

    def train(options: Namespace, folder: Path, servers: int, steps: int = 0) -> object:
        trainings.append((servers, steps, capsys.readouterr().out))
        sizes = [program.Sizes(2000, 0, 17, 60 + 9 * grows * at) for at in range(6)]
        return sizes, {"steps": 7, "losses": [4.0], "norms": [1.0]}

    monkeypatch.setattr(program, "train", train)
    status = program.compare(Namespace(servers=2, device="cpu"), Path())

    (*first, nothing), (*second, before) = trainings
    assert (first, nothing, second, status) == ([2, 0], "", [0, 7], grows)
    assert before.endswith(f"{told}the same 7 steps follow without servers\n")
    assert capsys.readouterr().out == (
        "largest difference of a loss 0.00e+00 (step 1 of 1), of a norm, as a part of it, 0.00e+00 (step 1 of 1)\n"
    )


def test_sizes_are_told_at_each_loss(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = []
    server = Namespace(pid=5, send_signal=lambda number: None)
    monkeypatch.setattr(program.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(program, "_sizes", lambda job, device: program.Sizes(533, 900, 16, 27))
    monkeypatch.setattr(program, "_joined", lambda *_: shown.append(capsys.readouterr().out) or server)
    log = tmp_path / "log"
    log.write_text("{'loss': '4.8'}\n" * 12 + "{'train_loss': '4.8'}\n")
    sizes = program.lose(Namespace(seed=0, how="both", losses=2, device="cuda"), None, log)

    told = "a trainer has 533 MiB, 900 MiB of the GPU, 16 threads, 27 files after 12 steps\n"
    assert shown[1] == f"loss 1: {signal.SIGKILL.name} to process 5\nloss 1: {told}"
    assert shown[2].endswith(f"loss 2: {signal.SIGSTOP.name} to process 5\nloss 2: {told}")
    assert len(sizes) == 2


@pytest.mark.parametrize(
    ("differences", "largest"),
    [
        ([math.nan, 0.0], "nan (step 1 of 2)"),
        ([0.0, math.nan], "nan (step 2 of 2)"),
        ([0.0, 0.2], "2.00e-01 (step 2 of 2)"),
        ([math.inf, 0.0, 1.0], "inf (step 1 of 3)"),
    ],
)
def test_a_difference_that_is_large_or_no_number_is_not_within_limits(
    program: ModuleType, differences: list[float], largest: str
) -> None:
    assert program.largest(differences) == largest
    assert not program.within(differences, 0.1)
    assert program.within([0.0, 0.1], 0.1)


@pytest.mark.parametrize(("device", "trainers", "tokens"), [("cpu", 1, 150), ("cpu", 2, 96), ("cuda", 1, 32_768)])
def test_trainers_hold_the_longest_document(
    monkeypatch: pytest.MonkeyPatch, device: str, trainers: int, tokens: int
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "faults")
    assert lost_servers_training.capacity_tokens(device, trainers) == tokens


def test_a_server_is_lost_only_behind_a_step_that_counted_with_it(program: ModuleType) -> None:
    step, joined = "{'loss': '4.8'}\n", "attention server 0 (restart 1) takes part from now on\n"

    assert not program.has_served("", 0)
    assert program.has_served(step, 0)
    assert not program.has_served(step * 9, 1)
    assert not program.has_served(step + joined + step, 1)  # the line of the step before it joined
    assert program.has_served(step + joined + step * 2, 1)
    assert not program.has_served(step + joined + step * 2 + joined, 1)


def test_words_of_a_server_that_is_left_out_are_those_of_trainers(
    program: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    servers = LostServers()
    for start in range(MOST_LOSSES):
        servers.note(0, start)

    assert program.LEFT_OUT in caplog.text
