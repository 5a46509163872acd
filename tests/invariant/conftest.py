"""Trainings that are compared."""

import pytest

from support.training import References, save_initial_model


KINDS = "llama", "qwen3", "qwen3_moe", "gemma3", "gpt_oss", "qwen3_5"


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References({kind: save_initial_model(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS})
