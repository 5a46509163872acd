"""Operations of a step: as torch counts them, and what they say about measured steps; GPUs by name."""

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, HunYuanMoEV1Config, MixtralConfig

from distca_hf.analysis.check.tiny_config import tiny_config
from distca_hf.comm.grid import Grid
from distca_hf.cost import causal_pairs
from distca_hf.errors import ConfigError
from distca_hf.flops import GPUS, Rates, StepCost, StepFlops, find_gpu, gpu_of_device, peak_flops
from distca_hf.integrations.models.planner import predictable, share_of, shares_of_experts, step_flops
from distca_hf.traces import ModelSizes
from support.models import SIZES, VOCABULARY, tiny_model


TOKENS = 16
# Of one layer of an 8B Llama: weights in matrices, and heads x dimension.
WEIGHTS_8B, WIDTH_8B = 218_103_808, 4096


def counted(model: torch.nn.Module) -> int:
    """Operations of a forward and backward pass, as torch counts them; sdpa computes a whole square."""
    ids = torch.randint(3, VOCABULARY, (1, TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops()


def flops_of(model: torch.nn.Module) -> StepFlops:
    flops = step_flops(model)
    assert flops is not None
    return flops


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen3", {})],
    ids=["llama", "tied", "qwen3"],
)
def test_operations_are_those_that_torch_counts(kind: str, changes: dict[str, Any]) -> None:
    model = tiny_model(kind, "eager", **changes)

    assert flops_of(model).useful(TOKENS, TOKENS * TOKENS) == pytest.approx(counted(model), rel=0.001)


def mixture() -> Any:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")


def test_operations_of_a_mixture_are_those_of_the_experts_that_a_token_takes() -> None:
    model = mixture()

    assert flops_of(model).useful(TOKENS, TOKENS * TOKENS) == pytest.approx(counted(model), rel=0.001)


def test_frozen_weights_have_no_gradient() -> None:
    whole = flops_of(tiny_model())
    adapted = flops_of(get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])))

    assert whole.token_backward == 2 * whole.token_forward
    assert whole.token_forward < adapted.token_forward < 1.1 * whole.token_forward
    assert adapted.token_forward < adapted.token_backward < 1.1 * adapted.token_forward


def test_head_is_not_recomputed() -> None:
    flops = flops_of(tiny_model())

    assert flops.head_forward == 2 * VOCABULARY * SIZES["hidden_size"]
    assert flops.layers_forward == flops.token_forward - flops.head_forward


def sizes_of(model: torch.nn.Module, recomputes: tuple[bool, bool] = (True, False)) -> ModelSizes:
    sizes = predictable(model, step_flops(model), recomputes, Grid.flat(range(2), 0)).sizes
    assert sizes is not None
    return sizes


def test_sizes_that_seconds_are_predicted_from_are_those_of_each_kind_of_layers() -> None:
    model = tiny_model("gemma3")
    sizes, flops = sizes_of(model), step_flops(model)

    assert flops is not None
    assert [heads.window_tokens for heads in sizes.heads] == [16, 0]
    assert {(heads.query, heads.key_value, heads.dim, heads.value_dim) for heads in sizes.heads} == {(4, 2, 16, 16)}
    assert sizes.layers == model.config.num_hidden_layers
    assert 2 * (sizes.layer_weights + sizes.head_weights) == flops.token_forward
    assert (sizes.backward_share, sizes.tensor_ranks, sizes.liger) == (1.0, 1, False)
    assert (sizes.recomputes_layers, sizes.recomputes_attention) == (True, False)


def test_sizes_of_frozen_weights_and_of_ligers_layers() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.model.model.norm.forward = forward

    assert 0.5 < sizes_of(model).backward_share < 0.6
    assert sizes_of(model).liger


def test_nothing_is_predicted_where_operations_are_not_known() -> None:
    assert predictable(tiny_model(), None, (False, False), Grid.flat(range(1), 0)) == (None, None, None)


def test_quantised_weights_are_not_counted() -> None:
    model = tiny_model()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)

    assert step_flops(model) is None


def test_experts_of_unknown_number_are_not_counted() -> None:
    model = mixture()
    for layer in model.model.layers:
        layer.mlp.top_k = layer.mlp.gate.top_k = None

    assert step_flops(model) is None


