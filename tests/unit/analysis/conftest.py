"""Settings for tests of commands."""

import pytest

from distca_hf.analysis import answer as estimates


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `distca plan` simulate one step of every number of tokens per rank, not twenty."""
    monkeypatch.setattr(estimates, "MOST_STEPS", 1)
