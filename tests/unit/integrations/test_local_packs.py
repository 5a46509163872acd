"""Packed documents that one rank attends to by itself never see each other, whatever a model gives to its layers."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    GemmaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    LlamaConfig,
    PersimmonConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from distca_hf.errors import PackingError, UnsupportedAttentionError
from support.models import SIZES, VOCABULARY
from support.versions import attends_by_name


TOKENS = 12
OFFSETS = (0, 5, 9, 12)
POSITIONS = torch.cat([torch.arange(stop - start) for start, stop in pairwise(OFFSETS)])[None]
TINY: dict[str, Any] = SIZES | {"num_hidden_layers": 2, "initializer_range": 0.3}
GPT: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "initializer_range": 0.3},
    **{"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
}
# The first three give positions to their layers, the others do not.
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "gemma": GemmaConfig(head_dim=16, **TINY),
    "gpt2": GPT2Config(**GPT),
    "gpt_bigcode": GPTBigCodeConfig(**GPT),
    "persimmon": PersimmonConfig(
        **{name: value for name, value in TINY.items() if name != "num_key_value_heads"}, hidden_dropout=0.0
    ),
    "ctrl": CTRLConfig(vocab_size=VOCABULARY, n_embd=64, n_head=4, n_layer=2, dff=64, n_positions=64, resid_pdrop=0.0),
}


NAMES = [*(name for name in CONFIGS if name != "ctrl"), pytest.param("ctrl", marks=attends_by_name)]


def models_of(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model with distca and with sdpa, fp64, to evaluate."""
    models = []
    for implementation in ("distca", "sdpa"):
        torch.manual_seed(0)
        config = copy.deepcopy(CONFIGS[name])
        models.append(AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double().eval())
    models[0].load_state_dict(models[1].state_dict())
    return models[0], models[1]


def random_ids(batch: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, TOKENS), generator=torch.Generator().manual_seed(1))


def documents_alone(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    logits = [model(ids[:, start:stop], use_cache=False).logits for start, stop in pairwise(OFFSETS)]
    return torch.cat(logits, 1)


def largest(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference."""
    return (left - right).abs().max().item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("mask", [True, False], ids=["ones", "no mask"])
def test_packed_documents_have_the_logits_of_each_alone(name: str, use_cache: bool, mask: bool) -> None:
    model, same = models_of(name)
    ids = random_ids()
    attention_mask = torch.ones_like(ids) if mask else None
    logits = model(ids, position_ids=POSITIONS, attention_mask=attention_mask, use_cache=use_cache).logits

    assert largest(logits, documents_alone(same, ids)) <= 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_train_with_the_gradients_of_each_alone(name: str) -> None:
    model, same = models_of(name)
    ids = random_ids()
    for logits in (model(ids, position_ids=POSITIONS).logits, documents_alone(same, ids)):
        logits.square().sum().backward()

    for (parameter, ours), theirs in zip(model.named_parameters(), same.named_parameters(), strict=True):
        if ours.grad is not None:
            scale = 1 + theirs[1].grad.abs().max().item()
            assert largest(ours.grad, theirs[1].grad) <= 1e-6 * scale, parameter  # norms are computed in fp32


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_documents_in_padded_rows_have_the_logits_of_each_alone(name: str, side: str) -> None:
    """Packs that a collator pads to one length."""
    model, same = models_of(name)
    ids = random_ids()
    pad, ones = torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)
    put = (
        (lambda tokens: torch.cat([pad, tokens], 1)) if side == "left" else lambda tokens: torch.cat([tokens, pad], 1)
    )
    logits = model(put(ids), position_ids=put(POSITIONS), attention_mask=put(ones), use_cache=False).logits

    assert largest(logits[put(ones).bool()], documents_alone(same, ids)[0]) <= 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_plain_rows_are_one_document_each(name: str) -> None:
    """With a cache and without, in one pass and in two, and in generation."""
    model, same = models_of(name)
    ids = random_ids(3)
    expected = same(ids, use_cache=False).logits
    for arguments in ({"use_cache": True}, {"use_cache": False}, {"attention_mask": torch.ones_like(ids)}):
        assert largest(model(ids, **arguments).logits, expected) <= 1e-10
    start = model(ids[:, :7], use_cache=True)
    assert largest(model(ids[:, 7:], past_key_values=start.past_key_values).logits, expected[:, 7:]) <= 1e-10
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **how), same.generate(ids, **how))


@pytest.mark.parametrize("name", NAMES)
def test_a_document_that_begins_behind_cached_tokens_is_refused(name: str) -> None:
    model, _ = models_of(name)
    cache = model(random_ids()[:, :4], use_cache=True).past_key_values
    with pytest.raises(PackingError, match=r"row 0, token 2: a document begins \(position 0\) after tokens"):
        model(random_ids()[:, :4], position_ids=torch.tensor([[4, 5, 0, 1]]), past_key_values=cache)


@pytest.mark.parametrize("name", ["llama", "gpt_bigcode"])
@pytest.mark.parametrize("mask", [True, False], ids=["ones", "no mask"])
def test_part_of_a_document_is_refused(name: str, mask: bool) -> None:
    model, _ = models_of(name)
    ids = random_ids()
    positions = torch.arange(7, 7 + TOKENS)[None]
    with pytest.raises(PackingError, match=r"at position 7 instead of 0.*earlier tokens \(cache\)"):
        model(ids, position_ids=positions, attention_mask=torch.ones_like(ids) if mask else None)


@pytest.mark.parametrize("name", ["llama", "gpt_bigcode"])
def test_compiled_packs_have_the_logits_of_each_alone(name: str) -> None:
    model, same = models_of(name)
    ids = random_ids()
    logits = torch.compile(model, backend="eager")(ids, position_ids=POSITIONS, use_cache=False).logits

    assert largest(logits, documents_alone(same, ids)) <= 1e-10


def test_compiled_packs_that_nobody_sees_are_refused() -> None:
    """Transformers looks for documents only without a cache, and this model gives no positions to its layers."""
    model, _ = models_of("gpt_bigcode")
    with pytest.raises(UnsupportedAttentionError, match="use_cache=False"):
        torch.compile(model, backend="eager")(random_ids(), position_ids=POSITIONS, use_cache=True)


NUMBERS = torch.tensor([[1] * 5 + [2] * 4 + [3] * 3])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
def test_mask_that_numbers_documents_is_refused_without_their_positions(name: str, padded: bool) -> None:
    model, _ = models_of(name)
    numbers = NUMBERS.masked_fill(NUMBERS == 3, 0) if padded else NUMBERS
    with pytest.raises(PackingError, match="attention_mask numbers"):
        model(random_ids(), attention_mask=numbers)


@pytest.mark.parametrize("name", NAMES)
def test_mask_that_numbers_documents_may_come_with_their_positions(name: str) -> None:
    model, same = models_of(name)
    ids = random_ids()
    logits = model(ids, attention_mask=NUMBERS, position_ids=POSITIONS).logits

    assert largest(logits, documents_alone(same, ids)) <= 1e-10
