"""Multimodal models on documents of text: a step on ranks has the loss and gradients of every document alone."""

from types import ModuleType

import pytest

from support.sweeping import assert_works
from support.versions import classes_of_today


# Model types of `...ForConditionalGeneration`. Positions of some have three axes; towers of some see sound as well.
# Others train in `tests/distributed/test_moved_images.py`, with images and text.
MODEL_TYPES = ("gemma3", "muse_glimmer", "qwen2_5_omni_thinker", "qwen2_5_vl", "smolvlm")
# Those that older Transformers have in a form that is refused.
OF_TODAY = ("gemma3", "qwen2_5_omni_thinker")


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[classes_of_today] if name in OF_TODAY else []) for name in MODEL_TYPES],
)
def test_step_on_ranks_is_that_of_every_document_alone(model_type: str, sweep: ModuleType) -> None:
    assert_works(sweep, sweep.IMAGES, model_type)
