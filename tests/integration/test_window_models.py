"""Models with sliding windows shorter than their documents, which are cut between ranks: a step on ranks has the loss
and gradients of every document alone."""

from dataclasses import fields
from types import ModuleType

import pytest

from distca_hf.analysis.check.tiny_config import WINDOWS
from distca_hf.analysis.check.trial import DOCUMENT_TOKENS
from distca_hf.integrations.models.check import refusals
from support.sweeping import assert_works


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


def test_windows_are_planned_as_the_first_pass_has_them(sweep: ModuleType) -> None:
    """Of all classes for text that have windows."""
    sweep.be_quiet()
    planned: dict[str, list[int | None]] = {}
    for config_class in sweep.TEXT.config_classes():
        has_windows = not WINDOWS.isdisjoint(field.name for field in fields(config_class))
        if not has_windows and config_class.model_type not in MODEL_TYPES:
            continue
        model = sweep.build(config_class, "distca")
        if refusals(model, LONGEST_TOKENS):
            continue
        windows = sweep.windows(model)
        assert [one for one in windows.items() if one[1][0] != one[1][1]] == [], config_class.model_type
        planned[config_class.model_type] = [tokens for tokens, _ in windows.values()]

    assert all(WINDOW_TOKENS in planned[model_type] for model_type in MODEL_TYPES)
    assert planned["exaone4"] == planned["exaone_moe"] == [WINDOW_TOKENS, None]
    assert max(DOCUMENT_TOKENS) == LONGEST_TOKENS, "windows are shorter than documents"
