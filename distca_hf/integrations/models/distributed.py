"""A model that Transformers divided between ranks when it was loaded (`DistributedConfig`): its mesh, and its plan.

Transformers keeps both in private attributes, which most of its releases lack. Only this module reads them:

| Transformers | mesh |
|---|---|
| 5.17 | `_device_mesh`, of one dimension; without a name under tensor parallelism |
| 5.18 | `_device_mesh`, the dimensions with more than one rank |
| 5.19 | `_mesh_manager`: `pp`, `fsdp`, `tp`; since 5.23 also `dp_replicate` |

Experts have their own mesh over the same ranks. It decides where tokens are computed, not which rank holds them, so
this module does not read it.
"""

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import transformers
from torch import nn
from transformers import PreTrainedModel

from distca_hf.errors import ConfigError
from distca_hf.integrations.models.structure import attention_layers, transformers_model
from distca_hf.parallel_context import DeviceMesh


# Names that Transformers gives to the dimensions of its mesh.
STAGES, DATA, TENSOR = ("pp",), ("dp_replicate", "fsdp"), ("tp",)
# Number of a layer in the name of a module; plans have a star there.
LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# Styles of a plan that leave every tensor rank its own part of the outputs, and styles that leave it all outputs.
DIVIDED, GATHERED = ("colwise",), ("colwise_gather_output", "colwise_rep", "replicate")
# Linear layers that compute queries, keys and values. The first group returns one head after the other.
BY_HEADS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "q_gate_proj", "query_key_value")
IN_A_ROW = ("qkv_proj", "c_attn", "Wqkv")


class ModelMesh(NamedTuple):
    """Ranks that a model is divided between, and what each dimension of their mesh stands for."""

    mesh: DeviceMesh  # all ranks of the job
    stages: tuple[str, ...]  # names of dimensions whose ranks run different layers
    data: tuple[str, ...]  # names of dimensions whose ranks hold different tokens
    tensor: tuple[str, ...]  # names of dimensions whose ranks hold parts of the same layers, and the same tokens

    def size(self, dimensions: Sequence[str]) -> int:
        """Returns the number of ranks along some dimensions."""
        names = _names(self.mesh)
        return prod(self.mesh.size(names.index(name)) for name in dimensions)


def model_mesh(model: nn.Module) -> ModelMesh | None:
    """Returns the mesh that Transformers divided a model over; None if it did not. Raises ConfigError if it did, but
    over unknown ranks, or over a dimension with an unknown name; UnsupportedAttentionError if it is not a Transformers
    model."""
    inner = transformers_model(model)
    manager = getattr(inner, "_mesh_manager", None)
    mesh: DeviceMesh | None = getattr(manager, "_dense_mesh", getattr(inner, "_device_mesh", None))
    where = f"{type(inner).__name__} of Transformers {transformers.__version__}"
    if mesh is None:
        if getattr(inner, "is_distributed_loading_by_transformers", False):
            raise ConfigError(
                f"{where} was divided between ranks when it was loaded, and has no mesh that distca_hf knows: which "
                "ranks hold the same tokens is unknown. Use a Transformers that distca_hf was tested with, or load "
                "the model without distributed_config"
            )
        return None
    names = _names(mesh)
    unknown = [name for name in names if name not in (*STAGES, *DATA, *TENSOR) and mesh.size(names.index(name)) > 1]
    if unknown:
        raise ConfigError(
            f"{where} is divided over the dimension {unknown[0]!r} of {mesh.size(names.index(unknown[0]))} ranks, and "
            f"distca_hf knows {', '.join((*STAGES, *DATA, *TENSOR))}: leave it out of distributed_config"
        )
    present = [tuple(name for name in kind if name in names) for kind in (STAGES, DATA, TENSOR)]
    return ModelMesh(mesh, *present)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Returns names of a mesh's dimensions. Transformers 5.17 gives it none under tensor parallelism."""
    return mesh.mesh_dim_names or TENSOR


def tensor_ranks(model: nn.Module) -> int:
    """Returns how many ranks hold parts of the same layers: `tp_size`, or 1."""
    mesh = model_mesh(model)
    return 1 if mesh is None else mesh.size(mesh.tensor)


