"""Attention modules in tiles of heads: the same numbers, attention computed once, one tile's tensors at a time."""

import functools
import gc
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    Gemma3nTextConfig,
    GptOssConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SeedOssConfig,
)

import distca_hf
from distca_hf.cost import CAUSAL_MASK
from distca_hf.errors import ConfigError, NotFiniteError
from distca_hf.integrations import attention
from distca_hf.integrations.models.forward_check import ForwardCheck
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.runtime import local_attention
from distca_hf.runtime.retention import HeldLayers
from support.data import random_dataset
from support.models import SIZES as OTHER_SIZES
from support.thorough import is_thorough


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
TOKENS, LAYERS = 50, 3
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LINEAR = {f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "biases": Qwen2Config(**SIZES),
    "norms of heads": Qwen3Config(**SIZES),
    "sinks, windows": GptOssConfig(
        **SIZES,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=16,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "gates, states": Qwen3_5TextConfig(
        **SIZES, **LINEAR, layer_types=["full_attention", "linear_attention", "full_attention"]
    ),
    "one head each": LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
}
CHECKPOINTING = ["none", "save", "offload", "recompute", "reentrant", "selective"]


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config)).double().train()
    if isinstance(config, GptOssConfig):
        model.set_experts_implementation("eager")  # the others know no fp64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def llama() -> PreTrainedModel:
    return model_of(MODELS["llama"])


def checkpointed(model: PreTrainedModel, how: str) -> None:
    settings: dict[str, Any] = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
    if how != "none":
        model.gradient_checkpointing_enable(settings)


