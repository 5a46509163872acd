"""MLPs in tiles: the same numbers, and no more work than without tiles."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import distca_hf
from distca_hf.errors import ConfigError
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.models.tiles import TiledMlp, tile


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
TOKENS = 50
Change = Callable[[PreTrainedModel], object]


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double().train()


def gemma() -> PreTrainedModel:
    torch.manual_seed(0)
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)).double().train()


def checkpointed(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def gradients(model: nn.Module, rows: int = 1) -> list[torch.Tensor | None]:
    tokens = torch.randint(0, 64, (rows, TOKENS), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def tiled(model: PreTrainedModel, tile_tokens: int = 16, **settings: Any) -> PreTrainedModel:
    distca_hf.enable(model, distca_hf.DistCAPlugin(mlp_tokens=tile_tokens, **settings))
    return model


def assert_equal(results: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    assert any(gradient is not None for gradient in expected)
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=1e-11, atol=1e-14)


def counted(model: PreTrainedModel) -> list[int]:
    """Tokens of each run of a layer's down projection."""
    runs: list[int] = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: runs.append(args[0].shape[1]))
    return runs


@pytest.mark.parametrize(
    ("make", "attention", "rows"),
    [(llama, None, 3), (llama, "save", 1), (llama, "offload", 3), (gemma, None, 1), (gemma, "recompute", 3)],
)
def test_gradients_are_those_of_whole_mlps(
    make: Callable[[], PreTrainedModel], attention: str | None, rows: int
) -> None:
    model = tiled(make(), checkpointed_attention=attention or "save")
    expected = make()
    if attention:
        checkpointed(model)
    runs = counted(model)

    assert_equal(gradients(model, rows), gradients(expected, rows))
    assert max(runs) == 16


@pytest.mark.parametrize(("make", "times"), [(llama, 2), (gemma, 3)])
def test_tiles_run_no_more_often_than_checkpointed_layers(make: Callable[[], PreTrainedModel], times: int) -> None:
    """A norm after Gemma's MLP saves its output, which recomputation of the layer must compute again."""
    model = tiled(make())
    checkpointed(model)
    runs = counted(model)
    gradients(model)

    assert sum(runs) == times * TOKENS * len(model.model.layers)


def test_the_last_product_is_not_computed_again() -> None:
    """Nothing that backward needs is computed after it, as in a checkpointed layer whose MLP is whole."""
    outputs = []
    for tile_tokens in (16, 0):
        model = tiled(llama(), tile_tokens) if tile_tokens else llama()
        checkpointed(model)
        computed: list[int] = []
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_hook(lambda *of_call, computed=computed: computed.append(1))
        gradients(model)
        outputs.append(len(computed) / (-(-TOKENS // 16) if tile_tokens else 1))

    assert outputs == [3, 3]  # layers


def test_nothing_within_a_tile_is_kept_until_backward() -> None:
    model = tiled(llama())
    inside: list[weakref.ref[torch.Tensor]] = []
    for layer in model.model.layers:
        for part in (layer.mlp.up_proj, layer.mlp.down_proj):
            part.register_forward_pre_hook(lambda module, args: inside.append(weakref.ref(args[0])))
            part.register_forward_hook(lambda module, args, output: inside.append(weakref.ref(output)))
    tokens = torch.arange(TOKENS)[None]
    loss = model(input_ids=tokens, labels=tokens).loss

    assert not [x for x in inside if x() is not None]
    loss.backward()


def test_without_gradients_tiles_are_small_as_well() -> None:
    model, tokens = tiled(llama()).eval(), torch.arange(TOKENS)[None]
    runs = counted(model)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits

    torch.testing.assert_close(logits, llama().eval()(input_ids=tokens).logits)
    assert max(runs) == 16


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_adapters(dropout: float) -> None:
    """With dropout tiles draw other numbers than the whole; backward draws those of forward again."""

    def adapted() -> nn.Module:
        torch.manual_seed(2)
        lora = LoraConfig(target_modules=["up_proj", "down_proj"], lora_dropout=dropout, init_lora_weights=False)
        return get_peft_model(llama(), lora)

    model = adapted()
    distca_hf.enable(model, distca_hf.DistCAPlugin(mlp_tokens=16))
    checkpointed(model)
    expected = adapted()
    if dropout:  # the same tiles, with nothing computed again
        for layer in expected.base_model.model.model.layers:
            forward = layer.mlp.forward
            layer.mlp.forward = lambda x, forward=forward: torch.cat([forward(tile) for tile in x.split(16, 1)], 1)

    assert_equal(gradients(model), gradients(expected))


def test_half_precision_gradients_are_summed_in_single_precision() -> None:
    """As one matrix product does: with sums in bfloat16 the error would grow with the number of tiles."""
    errors = []
    exact = gradients(llama().bfloat16().double())
    for tile_tokens in (0, 1):
        model = llama().bfloat16()
        results = gradients(tiled(model, tile_tokens) if tile_tokens else model)
        names = [name for name, _ in model.named_parameters()]
        place = names.index("model.layers.2.mlp.down_proj.weight")
        errors.append((results[place].double() - exact[place]).norm() / exact[place].norm())

    assert errors[1] <= 1.2 * errors[0]


def test_functions_that_others_replace_run_in_tiles() -> None:
    """Liger replaces the function of a layer's MLP when a Trainer begins, after the model was enabled."""
    model, runs = tiled(llama()), []
    gradients(model)
    mlp = model.model.layers[1].mlp
    forward = partial(type(mlp).forward, mlp)
    mlp.forward = lambda x: (runs.append(x.shape[1]), forward(x))[1]
    gradients(model)

    assert max(runs) == 16


def test_layers_without_tiles_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """One dense layer among experts."""
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
    with caplog.at_level("INFO", "distca_hf"):
        tiled(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)))

    assert "MLPs of 1 of 3 layers run on 16 tokens at a time" in caplog.text


def test_experts_are_refused() -> None:
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))

    with pytest.raises(ConfigError, match="mlp_tokens=16: no layer of Qwen3MoeForCausalLM has an MLP that"):
        tiled(model)


