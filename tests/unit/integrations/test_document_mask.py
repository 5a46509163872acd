"""What stands in for a mask: other masks than causal ones are refused by layer, with a plan, too, and nothing is
computed that a plan says."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    masking_utils,
)
from transformers.models.llama import modeling_llama

import distca_hf
from distca_hf.errors import PackingError, UnsupportedAttentionError
from distca_hf.integrations import mask as mask_module
from distca_hf.integrations.mask import RowMask, document_mask
from support.data import random_dataset
from support.models import SIZES, VOCABULARY, tiny_model
from support.versions import block_masks


TOKENS = 12
# What depends on numbers in a tensor makes the host wait for the device.
DATA_DEPENDENT = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "index.Tensor")
MoE: dict[str, Any] = SIZES | {"num_hidden_layers": 2, "num_experts_per_tok": 2, "initializer_range": 0.2}


def random_ids(batch: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, TOKENS), generator=torch.Generator().manual_seed(1))


def padded_mask() -> torch.Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :4] = 0
    return mask


class SeenOperators(TorchDispatchMode):
    """Names of all operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def data_dependent(self) -> list[str]:
        return [name for name in self.names if any(part in name for part in DATA_DEPENDENT)]


# --- masks of a model's own


# Transformers from 5.24 on, and before.
CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"


def causal(config: PreTrainedConfig, embeds: torch.Tensor, mask: Any, cache: Any, **more: Any) -> Any:
    return masking_utils.create_causal_mask(config, embeds, attention_mask=mask, **{CACHE: cache}, **more)


OTHER_MASKS: dict[str, Callable[..., Any]] = {
    "blocks": lambda *given: causal(*given, block_sequence_ids=torch.zeros(given[1].shape[:2], dtype=torch.long)),
    "prefix": lambda *given: causal(*given, or_mask_function=lambda batch, head, query, key: key < 6),
    "shared question": lambda *given: causal(*given, and_mask_function=lambda batch, head, query, key: key < 6),
    "bidirectional": lambda config, embeds, mask, cache: masking_utils.create_bidirectional_mask(config, embeds, mask),
    "bidirectional window": lambda config, embeds, mask, cache: masking_utils.create_bidirectional_sliding_window_mask(
        _with(config, sliding_window=4), embeds, mask
    ),
}

NAMES = [pytest.param(name, marks=[block_masks] if name == "blocks" else []) for name in OTHER_MASKS]