def _keep_attention(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "flash_attn" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def tiled(model: nn.Module, heads: int = 1, how: str = "none") -> Any:
    kept = how if how in ("offload", "recompute") else "save"
    distca_hf.enable(model, distca_hf.DistCAPlugin(attention_kv_heads=heads, checkpointed_attention=kept))
    checkpointed(model, how)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(3, 64, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    loss: torch.Tensor = model(input_ids=tokens, position_ids=positions, labels=tokens, use_cache=False).loss
    return loss


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *[parameter.grad for parameter in model.parameters()]]


def whole(model: nn.Module) -> Any:
    distca_hf.enable(model, distca_hf.DistCAPlugin())
    return model


def assert_equal(results: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    assert any(gradient is not None for gradient in expected)
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=1e-12, atol=1e-14)


@functools.cache
def expected_of(name: str) -> list[torch.Tensor | None]:
    return gradients(whole(model_of(MODELS[name])))


@pytest.mark.parametrize(
    ("name", "how", "heads"),
    [
        (name, how, 1 + (one + other) % 2)
        for one, name in enumerate(MODELS)
        for other, how in enumerate(CHECKPOINTING)
        if is_thorough() or name == "llama" or (one + other) % 3 == 0
    ],
)
def test_losses_and_gradients_are_those_of_whole_modules(name: str, how: str, heads: int) -> None:
    results = gradients(tiled(model_of(MODELS[name]), heads, how))

    # Norms of states compute in fp32: how rows are laid out rounds them.
    close = {"rtol": 1e-5, "atol": 1e-6} if "states" in name else {"rtol": 1e-12, "atol": 1e-14}
    for result, right in zip(results, expected_of(name), strict=True):
        torch.testing.assert_close(result, right, **close)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Query and KV heads of each kernel that runs, forward or backward."""
    runs: list[tuple[int, int]] = []
    choose = local_attention.choose_kernel

    def counting(name: Any, operands: Any, spec: Any) -> Any:
        runs.append((operands.num_heads, operands.num_kv_heads))
        return choose(name, operands, spec)

    monkeypatch.setattr(local_attention, "choose_kernel", counting)
    return runs


@pytest.mark.parametrize(
    ("how", "times"), [(how, 3 if how in ("recompute", "reentrant") else 2) for how in CHECKPOINTING]
)
def test_attention_is_computed_as_often_as_without_tiles(
    how: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runs = tiled(llama(), 2, how), counted(monkeypatch)
    gradients(model)

    assert sorted(runs) == [(2, 1)] * LAYERS * times + [(4, 2)] * LAYERS * times


def watched(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """Memory of queries, keys and values of all attention calls, in forward and recomputed."""
    inside: list[StorageWeakRef] = []
    attend = attention.flash_attn_local

    def watching(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Any:
        if q.requires_grad:
            inside.extend(StorageWeakRef(x.untyped_storage()) for x in (q, k, v))
        return attend(q, k, v, *others)

    monkeypatch.setattr(attention, "flash_attn_local", watching)
    return inside


@pytest.mark.parametrize("how", ["none", "save", "recompute"])
def test_only_one_tile_has_queries_keys_and_values_at_a_time(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inside = tiled(llama(), 1, how), watched(monkeypatch)
    alive: list[int] = []
    derive = local_attention.flash_attn_local_backward

    def counting(*given: Any) -> Any:
        alive.append(sum(not x.expired() for x in inside))
        return derive(*given)

    monkeypatch.setattr(local_attention, "flash_attn_local_backward", counting)
    loss = loss_of(model)
    gc.collect()
    assert all(x.expired() for x in inside)
    loss.backward()

    assert alive == [3] * 3 * LAYERS


@pytest.mark.parametrize("how", ["offload", "recompute"])
def test_outputs_do_not_wait_for_backward_if_layers_do_not_keep_them(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile would otherwise keep them on the GPU."""
    model, outputs = tiled(llama(), 1, how), list[StorageWeakRef]()
    attend = attention.flash_attn_local

    def watching(*given: Any) -> Any:
        results = attend(*given)
        outputs.append(StorageWeakRef(results[0].untyped_storage()))
        return results

    monkeypatch.setattr(attention, "flash_attn_local", watching)
    tokens = torch.arange(TOKENS)[None]
    state = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    gc.collect()
    kept = [x for x in outputs if not x.expired()]

    assert state.requires_grad
    assert len(outputs) == 3 * LAYERS
    assert not kept


def test_graphs_go_without_a_garbage_collector() -> None:
    """Cycles through autograd's nodes would never go."""
    model = tiled(llama(), 1, "save")
    gradients(model)
    gc.collect()
    gc.disable()
    try:
        regions = sum(type(one).__name__ == "TileRegion" for one in gc.get_objects())
        gradients(model)
        loss = loss_of(model)  # and without backward
        assert sum(type(one).__name__ == "TileRegion" for one in gc.get_objects()) > regions
        del loss
        assert sum(type(one).__name__ == "TileRegion" for one in gc.get_objects()) == regions == 0
    finally:
        gc.enable()


def test_input_gradients_are_summed_in_single_precision() -> None:
    """With sums in bfloat16 the error would grow with the number of tiles."""
    config = LlamaConfig(**{**SIZES, "num_attention_heads": 48, "num_key_value_heads": 48, "num_hidden_layers": 1})
    exact = gradients(model_of(config).bfloat16().double())
    errors = []
    for heads in (0, 1):
        model = model_of(config).bfloat16()
        results = gradients(tiled(model, heads) if heads else whole(model))
        at = [name for name, _ in model.named_parameters()].index("model.embed_tokens.weight") + 1
        errors.append((results[at].double() - exact[at]).norm() / exact[at].norm())

    assert errors[1] <= 1.1 * errors[0]


def adapted(dropout: float = 0.0, **settings: Any) -> nn.Module:
    torch.manual_seed(2)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraConfig(target_modules=targets, lora_dropout=dropout, init_lora_weights=False, **settings)
    return get_peft_model(llama(), lora)


@pytest.mark.parametrize("how", ["none", "offload", "reentrant"])
def test_adapters(how: str) -> None:
    assert_equal(gradients(tiled(adapted(), 2, how)), gradients(whole(adapted())))


@pytest.mark.parametrize("how", ["none", "save", "recompute"])
def test_dropout_of_adapters_is_repeated(how: str) -> None:
    """Tiles draw other numbers than whole modules, and the same ones when they run again."""
    model = tiled(adapted(0.5), 2, how)
    direct = model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight
    results = gradients(model)
    step = 1e-2  # losses are in fp32
    with torch.no_grad():
        direct[0, 0] += step
        upper = loss_of(model)
        direct[0, 0] -= 2 * step
        slope = (upper - loss_of(model)) / (2 * step)
    at = [name for name, _ in model.named_parameters()].index(
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
    )

    torch.testing.assert_close(results[at + 1][0, 0], slope.double(), rtol=1e-2, atol=1e-6)


def frozen_weights(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_proj" in name or "o_proj" in name)


def frozen_inputs(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0.self_attn.v_proj" in name)


def shared(model: PreTrainedModel) -> None:
    model.model.layers[2].self_attn.k_proj.weight = model.model.layers[0].self_attn.k_proj.weight


def hooked(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.q_proj.weight.register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize("change", [frozen_weights, frozen_inputs, shared, hooked])
@pytest.mark.parametrize("how", ["none", "save"])
def test_gradients_flow_wherever_they_do_without_tiles(change: Callable[[PreTrainedModel], None], how: str) -> None:
    model, expected = llama(), llama()
    for one in (model, expected):
        change(one)

    assert_equal(gradients(tiled(model, 1, how)), gradients(whole(expected)))


def test_autocast_reaches_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, dtypes = tiled(llama().float(), 1, "save"), set[torch.dtype]()
    attend = attention.flash_attn_local
    monkeypatch.setattr(attention, "flash_attn_local", lambda *given: (dtypes.add(given[0].dtype), attend(*given))[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model)
    loss.backward()

    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("part", ["layer", "attention"])
def test_compiled_models_run_tiles_without_a_graph(part: str) -> None:
    model = tiled(llama())
    for layer in model.model.layers:
        (layer if part == "layer" else layer.self_attn).compile(backend="aot_eager")

    assert_equal(gradients(model), gradients(whole(llama())))


def test_without_gradients_tiles_are_small_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiled(llama()).eval(), torch.arange(3, 40)[None]
    runs = counted(monkeypatch)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
        assert set(runs) == {(2, 1)}
        whole_logits = model(input_ids=tokens, past_key_values=DynamicCache()).logits
    assert set(runs) == {(2, 1), (6, 3)}
    torch.testing.assert_close(logits, whole_logits)
    cached, uncached = (model.generate(tokens, max_new_tokens=4, use_cache=cache) for cache in (True, False))

    assert cached.tolist() == uncached.tolist()


def test_a_cache_is_refused_in_training() -> None:
    """One that the model would make by itself is left out, but not in evaluation, even with gradients."""
    model, tokens = tiled(llama()), torch.arange(3, 40)[None]
    assert model(input_ids=tokens).past_key_values is None
    assert model.eval()(input_ids=tokens, labels=tokens).past_key_values is not None
    model.train()

    with pytest.raises(ConfigError, match="attention_kv_heads=1: LlamaAttention got a cache of all heads"):
        model(input_ids=tokens, labels=tokens, past_key_values=DynamicCache())


def test_a_model_that_is_enabled_again_has_its_own_functions_back() -> None:
    model = tiled(llama())
    gradients(model)
    assert "forward" in vars(model.model.layers[0].self_attn)
    watch_of(model).leave({model})

    assert "forward" not in vars(model.model.layers[0].self_attn)


def test_a_copy_of_a_model_follows_its_own_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiled(llama())
    gradients(model)
    copied = whole(deepcopy(model))
    runs = counted(monkeypatch)
    gradients(copied)
    assert set(runs) == {(6, 3)}
    runs.clear()
    gradients(tiled(deepcopy(model), 2))

    assert set(runs) == {(2, 1), (4, 2)}


def test_rows_of_all_tiles_of_a_recomputed_layer_are_held_together() -> None:
    check = ForwardCheck(llama(), distca_hf.DistCAPlugin(attention_kv_heads=1))
    regions = tuple(tuple(masks) for masks in check.call_masks.values())
    layers = check.pass_layers(regions)

    assert layers.attention_calls == 3 * LAYERS
    assert layers.layers_of_calls == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    assert layers.of(CAUSAL_MASK, 100) == HeldLayers(saved=0, recomputed=3 * LAYERS, together=3)
    assert check.pass_layers(regions[1:]).of(CAUSAL_MASK, 100) == HeldLayers(saved=3, recomputed=6, together=3)


def test_errors_name_layer_and_tile() -> None:
    model = llama().train()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=64, attention_kv_heads=1, debug=distca_hf.Debug(check_finite=True))
    distca_hf.enable(model, plugin)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[20] = torch.nan  # of the third head
    batch = next(iter(plugin.dataloader(random_dataset(lengths=(40,)))))

    with pytest.raises(NotFiniteError, match="rank 0, micro-batch 0, layer 1, tile 2, forward: key is not finite"):
        model(**{**batch, "input_ids": batch["input_ids"] % 64})


def test_weights_changed_before_backward_are_an_error() -> None:
    model = tiled(llama())
    loss = loss_of(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(2)

    with pytest.raises(RuntimeError, match="weights of LlamaAttention, which runs in tiles, were changed"):
        loss.backward()


REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "norm of all heads": (
        Olmo2Config(**SIZES, **SPECIAL),
        r"model.layers.0.self_attn \(Olmo2Attention\) has q_norm.weight of shape \(48,\), which is not \(8,\)",
    ),
    "one matrix": (
        Phi3Config(**SIZES, **SPECIAL),
        r"model.layers.0.self_attn \(Phi3Attention\) has no q_proj",
    ),
    "shared keys": (
        Gemma3nTextConfig(
            **{
                **OTHER_SIZES,
                "head_dim": 16,
                "num_kv_shared_layers": 0,
                "laurel_rank": 4,
                "vocab_size_per_layer_input": 64,
            }
        ),
        r"Gemma3nTextAttention\) uses is_kv_shared_layer, which is not known to work on some",
    ),
    "latent": (
        DeepseekV3Config(**{**SIZES, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 6}),
        r"model.layers.0.self_attn \(DeepseekV3Attention\) has no k_proj",
    ),
    "dropout": (
        SeedOssConfig(**SIZES, residual_dropout=0.5, attention_dropout=0.0),
        r"drops some of its outputs \(residual_dropout\)",
    ),
    "one KV head": (
        LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
        "no layer of LlamaForCausalLM has more than 1 KV heads, so there is nothing to divide",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_modules_are_refused_before_the_first_step(name: str) -> None:
    config, words = REFUSED[name]
    with pytest.raises(ConfigError, match=f"attention_kv_heads=1: .*{words}"):
        tiled(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"use_rslora": True}])
def test_only_plain_adapters_are_accepted(settings: dict[str, bool]) -> None:
    if "use_dora" in settings:
        with pytest.raises(ConfigError, match="as q_proj, which is neither a linear layer nor one with plain LoRA"):
            tiled(adapted(**settings))
    else:
        assert_equal(gradients(tiled(adapted(**settings))), gradients(whole(adapted(**settings))))


def hook_of_queries(module: nn.Module) -> None:
    module.q_proj.register_forward_hook(lambda *of_call: None)


def replaced_forward(module: nn.Module) -> None:
    module.forward = functools.partial(type(module).forward, module)


def weights_of_zero3(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.ds_id = 1  # as DeepSpeed marks weights that it divides


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (hook_of_queries, "LlamaAttention has hooks of q_proj, or a function in place of its forward"),
        (replaced_forward, "LlamaAttention has another function in place of its forward"),
        (weights_of_zero3, "DeepSpeed ZeRO-3 gathers weights for each tile"),
    ],
)
def test_what_would_act_on_all_heads_is_refused(change: Callable[[nn.Module], None], words: str) -> None:
    model = tiled(llama())
    change(model.model.layers[1].self_attn)

    with pytest.raises(ConfigError, match=f"attention_kv_heads=1: {words}"):
        gradients(model)
