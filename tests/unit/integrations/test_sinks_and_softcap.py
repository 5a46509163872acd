"""Models with sinks, softcap and windows train as documents alone do with eager attention: placed, checkpointed and
compiled."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, PreTrainedConfig, PreTrainedModel

import distca_hf
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.config import DistCAConfig
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.check import check_model
from distca_hf.testing import run_ranks
from support.data import random_dataset
from support.models import VOCABULARY


LONGEST_TOKENS = 150
TOKENS = 384
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "sliding_window": 16,
}
# Scores are of the size of the softcap, so that it matters.
MODELS: dict[str, PreTrainedConfig] = {
    "Gemma 2": Gemma2Config(attn_logit_softcapping=0.5, query_pre_attn_scalar=16, **SIZES),
    "GPT-OSS": GptOssConfig(num_local_experts=2, num_experts_per_tok=2, **SIZES),
}
Step = tuple[float, dict[str, torch.Tensor]]


def build(name: str, implementation: str = "distca") -> PreTrainedModel:
    """The model with random sinks and norms, the same every time."""
    torch.manual_seed(0)
    config = copy.deepcopy(MODELS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def loader_of(transport: Transport, **settings: Any) -> PlacedLoader:
    """The first micro-batch holds nearly all documents."""
    config = DistCAConfig(tokens_per_rank=TOKENS // transport.world_size, pad_to_multiple_of=16, **settings)
    return PlacedLoader(
        random_dataset(count=12), PlacedPlanner(config, transport.world_size), transport, torch.device("cpu")
    )


@functools.cache
def alone(name: str) -> Step:
    """Loss and gradients with eager attention, each document by itself."""
    model = build(name, "eager")
    documents = loader_of(LocalTransport()).documents(epoch=0, micro_batch=0)
    labels = sum(int((document.shift_labels != -100).sum()) for document in documents)
    total = 0.0
    for document in documents:
        if (document.shift_labels != -100).any():
            ids, targets = (torch.from_numpy(x)[None] for x in (document.input_ids, document.labels))
            loss = model(input_ids=ids, labels=targets, num_items_in_batch=labels, use_cache=False).loss
            loss.backward()
            total += loss.item()
    return total, gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def placed(
    name: str, num_ranks: int, prepare: Callable[[PreTrainedModel], None] = lambda model: None, **settings: Any
) -> Step:
    """Mean of the ranks' losses and gradients, as data parallelism makes it."""
    models = [build(name) for _ in range(num_ranks)]

    def step(transport: Transport) -> Step:
        model = models[transport.rank]
        distca_hf.enable(model, distca_hf.DistCAPlugin(**settings), LONGEST_TOKENS)
        prepare(model)
        batch = next(iter(loader_of(transport, **settings)))
        loss = model(**batch).loss
        loss.backward()
        assert transport.traffic.exchanges > 0 or num_ranks == 1, "no document was cut"
        return loss.item(), gradients_of(model)

    steps = run_ranks(num_ranks, step, timeout_seconds=30.0)
    gradients = {name: torch.stack([of_rank[name] for _, of_rank in steps]).mean(0) for name in steps[0][1]}
    return sum(loss for loss, _ in steps) / num_ranks, gradients


def assert_same(got: Step, expected: Step) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert got[1].keys() == expected[1].keys()
    far = {name: float((got[1][name] - x).norm() / x.norm()) for name, x in expected[1].items()}
    assert max(far.values()) <= 1e-5, far


def checkpoint(reentrant: bool, model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def compile_layers(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_placed_step_is_that_of_documents_alone(name: str, num_ranks: int) -> None:
    got = placed(name, num_ranks)

    assert_same(got, alone(name))
    if name == "GPT-OSS":
        assert min(x.norm() for parameter, x in got[1].items() if parameter.endswith("sinks")) > 1e-4


@pytest.mark.parametrize("attention", ["save", "recompute"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_step_is_the_same(name: str, reentrant: bool, attention: str) -> None:
    got = placed(name, 2, functools.partial(checkpoint, reentrant), checkpointed_attention=attention)

    assert_same(got, alone(name))


def test_compiled_step_is_the_same() -> None:
    assert_same(placed("GPT-OSS", 1, compile_layers), alone("GPT-OSS"))


def test_frozen_sinks_have_no_gradient_and_change_no_other() -> None:
    def freeze(model: PreTrainedModel) -> None:
        for parameter, x in model.named_parameters():
            x.requires_grad_(not parameter.endswith("sinks"))

    loss, gradients = alone("GPT-OSS")
    others = {parameter: x for parameter, x in gradients.items() if not parameter.endswith("sinks")}
    assert len(others) == len(gradients) - 2

    assert_same(placed("GPT-OSS", 2, freeze), (loss, others))


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_without_a_plan_is_that_of_eager_attention(name: str) -> None:
    """Also of packed documents, and token by token with a cache."""
    model, plain = build(name).eval(), build(name, "eager").eval()
    ids = torch.randint(3, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(14), torch.arange(10)])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions).logits
        whole = [plain(part).logits for part in (ids[:, :14], ids[:, 14:])]
        first = model(ids[:, :13], use_cache=True)
        second = model(ids[:, 13:14], past_key_values=first.past_key_values).logits

    torch.testing.assert_close(packed, torch.cat(whole, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second[:, 0], whole[0][:, -1], rtol=1e-4, atol=1e-5)


def test_kernel_without_softcap_or_windows_is_refused_before_the_first_step() -> None:
    """Windows count where a document is longer, and sinks need no kernel."""
    check_model(build("GPT-OSS"), 16, "cpu")
    with pytest.raises(
        UnsupportedAttentionError,
        match=r"layers\.0\.self_attn: window_tokens=16: kernel='cpu' .*compute window_tokens;",
    ):
        check_model(build("GPT-OSS"), 17, "cpu")
    with pytest.raises(UnsupportedAttentionError, match=r"softcap=0\.5: kernel='cpu' .*does not compute .*softcap"):
        check_model(build("Gemma 2"), LONGEST_TOKENS, "cpu")
