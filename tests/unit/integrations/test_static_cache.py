"""Static caches: their free places are not attended to, and tokens are those of sdpa."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    StaticCache,
)

import distca_hf  # noqa: F401  registers "distca"
from support.models import SIZES, VOCABULARY


TOKENS = 10
TINY: dict[str, Any] = SIZES | {"num_hidden_layers": 2, "initializer_range": 0.3}
WINDOW: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma3": Gemma3TextConfig}
GENERATE: dict[str, Any] = {
    **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None},
    **{"disable_compile": True},
}


def models_of(name: str) -> list[Any]:
    """The same model with distca and with sdpa, fp64. Gemma3 has a window that generation leaves behind."""
    models = []
    for implementation in ("distca", "sdpa"):
        torch.manual_seed(0)
        config = CONFIGS[name](**TINY, **(WINDOW | {"head_dim": 16} if name == "gemma3" else {}))
        models.append(AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double().eval())
    models[0].load_state_dict(models[1].state_dict())
    return models


def batch_of(padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = mask[1, :6] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
def test_generation_with_a_static_cache_gives_the_tokens_of_sdpa(name: str, padded: bool) -> None:
    model, same = models_of(name)
    batch = batch_of(padded)
    tokens = model.generate(**batch, cache_implementation="static", **GENERATE)

    assert torch.equal(tokens, same.generate(**batch, **GENERATE))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
def test_passes_one_after_the_other_have_the_logits_of_one(name: str, padded: bool) -> None:
    """Masks as long as the tokens so far, as long as the cache, or none."""
    model, same = models_of(name)
    batch = batch_of(padded)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = same(**batch, use_cache=False).logits
    longer = torch.nn.functional.pad(mask, (0, 5))
    for given in (mask, longer, None):
        if given is None and padded:
            continue
        cache = StaticCache(config=model.config, max_cache_len=TOKENS + 5)
        logits, seen = [], 0
        for until in (4, 9, TOKENS):
            place = torch.arange(seen, until)[None]
            so_far = given if given is None or given is longer else given[:, :until]
            arguments = {"attention_mask": so_far, "position_ids": place, "past_key_values": cache}
            logits.append(model(ids[:, seen:until], **arguments).logits)
            seen = until
        assert (torch.cat(logits, 1) - expected)[mask.bool()].abs().max() <= 1e-10