def test_a_graph_of_tiles_is_compiled() -> None:
    model, expected = tiled(llama()), llama()
    for layer in model.model.layers:
        layer.mlp.compile(backend="aot_eager")
        layer.post_attention_layernorm.compile(backend="aot_eager")

    assert_equal(gradients(model), gradients(expected))


def shared(model: PreTrainedModel) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp = model.model.layers[0].mlp


def hooked(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: 2 * gradient)


class Scaled(nn.Module):
    """A layer that multiplies by a tensor which is a parameter of another module."""

    def __init__(self, linear: nn.Linear, scale: torch.Tensor) -> None:
        super().__init__()
        self.linear, self.scale = linear, [scale]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale[0].square().mean()


def scaled_from_outside(model: PreTrainedModel) -> None:
    mlp = model.model.layers[0].mlp
    mlp.up_proj = Scaled(mlp.up_proj, model.model.norm.weight)


@pytest.mark.parametrize("change", [shared, hooked, scaled_from_outside])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_gradients_flow_wherever_they_do_without_tiles(change: Change, checkpoints: bool) -> None:
    model, expected = llama(), llama()
    for one in (model, expected):
        change(one)
    tiled(model)
    if checkpoints:
        checkpointed(model)

    assert_equal(gradients(model), gradients(expected))


def test_gradients_of_gradients_are_refused() -> None:
    model = tiled(llama())
    x = torch.randn(1, TOKENS, 32, dtype=torch.float64, requires_grad=True)
    watch_of(model)
    tile([model.model.layers[0].mlp], TiledMlp, 16)
    (dx,) = torch.autograd.grad(model.model.layers[0].mlp(x).sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="does not require grad"):
        dx.sum().backward()


def test_weights_changed_before_backward_are_an_error() -> None:
    model, tokens = tiled(llama()), torch.arange(TOKENS)[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)

    with pytest.raises(RuntimeError, match="weights of LlamaMLP, which runs in tiles, were changed"):
        loss.backward()


@pytest.mark.parametrize("shape", [(40, 32), (2, 20, 32), (1, 2, 20, 32)])
def test_tokens_may_have_any_shape(shape: tuple[int, ...]) -> None:
    mlp = llama().model.layers[0].mlp
    x = torch.randn(shape, dtype=torch.float64)
    expected = mlp(x)
    tile([mlp], TiledMlp, 16)

    torch.testing.assert_close(mlp(x), expected)
