"""The program that loses attention servers says what grows from loss to loss."""

import importlib
from types import ModuleType

import pytest

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
