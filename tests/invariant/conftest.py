"""Trainings that are compared: initial models, and curves of one process with sdpa."""

from pathlib import Path

import pytest

from support.training import Curve, save_initial_model


@pytest.fixture(scope="session")
def initial_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_initial_model(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "qwen3")}


@pytest.fixture(scope="session")
def references() -> dict[object, Curve]:
    """Curves of one process with sdpa, filled as they are needed."""
    return {}
