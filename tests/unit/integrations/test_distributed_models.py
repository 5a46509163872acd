"""Models that Transformers divided between ranks: what is read of them, and what is refused by name.

One process passes for a rank of four. Transformers divides models over it as over a real job.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

import distca_hf
from distca_hf.cost import divide_heads
from distca_hf.errors import ConfigError
from distca_hf.integrations.models import distributed_check
from distca_hf.integrations.models.decoder_layers import (
    head_groups_of,
    heads_of,
    heads_of_layers,
    whole_heads_of_layers,
)
from distca_hf.integrations.models.distributed import (
    has_data_and_tensor_mesh,
    heads_divided_by,
    tensor_ranks,
)
from distca_hf.integrations.models.distributed_check import (
    LOWEST_EXPERTS,
    LOWEST_TENSOR,
    check_distribution,
    refused_distribution,
)
from distca_hf.integrations.models.forward_watch import watch_of
from support.fake_job import fake_job
from support.models import SIZES, tiny_model
from support.versions import divides_models


RANKS = 4
SMALL = {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 4}
VERSION = Version(transformers.__version__).release
Load = Callable[..., PreTrainedModel]


def since(minor: int, what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(VERSION < (5, minor), reason=f"Transformers has {what} since 5.{minor}")


trains_tensor_parallel = since(19, "a mesh of data and tensor ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny model once, and returns its folder."""
    parent, written = tmp_path_factory.mktemp("models"), dict[object, Path]()

    def folder(config: PreTrainedConfig | str, **changes: Any) -> Path:
        key = config if isinstance(config, str) else type(config).__name__, *sorted(changes.items())
        if key not in written:
            written[key] = parent / str(len(written))
            if isinstance(config, str):
                model = tiny_model(config, num_hidden_layers=2, **changes)
            else:
                model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
            model.save_pretrained(written[key])
        return written[key]

    return folder


@pytest.fixture
def load(folder: Callable[..., Path]) -> Iterator[Load]:
    """Loads a tiny model divided between the four ranks; sizes of `DistributedConfig` by name."""

    def load(kind: PreTrainedConfig | str = "llama", changes: dict[str, Any] | None = None, **sizes: Any) -> Any:
        arguments = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
        return AutoModelForCausalLM.from_pretrained(
            folder(kind, **changes or {}), attn_implementation="distca", **arguments
        )

    with fake_job(RANKS):
        yield load


