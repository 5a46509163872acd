"""A script that several files of this folder test."""

import importlib
from types import ModuleType

import pytest

from support.commands import REPOSITORY


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, one_core: None) -> ModuleType:
    """`scripts/models/sweep.py`, which compares a step on ranks with the same documents each alone."""
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "models")
    return importlib.import_module("sweep")
