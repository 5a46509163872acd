"""Models with sliding windows shorter than their documents, which are cut between ranks: a step on ranks has the loss
and gradients of every document alone."""

from dataclasses import fields
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

import distca_hf
from distca_hf.analysis.check.tiny_config import WINDOWS
from distca_hf.analysis.check.trial import DOCUMENT_TOKENS
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.integrations.models.check import refusals
from distca_hf.integrations.models.decoder_layers import layer_masks_of
from distca_hf.integrations.models.structure import attention_layers
from support.sweeping import assert_works, config_class_of
from support.versions import classes_of_today


# Model types of `...ForCausalLM` that differ in how layers get their windows, each with the largest relative
# difference: Gemma 4 has scores without a scale, which rounding in fp32 changes more.
MODEL_TYPES = {
    "afmoe": 1e-5,
    "cohere2": 1e-5,
    "exaone4": 1e-5,
    "gemma2": 1e-5,
    "gemma3n_text": 1e-5,
    "gemma4_text": 5e-5,
    "mimo_v2_flash": 1e-5,
    "mistral": 1e-5,
    "modernbert-decoder": 1e-5,
    "olmo3": 1e-5,
}
WINDOW_TOKENS, LONGEST_TOKENS = 16, 80
# Transformers 5.17 cannot build the first two with few layers, and the layers of the third look no attention up.
BROKEN = {"cohere_compass", "cohere_compass_text", "moshi"}
BROKEN = BROKEN if Version(transformers.__version__).release < (5, 19) else set()
# Those that older Transformers have in a form that is refused.
OF_TODAY = ("modernbert-decoder",)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[classes_of_today] if name in OF_TODAY else []) for name in MODEL_TYPES],
)
def test_step_on_ranks_is_that_of_every_document_alone(model_type: str, sweep: ModuleType) -> None:
    assert_works(sweep, sweep.TEXT, model_type, MODEL_TYPES[model_type])


def test_windows_are_planned_as_the_first_pass_has_them(sweep: ModuleType) -> None:
    """Of all other classes for text that have windows; for those above the sweep compares them as well."""
    sweep.be_quiet()
    planned: dict[str, list[int | None]] = {}
    for config_class in sweep.TEXT.config_classes():
        name = config_class.model_type
        if name in MODEL_TYPES or name in BROKEN or WINDOWS.isdisjoint(field.name for field in fields(config_class)):
            continue
        model = sweep.tiny_model(config_class).build("distca")
        if not model._supports_flash_attn or refusals(model, LONGEST_TOKENS):  # the first is quick
            continue
        windows = sweep.windows(model)
        assert [one for one in windows.items() if one[1][0] != one[1][1]] == [], name
        planned[name] = [mask.window_tokens for mask, _ in windows.values()]

    assert planned["exaone_moe"] == [WINDOW_TOKENS, None]
    assert planned.get("kolibri1") in (None, planned["exaone_moe"]), "which Transformers 5.17 does not have"
    assert planned["phimoe"] == [WINDOW_TOKENS] * 2, "its windows are in the mask only"
    assert max(DOCUMENT_TOKENS) == LONGEST_TOKENS > WINDOW_TOKENS


def test_work_of_full_layers_is_even_where_classes_set_a_window_on_them(sweep: ModuleType) -> None:
    """EXAONE 4 passes it on in the other layers only."""
    masks = layer_masks_of(sweep.tiny_model(config_class_of(sweep.TEXT, "exaone4")).build("distca"))
    planner, draw = PlacedPlanner(DistCAConfig(tokens_per_rank=2048), 2, layer_masks=masks), np.random.RandomState(0)
    for _ in range(12):
        lengths = draw.choice([40, 900, 1500], size=60, p=[0.86, 0.07, 0.07])
        work = planner.layout(lengths[np.cumsum(lengths) <= planner.capacity_tokens]).rank_work_of(CAUSAL_MASK)
        assert work.max() <= 1.01 * work.mean()


def test_windows_that_differ_are_told(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "masks_of_layers", lambda model: dict.fromkeys(attention_layers(model), Mask(8)))
    outcome = sweep.examine(config_class_of(sweep.TEXT, "mistral"))

    assert (outcome.verdict, outcome.detail.partition(" ")[2]) == (
        sweep.WRONG,
        f"attends with a window of {WINDOW_TOKENS} tokens and is planned with a window of 8 tokens",
    )


SHARING = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW_TOKENS,
    "use_cache": False,
}


def _sharing() -> Any:
    """A Gemma 4 whose last layers have the keys of earlier ones, as E2B and E4B; newer ones leave out
    queries whose logits nobody asks for."""
    if not hasattr(transformers, "Gemma4ForCausalLM"):
        pytest.skip("this Transformers has no Gemma 4")
    torch.manual_seed(0)
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SHARING)).double()


def test_layers_that_share_keys_train() -> None:
    model, plain = _sharing().train(), _sharing().train()
    distca_hf.enable(model, distca_hf.DistCAPlugin())
    ids = torch.randint(0, 64, (1, 50), generator=torch.Generator().manual_seed(0))
    for one in (model, plain):
        one(input_ids=ids, labels=ids).loss.backward()

    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("padding", [0, 7])
def test_layers_that_share_keys_generate(padding: int) -> None:
    model, plain = _sharing().eval(), _sharing().eval()
    distca_hf.enable(model, distca_hf.DistCAPlugin())
    ids = torch.randint(3, 64, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    with torch.no_grad():
        for kept in (0, 1, 3):
            own, expected = (
                one(input_ids=ids, attention_mask=mask, logits_to_keep=kept).logits for one in (model, plain)
            )
            seen = mask[:, -own.shape[1] :].bool()
            torch.testing.assert_close(own[seen], expected[seen], rtol=1e-9, atol=1e-12)
    how = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0}

    assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))
