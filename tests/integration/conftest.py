"""Scripts that several files of this folder test."""

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest

from support.commands import REPOSITORY


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, one_core: None) -> ModuleType:
    """`scripts/models/sweep.py`, which compares a step on ranks with the same documents each alone: here on three."""
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "models")
    sweep = importlib.import_module("sweep")
    monkeypatch.setattr(sweep, "RANKS", (3,))
    return sweep


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a program of `scripts/benchmarks`, or a module that programs share, by name."""
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    return importlib.import_module