@pytest.fixture
def accelerate_has(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets Accelerate's state say what an Accelerator of these settings would leave in it."""

    def accelerate_has(kind: str = "MULTI_GPU", deepspeed: dict[str, Any] | None = None, **sizes: int) -> None:
        config = SimpleNamespace(**{f"{name}_size": size for name, size in sizes.items()}) if sizes else None
        plugin = None if deepspeed is None else SimpleNamespace(deepspeed_config=deepspeed)
        state = SimpleNamespace(parallelism_config=config, deepspeed_plugin=plugin, distributed_type=kind)
        state._shared_state = {"made": True}
        made = type("State", (), {"_shared_state": state._shared_state, "__new__": lambda cls: state})
        monkeypatch.setattr("distca_hf.integrations.models.distributed_check.AcceleratorState", made)

    return accelerate_has


def reasons(model: PreTrainedModel) -> str:
    """What is said against a model."""
    with pytest.raises(ConfigError) as refused:
        check_distribution(model)
    return str(refused.value)


# What is read.


@divides_models
@pytest.mark.parametrize(
    ("sizes", "data", "tensor"),
    [
        ({"fsdp_size": 4}, 4, 1),
        pytest.param({"tp_size": 2, "fsdp_size": 2}, 2, 2, marks=trains_tensor_parallel),
        pytest.param({"tp_size": 4}, 1, 4, marks=trains_tensor_parallel),
        pytest.param({"dp_replicate_size": 2, "fsdp_size": 2}, 4, 1, marks=since(23, "dp_replicate_size")),
        pytest.param(
            {"dp_replicate_size": 2, "fsdp_size": 1, "tp_size": 2}, 2, 2, marks=since(23, "dp_replicate_size")
        ),
    ],
)
def test_the_mesh_has_all_ranks_by_what_they_hold(load: Load, sizes: dict[str, int], data: int, tensor: int) -> None:
    mesh = check_distribution(load(changes={"num_key_value_heads": 4}, **sizes))

    assert mesh is not None
    assert sorted(mesh.mesh.mesh.flatten().tolist()) == [0, 1, 2, 3]
    assert (mesh.size(mesh.stages), mesh.size(mesh.data), mesh.size(mesh.tensor)) == (1, data, tensor)


@pytest.mark.skipif(VERSION < (5, 20), reason="Transformers sends tokens to experts since 5.20")
@pytest.mark.parametrize(("sizes", "tensor"), [({"fsdp_size": 4}, 1), ({"fsdp_size": 2, "tp_size": 2}, 2)])
def test_experts_change_neither_mesh_nor_heads(load: Load, sizes: dict[str, int], tensor: int) -> None:
    model = load("qwen3_moe", ep_size=2, **sizes)
    mesh = check_distribution(model)

    assert mesh is not None
    assert (mesh.size(mesh.data), mesh.size(mesh.tensor)) == (4 // tensor, tensor)
    assert heads_divided_by(model) == tensor


@divides_models
def test_a_dimension_of_another_name_is_refused(load: Load) -> None:
    model = load(fsdp_size=4)
    model._mesh_manager = None
    model._device_mesh = SimpleNamespace(mesh_dim_names=("fsdp", "cp"), size=lambda at: (2, 2)[at])

    with pytest.raises(ConfigError, match=r"divided over the dimension 'cp' of 2 ranks, and distca_hf knows pp, "):
        check_distribution(model)


@since(19, "a mark of models that it divided")
def test_a_divided_model_without_a_mesh_is_not_taken_for_a_whole_one(load: Load) -> None:
    model = load(fsdp_size=4)
    model._mesh_manager = model._device_mesh = None

    with pytest.raises(ConfigError, match="has no mesh that distca_hf knows"):
        check_distribution(model)


# Heads.


@trains_tensor_parallel
def test_a_rank_has_its_part_of_the_heads(load: Load) -> None:
    whole, part = (load(changes={"num_attention_heads": 24, "num_key_value_heads": 12, "hidden_size": 96}, **sizes)
                   for sizes in ({}, {"tp_size": 2, "fsdp_size": 2}))  # fmt: skip

    assert (heads_of(whole).query, heads_of(whole).key_value, head_groups_of(whole)) == (24, 12, divide_heads(12))
    assert (heads_of(part).query, heads_of(part).key_value, head_groups_of(part)) == (12, 6, divide_heads(6))
    assert head_groups_of(whole, tensor_ranks=2) == head_groups_of(part, tensor_ranks=1) == divide_heads(6)
    assert heads_of(part).dim == heads_of(whole).dim
    assert whole_heads_of_layers(part) == heads_of_layers(whole)


@trains_tensor_parallel
def test_a_plan_that_gathers_heads_leaves_all_of_them(load: Load) -> None:
    """OLMo 2 norms queries and keys over all heads."""
    model = load(transformers.Olmo2Config(**SMALL), tp_size=4)
    check_distribution(model)

    assert tensor_ranks(model) == 4
    assert heads_divided_by(model) == 1
    assert heads_of(model).key_value == 4


@trains_tensor_parallel
def test_latent_attention_is_divided_by_heads(load: Load) -> None:
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    config = transformers.DeepseekV2Config(**SMALL, first_k_dense_replace=1, **latent)
    model = load(config, tp_size=2, fsdp_size=2)
    check_distribution(model)

    assert (heads_of(model).query, heads_of(model).key_value) == (2, 2)


# What is refused.


@trains_tensor_parallel
@pytest.mark.parametrize(
    ("heads", "sizes", "said"),
    [
        (
            {"num_key_value_heads": 2},
            {"tp_size": 4},
            "has 2 KV heads, which tp_size=4 does not divide; set it to 1, 2",
        ),
        (
            {"num_key_value_heads": 1},
            {"tp_size": 2, "fsdp_size": 2},
            "has 1 KV heads, which tp_size=2 does not divide; set it to 1",
        ),
    ],
)
def test_heads_that_tensor_ranks_do_not_divide(
    load: Load, heads: dict[str, int], sizes: dict[str, int], said: str
) -> None:
    told = reasons(load(changes=heads, **sizes))

    assert "LlamaForCausalLM cannot be trained as it is divided between ranks: model.layers.0.self_attn" in told
    assert said in told


@trains_tensor_parallel
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            {"k_proj": "colwise_gather_output"},
            r"q_proj \(colwise\) is divided by heads, and \S+k_proj \(colwise_gather_output\) is not",
        ),
        (
            {"v_proj": "packed_colwise"},
            r"v_proj has the style 'packed_colwise', which is not known to keep heads whole",
        ),
    ],
)
def test_a_plan_that_divides_attention_otherwise_than_by_heads(load: Load, plan: dict[str, str], said: str) -> None:
    """`DistributedConfig` overrides single rules of a plan."""
    rules = {f"model.layers.*.self_attn.{name}": style for name, style in plan.items()}

    assert re.search(said, reasons(load(tp_size=2, fsdp_size=2, tp_plan=rules)))