def test_each_layer_counts_the_experts_that_its_own_tokens_take() -> None:
    """Configurations have them in lists (Hunyuan-A13B), under other names (DBRX), or for attention, too (JetMoe)."""
    sizes = {"vocab_size": 128, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    experts = {"num_experts": 4, "moe_topk": [1, 3], "intermediate_size": 32, "num_key_value_heads": 4}
    with torch.device("meta"):
        hunyuan = AutoModelForCausalLM.from_config(HunYuanMoEV1Config(**sizes, **experts, head_dim=16))
        dbrx, jetmoe = (
            AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING[name])) for name in ("dbrx", "jetmoe")
        )

    assert shares_of_experts(hunyuan) == {"model.layers.0.mlp.experts": 0.25, "model.layers.1.mlp.experts": 0.75}
    assert set(shares_of_experts(dbrx).values()) == {0.25}
    assert share_of("model.layers.0.mlp.output_linear.weight", shares_of_experts(jetmoe)) == 0.5
    assert share_of("model.layers.0.mlp.gate.weight", shares_of_experts(hunyuan)) == 1.0


@pytest.mark.parametrize(
    ("documents", "measured"),
    [
        ([131072] + [4096] * 96, 2.01),
        ([65536] + [4096] * 48, 1.57),
        ([65536] + [32768] * 2 + [16384] * 4 + [2048] * 32, 1.40),
        ([4096] * 64, 0.996),
    ],
    ids=["128K", "64K", "mixed", "uniform"],
)
def test_expected_speed_up_is_that_of_measured_steps(documents: list[int], measured: float) -> None:
    """Rows of docs/benchmarks/steps.md: layers of an 8B Llama on four GPUs, in which everything is recomputed."""
    flops = StepFlops.of(WEIGHTS_8B, WEIGHTS_8B, 4 * WIDTH_8B)
    cost = flops.cost(recomputes_layers=True, recomputes_attention=True)
    work = np.array([causal_pairs(0, tokens) for tokens in documents])
    whole_on_a_rank = max(work.max(), work.sum() / 4)
    before = np.array([4 * whole_on_a_rank / work.sum()])

    speed_up = cost.speed_up(np.array([sum(documents)]), np.array([work.sum()]), before, np.ones(1))

    assert speed_up == pytest.approx(measured, rel=0.03)


def test_cost_by_hand() -> None:
    assert StepCost(token_seconds=1.0, pair_seconds=10.0).attention_share(tokens=10, pairs=3) == 0.75
    rates = Rates(matrix=2.0, attention_forward=4.0, attention_backward=5.0)
    flops = StepFlops.of(10, 4, 20.0, head_weights=3)
    once, layers, both = (
        flops.cost(recomputes_layers=layers, recomputes_attention=attention, rates=rates)
        for layers, attention in ((False, False), (True, False), (True, True))
    )

    assert [cost.token_seconds for cost in (once, layers, both)] == [24.0, 31.0, 31.0]
    assert [cost.pair_seconds for cost in (once, layers, both)] == [15.0, 15.0, 20.0]


# --- GPUs


def test_every_gpu_has_a_generation_that_the_kernels_know() -> None:
    assert {gpu.compute_capability for gpu in GPUS.values()} <= {None, 7, 8, 9, 10, 11, 12}
    assert find_gpu("H200") is GPUS["h200"]
    with pytest.raises(ConfigError, match="Did you mean 'h100'"):
        find_gpu("h101")


@pytest.mark.parametrize(
    ("device", "name", "tera"),
    [
        ("NVIDIA H200", "h200", 989),
        ("NVIDIA H100 80GB HBM3", "h100", 989),
        ("NVIDIA H100 NVL", "h100-nvl", 835),
        ("NVIDIA H100 PCIe", "h100-pcie", 756),
        ("NVIDIA H200 NVL", "h200-nvl", 835),
        ("NVIDIA B200", "b200", 2250),
        ("NVIDIA GH200 480GB", "gh200", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 312),
        ("NVIDIA A100-SXM4-80GB", "a100", 312),
        ("NVIDIA L40S", "l40s", 362),
        ("NVIDIA GeForce RTX 4090", "rtx4090", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000", None),
        ("Tesla T4", "t4", None),
    ],
)
def test_devices_and_their_peaks_are_known_by_the_name_that_torch_has_for_them(
    device: str, name: str, tera: float | None
) -> None:
    assert gpu_of_device(device) is GPUS[name]
    assert peak_flops(device) == (None if tera is None else tera * 1e12)


@pytest.mark.parametrize(
    "device", ["another", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA H200 MIG 3g.71gb", "NVIDIA A10G"]
)
def test_a_device_that_is_no_whole_known_gpu_has_neither_memory_nor_rate(device: str) -> None:
    assert gpu_of_device(device) is None
    assert peak_flops(device) is None
