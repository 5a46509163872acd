"""Multimodal models on documents of text: a step on ranks has the loss and gradients of every document alone."""

from types import ModuleType

import pytest

from support.sweeping import assert_works


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


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_step_on_ranks_is_that_of_every_document_alone(model_type: str, sweep: ModuleType) -> None:
    assert_works(sweep, sweep.IMAGES, model_type)
