"""The program that loses attention servers says what grows from loss to loss, and which differences are too large."""

import importlib
import math
from types import ModuleType

import pytest

from distca_hf.comm.live_servers import MOST_LOSSES, LostServers
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
    ("differences", "largest"),
    [([math.nan, 0.0], math.nan), ([0.0, math.nan], math.nan), ([0.0, 0.2], 0.2), ([math.inf, 0.0], math.inf)],
)
def test_a_difference_that_is_large_or_no_number_is_not_within_limits(
    program: ModuleType, differences: list[float], largest: float
) -> None:
    assert program.largest(differences) == pytest.approx(largest, nan_ok=True)
    assert not program.within(differences, 0.1)
    assert program.within([0.0, 0.1], 0.1)


@pytest.mark.parametrize(("device", "trainers", "tokens"), [("cpu", 1, 150), ("cpu", 2, 96), ("cuda", 1, 32_768)])
def test_trainers_hold_the_longest_document(
    monkeypatch: pytest.MonkeyPatch, device: str, trainers: int, tokens: int
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "faults")
    assert importlib.import_module("lose_servers_train").capacity_tokens(device, trainers) == tokens


def test_a_server_is_lost_only_behind_a_step_that_counted_with_it(program: ModuleType) -> None:
    step, joined = "{'loss': '4.8'}\n", "attention server 0 (start 1) takes part from now on\n"

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