def heads_divided_by(model: nn.Module) -> int:
    """Returns the number of ranks that attention's heads are divided between: 1 if every tensor rank attends with all
    heads, as with plans that gather queries, keys and values."""
    ranks = tensor_ranks(model)
    styles = _projections(transformers_model(model)) if ranks > 1 else ()
    return ranks if any(style in DIVIDED for _, style in styles) else 1


def has_data_and_tensor_mesh(model: nn.Module) -> bool:
    """Returns whether this Transformers has a mesh of data and tensor ranks, as it does since 5.19. Since then it
    trains with tensor parallelism, and its Trainer knows models that were divided as they were loaded."""
    return hasattr(transformers_model(model), "_mesh_manager")


def wrong_expert_gradients(model: nn.Module) -> int | None:
    """Returns the `ep_size` with which this Transformers gives experts the wrong gradients; None if they are right.

    Before 5.23 it divides gradients of experts by the data ranks through FSDP. If FSDP runs over one rank, which holds
    whole experts, they are divided twice.
    """
    inner = transformers_model(model)
    mesh, config = model_mesh(inner), getattr(inner.config, "distributed_config", None)
    ep_size: int = getattr(config, "ep_size", None) or 1
    if mesh is None or config is None or ep_size == 1 or "dp_replicate" in _names(mesh.mesh):
        return None
    return ep_size if config.efsdp_size == 1 < config.fsdp_size else None


def divided_by_transformers(model: nn.Module | None) -> bool:
    """Returns whether Transformers divided a model as it was loaded. If so, it saves the weights, but cannot resume
    the training."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def wants_sequence_parallel(model: nn.Module) -> bool:
    """Returns whether `DistributedConfig` asks for sequence parallelism, which Transformers has not implemented."""
    config = getattr(transformers_model(model).config, "distributed_config", None)
    return bool(getattr(config, "enable_sequence_parallel", False))


def undividable_attention(model: nn.Module) -> Iterator[str]:
    """Yields layers whose attention the tensor plan does not divide by heads.

    Ranks get whole heads if all linear layers that compute queries, keys and values are divided by column, or none of
    them is. This reads the model's plan after the overrides of `DistributedConfig`.
    """
    inner = transformers_model(model)
    if tensor_ranks(inner) == 1:
        return
    first: dict[bool, str] = {}
    for name, style in _projections(inner):
        projection = name.rpartition(".")[2]
        if style is not None and style not in (*DIVIDED, *GATHERED):
            yield f"{name} has the style {style!r}, which is not known to keep heads whole; give it 'colwise'"
            return
        if style in DIVIDED and projection in IN_A_ROW:
            yield (
                f"{name} gives queries, keys and values in a row, and the style {style!r} cuts across them; give it "
                "'colwise_gather_output'"
            )
            return
        first.setdefault(style in DIVIDED, f"{name} ({style or 'no style'})")
    if len(first) == 2:
        yield f"{first[True]} is divided by heads, and {first[False]} is not; give all of them 'colwise', or none"


def adapters_that_fail(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields layers with adapters of PEFT that do not work with the tensor plan: name, style.

    PEFT divides an adapter as its layer is divided. If the layer is divided by row, the adapter's sizes then differ
    from what Transformers expects. If FSDP2 also shards layers, this is so in all of them: adapters come later.
    """
    mesh, inner = model_mesh(model), transformers_model(model)
    if mesh is None or mesh.size(mesh.tensor) == 1:
        return
    is_sharded = mesh.size(mesh.data) > 1
    for name, module in inner.named_modules():
        style = _style_of(inner, name)
        if style is not None and hasattr(module, "base_layer") and (is_sharded or style not in DIVIDED):
            yield name, style


def _projections(model: PreTrainedModel) -> Iterator[tuple[str, str | None]]:
    """Yields names and styles of the linear layers that compute queries, keys and values."""
    for layer, module in attention_layers(model).items():
        for projection, _ in module.named_children():
            if projection in (*BY_HEADS, *IN_A_ROW):
                yield f"{layer}.{projection}", _style_of(model, f"{layer}.{projection}")


def _style_of(model: PreTrainedModel, module: str) -> str | None:
    plan = model.tp_plan or {}
    style: str | None = plan.get(module, plan.get(LAYER_NUMBER.sub("*", module)))
    return style