def _with(config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    config = copy.copy(config)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _ask_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Llama a custom model that asks for another mask."""

    def create(config: Any, inputs_embeds: torch.Tensor, attention_mask: Any, **others: Any) -> Any:
        return OTHER_MASKS[name](config, inputs_embeds, attention_mask, others.get(CACHE))

    monkeypatch.setattr(modeling_llama, "create_causal_mask", create)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
def test_another_mask_is_refused_with_the_layer(name: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _ask_for(name, monkeypatch)
    with pytest.raises(UnsupportedAttentionError, match=r"LlamaAttention of layer 0: .*mask"):
        tiny_model().eval()(random_ids(2), attention_mask=padded_mask() if padded else None)


@pytest.mark.parametrize("name", NAMES)
def test_another_mask_is_refused_with_a_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=192)
    model = distca_hf.enable(tiny_model(), plugin)
    batch = next(iter(plugin.dataloader(random_dataset(20))))
    _ask_for(name, monkeypatch)

    with pytest.raises(UnsupportedAttentionError, match=r"LlamaAttention of layer 0: .*mask"):
        model(**batch)


@pytest.mark.parametrize("limit", ["sliding_window", "attention_chunk_size"])
def test_a_window_as_long_as_the_documents_changes_nothing(limit: str) -> None:
    """Windows and chunks count inside of documents."""
    make = {
        "sliding_window": masking_utils.create_sliding_window_causal_mask,
        "attention_chunk_size": masking_utils.create_chunked_causal_mask,
    }[limit]
    config = _with(tiny_model().config, **{limit: 7})
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    mask = make(config, torch.zeros(1, TOKENS, 1), attention_mask=None, position_ids=positions, **{CACHE: None})

    assert mask.refusal is None
    assert mask.window_tokens == 7
    assert mask.chunked == (limit == "attention_chunk_size")
    assert mask.documents(None).cu_seqlens_k.tolist() == [0, 5, 12]


# --- windows that only the mask says


def window_in_the_mask(name: str, window: int) -> PreTrainedConfig:
    """Configuration of a model that does not give its window to its layers."""
    if name == "phimoe":
        return PhimoeConfig(sliding_window=window, num_local_experts=4, **MoE)
    return Qwen2MoeConfig(
        **MoE,
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"],
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )


def models_of(config: PreTrainedConfig) -> list[PreTrainedModel]:
    """The same model with distca and with sdpa, to evaluate. Experts are not computed in fp64."""
    models = []
    for implementation in ("distca", "sdpa"):
        torch.manual_seed(0)
        config = copy.deepcopy(config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        models.append(model.eval())
    models[0].load_state_dict(models[1].state_dict())
    return models


@pytest.mark.parametrize("window_tokens", [1, 4, TOKENS - 1, TOKENS])
@pytest.mark.parametrize("name", ["qwen2_moe", "phimoe"])
def test_window_of_the_mask_alone_gives_the_logits_of_sdpa(name: str, window_tokens: int) -> None:
    model, same = models_of(window_in_the_mask(name, window_tokens))
    assert (model(random_ids()).logits - same(random_ids()).logits).abs().max() <= 1e-5


# --- masks beside a plan


@pytest.mark.parametrize("mask", ["ones", "with padding"])
def test_with_a_plan_nothing_is_computed_with_a_mask(mask: str) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=192)
    model = distca_hf.enable(tiny_model(), plugin)
    batch = next(iter(plugin.dataloader(random_dataset(20))))
    given = torch.ones_like(batch["input_ids"])
    if mask == "with padding":
        given[:, -5:] = 0
    expected = model(**batch).logits
    with SeenOperators() as seen:
        logits = model(**batch | {"attention_mask": given}).logits

    assert torch.equal(logits, expected)
    assert not seen.data_dependent()


@pytest.mark.parametrize("passed_on", [True, False])
def test_a_model_that_was_not_enabled_finds_its_documents_in_a_pass_with_a_plan(passed_on: bool) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=192)
    model, other = distca_hf.enable(tiny_model(), plugin), tiny_model(implementation="sdpa")
    batch, states = next(iter(plugin.dataloader(random_dataset(20)))), list[torch.Tensor]()
    given = {name: batch[name].clone() for name in ("input_ids", "position_ids")}
    expected = other.model(**given, use_cache=False).last_hidden_state

    def call_other(module: torch.nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        plan = {"distca_plan": kwargs["distca_plan"]} if passed_on else {}
        states.append(other.model(**given, **plan, use_cache=False).last_hidden_state)

    model.model.layers[1].register_forward_pre_hook(call_other, with_kwargs=True)
    model(**batch)

    assert (given["position_ids"] == 0).sum() > 1
    assert torch.equal(states[0], expected)


@pytest.mark.parametrize("given", ["nothing", "ones", "padding", "packed"])
def test_a_mask_computes_nothing_before_a_layer_asks(given: str) -> None:
    function = masking_utils.causal_mask_function
    attention_mask = {"ones": torch.ones(2, TOKENS, dtype=torch.bool), "padding": padded_mask().bool()}.get(given)
    if given == "packed":
        numbers = torch.zeros(2, TOKENS, dtype=torch.long)
        function = masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(numbers))
    with SeenOperators() as seen:
        document_mask(2, TOKENS, TOKENS, 0, 0, function, attention_mask, allow_is_causal_skip=given != "packed")

    assert not seen.names


PACKED = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
OFFSETS = torch.tensor([0, 5, TOKENS, 2 * TOKENS], dtype=torch.int32)
BATCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"attention_mask": padded_mask()},
    "packed": {"position_ids": PACKED},
    "packed, with a mask": {"position_ids": PACKED, "attention_mask": torch.ones(2, TOKENS)},
    "offsets": {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS},
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_documents_are_found_once_per_forward_pass(
    name: str, use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That makes the host wait for the device, and the model has three layers."""
    found: list[Any] = []
    find = mask_module.find_documents
    monkeypatch.setattr(mask_module, "find_documents", lambda *said: found.append(said) or find(*said))
    tiny_model().eval()(random_ids(2), use_cache=use_cache, **BATCHES[name])

    assert len(found) == 1


def test_offsets_count_the_tokens_that_are_there() -> None:
    mask = document_mask(2, TOKENS, TOKENS, 0, 0, masking_utils.causal_mask_function, padded_mask().bool())
    assert mask is not None
    assert mask.documents().cu_seqlens_q.tolist() == [0, TOKENS - 4, 2 * TOKENS - 4]


# --- a mask that does not fit


def test_mask_without_the_cached_tokens_is_refused() -> None:
    model = tiny_model().eval()
    cache = model(random_ids(), use_cache=True).past_key_values
    with pytest.raises(PackingError, match=f"attention_mask has 1 places in a row for {TOKENS + 1} tokens"):
        model(random_ids()[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 1))


def test_layer_with_other_keys_than_its_mask_is_refused() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    from distca_hf.integrations.attention import distca_attention

    layer = LlamaAttention(LlamaConfig(**SIZES), 2)
    states = torch.zeros(1, 2, 5, 8)
    with pytest.raises(UnsupportedAttentionError, match=r"of layer 2: has 5 queries and 5 keys per row, .* 5 and 9"):
        distca_attention(layer, states, states, states, RowMask((1, 1, 5, 9), torch.device("cpu")))


def test_other_slices_than_the_last_queries_are_refused() -> None:
    mask = RowMask((1, 1, 8, 8), torch.device("cpu"))
    packed = RowMask((1, 1, 8, 8), torch.device("cpu"), packed=lambda row, head, query, key: query == key)
    everything = slice(None)

    assert mask[:, :, slice(0, None), :] is mask
    assert mask[:, :, -3:, :].shape == (1, 1, 3, 8)
    for places in ((everything, everything, slice(2, 6)), (everything, slice(0, 1), everything, everything)):
        with pytest.raises(UnsupportedAttentionError, match="of an attention mask"):
            mask[places]
    with pytest.raises(UnsupportedAttentionError, match="left out the first 5 of 8 queries of packed rows"):
        packed[:, :, -3:, :]