@trains_tensor_parallel
def test_a_projection_of_all_three_in_a_row_is_not_cut(load: Load) -> None:
    config = transformers.Phi3Config(**SMALL, pad_token_id=0)
    assert check_distribution(load(config, tp_size=2, fsdp_size=2)) is not None

    rules = {"model.layers.*.self_attn.qkv_proj": "colwise"}
    told = reasons(load(config, tp_size=2, fsdp_size=2, tp_plan=rules))

    assert "gives queries, keys and values in a row, and the style 'colwise' cuts across them" in told


@divides_models
def test_tensor_parallelism_before_it_trains(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(changes={"num_key_value_heads": 4}, tp_size=4)

    assert has_data_and_tensor_mesh(model) == (VERSION >= (5, 19))
    monkeypatch.setattr(distributed_check, "has_data_and_tensor_mesh", lambda model: False)
    told = reasons(model)
    assert (
        f"tp_size=4 with Transformers {transformers.__version__}, which trains with tensor parallelism from " in told
    )
    assert f"{LOWEST_TENSOR} on, and divides experts between data ranks from {LOWEST_EXPERTS} on" in told


@pytest.mark.skipif(VERSION < (5, 20), reason="Transformers sends tokens to experts since 5.20")
@pytest.mark.parametrize("sizes", [{"fsdp_size": 4}, {"fsdp_size": 2, "tp_size": 2}])
def test_gradients_of_whole_experts_before_they_are_right(
    load: Load, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """5.20 to 5.22 halve them on two data ranks, with sdpa, too."""
    model = load("qwen3_moe", ep_size=4, **sizes)

    if VERSION >= (5, 23):
        assert list(refused_distribution(model)) == []
        monkeypatch.setattr(distributed_check, "wrong_expert_gradients", lambda model: 4)
    assert f"ep_size=4 with Transformers {transformers.__version__}: before 5.23 it gives experts" in reasons(model)


@divides_models
def test_stages_are_for_inference_alone(load: Load) -> None:
    told = reasons(load(changes={"num_key_value_heads": 4}, pp_size=4))

    assert "pp_size=4: Transformers runs the stages of a pipeline only for inference" in told
    assert "`distca examples pipeline`" in told


@pytest.mark.parametrize("kind", ["cp", "sp"])
def test_context_and_sequence_parallelism_of_accelerate(
    load: Load, accelerate_has: Callable[..., None], kind: str
) -> None:
    accelerate_has(**{kind: 2})

    assert f"{kind}_size=2: set it to 1; distca_hf spreads documents" in reasons(load())


def test_tensor_parallelism_of_accelerate(load: Load, accelerate_has: Callable[..., None]) -> None:
    accelerate_has("FSDP", tp=2, dp_shard=2)
    told = reasons(load())

    assert "tp_size=2 in Accelerate's ParallelismConfig, and Transformers divided the model between 1 tensor" in told
    assert "distributed_config=DistributedConfig(tp_size=2, fsdp_size=...)" in told


@trains_tensor_parallel
def test_the_deprecated_plan_divides_over_all_ranks(
    load: Load,
    folder: Callable[..., Path],
    accelerate_has: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))  # a launcher sets it, and Transformers reads it here
    path = folder("llama", num_key_value_heads=4)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="distca", tp_plan="auto")
    accelerate_has(tp=2, dp_shard=2)

    assert "divided the model between 4 tensor ranks: Accelerate's own" in reasons(model)


@trains_tensor_parallel
def test_accelerate_may_know_the_tensor_ranks_of_transformers(load: Load, accelerate_has: Callable[..., None]) -> None:
    """Trainer tells it."""
    accelerate_has(tp=2, dp_shard=2)

    assert list(refused_distribution(load(tp_size=2, fsdp_size=2))) == []


@divides_models
def test_a_model_is_not_sharded_twice(load: Load, accelerate_has: Callable[..., None]) -> None:
    model = load(fsdp_size=4)
    accelerate_has("FSDP")
    assert "(DistributedConfig, 4 ranks), and Accelerate would shard it again (FSDP); launch without" in reasons(model)

    accelerate_has("DEEPSPEED", deepspeed={})
    assert "(DistributedConfig, 4 ranks), and DeepSpeed would divide it again" in reasons(model)


def test_autotp_of_deepspeed(load: Load, accelerate_has: Callable[..., None]) -> None:
    accelerate_has("DEEPSPEED", deepspeed={"tensor_parallel": {"autotp_size": 2}})

    assert "autotp_size=2 in DeepSpeed's tensor_parallel" in reasons(load())


@divides_models
def test_enable_refuses_before_anything_is_changed(load: Load) -> None:
    model = load(fsdp_size=4, enable_sequence_parallel=True)

    with pytest.raises(ConfigError, match="enable_sequence_parallel"):
        distca_hf.enable(model, distca_hf.DistCAPlugin(tokens_per_rank=64))
    assert watch_of(model) is None
