"""Settings for tests of commands."""

import pytest

from distca_hf.analysis import answer as estimates
from distca_hf.analysis import epoch, given


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `distca plan` simulate one step of every number of tokens per rank, not twenty."""
    monkeypatch.setattr(estimates, "MOST_STEPS", 1)


@pytest.fixture
def few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `distca plan` plan few steps of an epoch; how many it usually plans is in `test_epoch.py`."""
    for module in (epoch, given):
        monkeypatch.setattr(module, "MOST_PLANNED_RANKS", 64)
