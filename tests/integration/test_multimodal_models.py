"""Multimodal models on documents of text: a step on ranks has the loss and gradients of every document alone."""

import importlib
from types import ModuleType

import pytest

from support.commands import REPOSITORY


# Model types of `...ForConditionalGeneration`. Positions of some have three axes; towers of some see sound as well.
MODEL_TYPES = (
    "gemma3",
    "internvl",
    "kimi_k25",
    "mistral3",
    "muse_glimmer",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen3_vl",
    "smolvlm",
)


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "models")
    return importlib.import_module("sweep")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_step_on_ranks_is_that_of_every_document_alone(model_type: str, sweep: ModuleType) -> None:
    if model_type not in {config_class.model_type for config_class in sweep.IMAGES.mapping}:
        pytest.skip(f"this Transformers has no image-text-to-text class of type {model_type}")
    (config_class,) = sweep.IMAGES.config_classes([model_type])
    outcome = sweep.examine(config_class, sweep.IMAGES)

    assert outcome.verdict == sweep.WORKS, outcome.detail
    assert float(outcome.detail) <= 1e-5
