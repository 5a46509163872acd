"""The attention function by itself and inside tiny models: what it refuses, and what it computes without a plan."""

import copy
import re
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    MistralConfig,
    PreTrainedModel,
)

import distca_hf
from distca_hf.errors import PackingError, UnsupportedAttentionError
from distca_hf.integrations.attention import distca_attention
from distca_hf.kernels.interface import Kernel
from distca_hf.kernels.registry import choose_kernel
from distca_hf.runtime import local_attention
from distca_hf.testing import attend_documents
from support.models import SIZES, VOCABULARY, tiny_model


TINY = SIZES | {"num_hidden_layers": 2}
TOKENS = 10
# Three documents of 4, 3 and 3 tokens, one after the other.
OFFSETS = torch.tensor([0, 4, 7, 10], dtype=torch.int32)
PACKED_POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]])


class Layer(nn.Module):
    """An attention layer as far as the function looks at one."""

    layer_idx = 3
    is_causal = True


def qkv(
    batch: int = 1, queries: int = 5, keys: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[B, N, T, H]`, `[B, G, S, H]`, `[B, G, S, H]`, query and key as non-contiguous as models hand them over."""
    torch.manual_seed(0)
    query = torch.randn(batch, queries, 4, 8, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(batch, keys, 2, 8, dtype=dtype).transpose(1, 2) for _ in range(2))
    return query, key, value


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *options: Any) -> torch.Tensor:
    """`[B, T, N, V]` by definition, each row of the batch a document whose last queries are given."""
    rows, before = query.shape[2], key.shape[2] - query.shape[2]
    whole = torch.nn.functional.pad(query, (0, 0, before, 0))
    outputs = [
        attend_documents(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), [key.shape[2]], scale, *options)[
            -rows:
        ]
        for q, k, v in zip(whole, key, value, strict=True)
    ]
    return torch.stack(outputs)


def largest(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference."""
    return (left - right).abs().max().item()


def unless_refused(compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """What is computed; None where it is refused, which is as good as long as nothing wrong comes out."""
    try:
        return compute()
    except (UnsupportedAttentionError, PackingError):
        return None


def random_ids(batch: int = 1, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def both(**changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same tiny Llama with distca and with sdpa, fp64; its weights are large enough for attention to matter."""
    changes = {"initializer_range": 0.3} | changes
    return tiny_model(**changes).double().eval(), tiny_model(implementation="sdpa", **changes).double().eval()


def model_of(config: Any, implementation: str = "distca") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=implementation).eval()


# Arguments of the function, and what the message must say besides "Layer of layer 3".
REFUSED_ARGUMENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "padding mask": (
        {"attention_mask": torch.ones(1, 5, dtype=torch.bool)},
        ["attention mask", "(1, 5)", "zeros and ones"],
    ),
    "4-D mask": ({"attention_mask": torch.zeros(1, 1, 5, 5)}, ["attention mask", "(1, 1, 5, 5)", "position_ids"]),
    "dropout": ({"dropout": 0.1}, ["dropout 0.1", "config"]),
    "sinks of other heads": ({"s_aux": torch.zeros(2)}, ["s_aux has shape (2,)", "4 query heads"]),
    "bias": ({"position_bias": torch.zeros(1, 4, 5, 5)}, ["position_bias=tensor(1, 4, 5, 5)"]),
    "unknown keyword": ({"invented": "value"}, ["invented='value'"]),
    "two unknown keywords": ({"first": 1, "second": 2.5}, ["first=1", "second=2.5"]),
    "unknown keyword of zero": ({"invented": 0}, ["invented=0"]),
    "empty window": ({"sliding_window": 0}, ["sliding window 0 holds no token"]),
    "bidirectional": ({"is_causal": False}, ["is_causal=False", "causal attention only"]),
}


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_argument_that_is_not_computed_is_refused_with_layer_and_value(name: str) -> None:
    arguments, told = REFUSED_ARGUMENTS[name]
    with pytest.raises(UnsupportedAttentionError, match=r"Layer of layer 3\b") as caught:
        distca_attention(Layer(), *qkv(), **{"attention_mask": None} | arguments)

    assert all(part in str(caught.value) for part in told), str(caught.value)


def test_layer_that_is_not_causal_is_refused() -> None:
    layer = Layer()
    layer.is_causal = False
    with pytest.raises(UnsupportedAttentionError, match=r"Layer of layer 3: is not causal .*module\.is_causal=False"):
        distca_attention(layer, *qkv(), None)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_mixed_dtypes_without_autocast_are_refused_with_all_three(odd: int) -> None:
    tensors = [x.to(torch.bfloat16 if at == odd else torch.float32) for at, x in enumerate(qkv())]
    dtypes = [str(x.dtype) for x in tensors]
    with pytest.raises(
        UnsupportedAttentionError,
        match=re.escape(f"Layer of layer 3: queries, keys and values are {dtypes[0]}, {dtypes[1]} and {dtypes[2]}"),
    ):
        distca_attention(Layer(), *tensors, None)


ACCEPTED_ARGUMENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no dropout": {"dropout": 0.0},
    "causal": {"is_causal": True},
    "window as long as the document": {"sliding_window": 5},
    "no window": {"sliding_window": None},
    "keywords without a value": {"softcap": None, "s_aux": None, "output_attentions": False},
    "keywords that say nothing about attention": {"use_cache": True, "cache_position": torch.arange(5), "labels": 1},
}


@pytest.mark.parametrize("name", ACCEPTED_ARGUMENTS)
def test_argument_that_changes_nothing_is_accepted(name: str) -> None:
    query, key, value = qkv()
    out, weights = distca_attention(Layer(), query, key, value, None, scaling=0.3, **ACCEPTED_ARGUMENTS[name])

    assert weights is None
    assert largest(out, expected(query, key, value, 0.3)) <= 1e-12


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 4)], ids=["no sinks", "sinks"])
def test_softcap_and_sinks_of_a_call_are_computed(softcap: float | None, sinks: torch.Tensor | None) -> None:
    """Sinks in fp32, as models hold them, beside tensors of another dtype."""
    tensors = qkv(2, 3, 7)
    out, _ = distca_attention(Layer(), *tensors, None, softcap=softcap, s_aux=sinks)

    of_exact = None, softcap or 0.0, None if sinks is None else sinks.double()
    assert out.dtype == torch.float64
    assert largest(out, expected(*tensors, 8**-0.5, *of_exact)) <= 1e-7
    assert largest(out, expected(*tensors, 8**-0.5)) > 1e-3 or (softcap, sinks) == (None, None)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("before", [0, 1, 7])
@pytest.mark.parametrize("queries", [1, 5])
def test_every_row_is_a_document_of_its_own_with_earlier_keys(batch: int, before: int, queries: int) -> None:
    query, key, value = qkv(batch, queries, queries + before)
    out, _ = distca_attention(Layer(), query, key, value, None)

    assert out.shape == (batch, queries, 4, 8)
    assert largest(out, expected(query, key, value, 8**-0.5)) <= 1e-12


@pytest.mark.parametrize(
    "given",
    [
        {"position_ids": PACKED_POSITIONS},
        {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 4, "max_length_k": 4},
        {"cu_seq_lens_q": OFFSETS},
        {"cu_seq_lens_q": OFFSETS.long()[None]},
    ],
    ids=["positions", "offsets and lengths", "offsets", "long offsets"],
)
def test_packed_documents_attend_alone(given: dict[str, Any]) -> None:
    query, key, value = qkv(queries=TOKENS, keys=TOKENS)
    out, _ = distca_attention(Layer(), query, key, value, None, **given)

    alone = [
        expected(*(x[:, :, start:stop] for x in (query, key, value)), 8**-0.5)
        for start, stop in pairwise(OFFSETS.tolist())
    ]
    assert largest(out, torch.cat(alone, 1)) <= 1e-12


@pytest.mark.parametrize("window_tokens", [1, 2, 3, 4, 9])
def test_windows_count_inside_packed_documents(window_tokens: int) -> None:
    query, key, value = qkv(queries=TOKENS, keys=TOKENS)
    out, _ = distca_attention(
        Layer(), query, key, value, None, sliding_window=window_tokens, position_ids=PACKED_POSITIONS
    )
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    exact = attend_documents(*rows, OFFSETS.diff().tolist(), 8**-0.5, window_tokens)
    assert largest(out[0], exact) <= 1e-12


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 4, 9])}, "ends at 9, but there are 10"),
        ({"cu_seq_lens_q": torch.tensor([1, 4, 10])}, "begin with 0, not 1"),
        ({"cu_seq_lens_q": torch.tensor([0, 7, 4, 10])}, "decreases at index 2"),
        ({"position_ids": torch.arange(9)[None]}, "9 positions for 10 tokens"),
    ],
)
def test_offsets_and_positions_that_do_not_fit_the_rows_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(PackingError, match=told):
        distca_attention(Layer(), *qkv(queries=TOKENS, keys=TOKENS), None, **given)


def test_offsets_of_keys_are_not_ignored() -> None:
    """One document of 10 keys of which the last 4 ask: right, or refused; never the first 4 keys."""
    query, key, value = qkv(queries=4, keys=TOKENS)
    given = {"cu_seq_lens_q": torch.tensor([0, 4]), "cu_seq_lens_k": torch.tensor([0, TOKENS])}
    out = unless_refused(lambda: distca_attention(Layer(), query, key, value, None, **given)[0])

    assert out is None or largest(out, expected(query, key, value, 8**-0.5)) <= 1e-12


def test_more_queries_than_keys_are_refused() -> None:
    """Their document's first queries would attend to the keys of the document before."""
    given = {"cu_seq_lens_q": torch.tensor([0, 2, 6]), "cu_seq_lens_k": torch.tensor([0, 4, 6])}
    with pytest.raises(PackingError, match=r"document 1 has 4 queries \(cu_seq_lens_q\) but 2 keys"):
        distca_attention(Layer(), *qkv(queries=6, keys=6), None, **given)


@pytest.mark.parametrize("settings", [{}, {"kernel": "reference", "deterministic": True}], ids=["default", "set"])
def test_attention_without_a_plan_follows_the_settings(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []

    class Looks:
        def __init__(self, kernel: Kernel) -> None:
            self.kernel, self.forward = kernel, kernel.forward

        def backward(self, *given: Any) -> None:
            seen.append((type(self.kernel).__name__, given[4].deterministic))
            self.kernel.backward(*given)

    monkeypatch.setattr(local_attention, "choose_kernel", lambda *given: Looks(choose_kernel(*given)))
    model = distca_hf.enable(tiny_model(**TINY), distca_hf.DistCAPlugin(**settings))
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()

    assert seen == [("ReferenceKernel", True) if settings else ("CpuKernel", False)] * TINY["num_hidden_layers"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_brings_all_three_into_its_dtype(dtype: torch.dtype) -> None:
    query, key, value = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        out, _ = distca_attention(Layer(), query, key, value.to(dtype), None)

    assert out.dtype == dtype
    assert largest(out.double(), expected(query.double(), key.double(), value.double(), 8**-0.5)) <= 0.02


# Calls of a whole model that ask for something else than causal attention.
REFUSED_CALLS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any], str]] = {
    "4-D mask": (
        tiny_model,
        {"attention_mask": torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()},
        r"LlamaAttention of layer 0: .*\(1, 1, 10, 10\)",
    ),
    "unknown keyword": (tiny_model, {"block_table": [1]}, r"LlamaAttention of layer 0: block_table=\[1\]"),
    "dropout in training": (
        lambda: tiny_model(attention_dropout=0.25).train(),
        {},
        "LlamaAttention of layer 0: attention dropout 0.25",
    ),
    "encoder": (
        lambda: BertLMHeadModel._from_config(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=4,
                is_decoder=False,
            ),
            attn_implementation="distca",
        ).eval(),
        {},
        "BertSelfAttention of layer .*is not causal",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_model_that_asks_for_something_else_is_refused(name: str) -> None:
    make, arguments, told = REFUSED_CALLS[name]
    with pytest.raises(UnsupportedAttentionError, match=told):
        make()(random_ids(), **arguments)


def test_dropout_of_training_is_accepted_in_evaluation() -> None:
    model, same = both(attention_dropout=0.25)

    assert torch.equal(model(random_ids()).logits, same(random_ids()).logits)


GENERATE: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.mark.parametrize("window_tokens", [3, TOKENS, TOKENS + 2])
def test_generation_past_a_sliding_window_gives_the_tokens_of_sdpa(window_tokens: int) -> None:
    """The cache keeps as many keys as the window is long."""
    config = MistralConfig(sliding_window=window_tokens, initializer_range=0.3, **TINY)
    model, same = (model_of(config, name).double() for name in ("distca", "sdpa"))

    assert torch.equal(model.generate(random_ids(), **GENERATE), same.generate(random_ids(), **GENERATE))


# --- said once, and loudly enough


def test_attention_weights_are_none_and_that_is_said() -> None:
    model, same = both()
    ids = random_ids()
    with pytest.warns(UserWarning, match=r"no attention weights.*None") as told:
        output = model(ids, output_attentions=True, use_cache=False)

    assert len({str(warning.message) for warning in told}) == 1
    assert all(weights is None for weights in output.attentions)
    assert largest(output.logits, same(ids).logits) <= 1e-12


@pytest.mark.parametrize("positions", [None, PACKED_POSITIONS], ids=["one document", "packs"])
def test_training_a_model_that_was_not_enabled_is_mentioned(positions: torch.Tensor | None) -> None:
    """Without labels Transformers then has an error, which does not name what was forgotten."""
    with pytest.warns(
        UserWarning, match=r"LlamaAttention trains with distca on 1 rank.*was not enabled.*plugin.attach"
    ) as told:
        tiny_model().train()(random_ids(), position_ids=positions)

    assert len({str(warning.message) for warning in told}) == 1


SILENT: dict[str, Callable[[PreTrainedModel], Any]] = {
    "evaluation": lambda model: model.eval()(random_ids(), position_ids=PACKED_POSITIONS),
    "no gradients": torch.no_grad()(lambda model: model.train()(random_ids(), position_ids=PACKED_POSITIONS)),
    "enabled": lambda model: distca_hf.enable(model, distca_hf.DistCAPlugin(tokens_per_rank=64))(
        random_ids(), position_ids=PACKED_POSITIONS
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_other_passes_are_not_mentioned(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        SILENT[name](tiny_model())
