"""Models with sliding windows shorter than their documents, which are cut between ranks: a step on ranks has the loss
and gradients of every document alone."""

from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from distca_hf.analysis.check.trial import DOCUMENT_TOKENS
from distca_hf.integrations.models.layer_masks import layer_masks_of
from support.sweeping import assert_works, config_class_of


# Model types of `...ForCausalLM`, each with the largest relative difference: Gemma 4 has scores without a scale, which
# rounding in fp32 changes more.
MODEL_TYPES = {
    "afmoe": 1e-5,
    "cohere2": 1e-5,
    "exaone4": 1e-5,
    "flint": 1e-5,
    "gemma2": 1e-5,
    "gemma3_text": 1e-5,
    "gemma3n_text": 1e-5,
    "gemma4_text": 5e-5,
    "gpt_oss": 1e-5,
    "granite_swa": 1e-5,
    "mimo_v2_flash": 1e-5,
    "ministral": 1e-5,
    "mistral": 1e-5,
    "modernbert-decoder": 1e-5,
    "olmo3": 1e-5,
}
WINDOW_TOKENS, LONGEST_TOKENS = 16, 80


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_step_on_ranks_is_that_of_every_document_alone(model_type: str, sweep: ModuleType) -> None:
    assert_works(sweep, sweep.TEXT, model_type, MODEL_TYPES[model_type])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_windows_are_shorter_than_documents(model_type: str, sweep: ModuleType) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(sweep.tiny_config(config_class_of(sweep.TEXT, model_type)))

    assert WINDOW_TOKENS in {mask.window_tokens for mask, _ in layer_masks_of(model)}
    assert max(DOCUMENT_TOKENS) == LONGEST_TOKENS
