"""Distribution check: refuses ways of dividing a model between ranks that would train wrongly, or cannot train.

`distributed` reads how Transformers divided a model, and the state of Accelerate says what Accelerate divides. A way
that is not known to be right is refused before the first step. Otherwise a rank could attend to parts of heads, or
wait for rows that are never sent.
"""

from collections.abc import Iterator

import transformers
from accelerate import DistributedType
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrize import ParametrizationList

from distca_hf.errors import ConfigError
from distca_hf.integrations.models.decoder_layers import whole_heads_of_layers
from distca_hf.integrations.models.distributed import (
    ModelMesh,
    adapters_that_fail,
    has_data_and_tensor_mesh,
    heads_divided_by,
    model_mesh,
    undividable_attention,
    wants_sequence_parallel,
    wrong_expert_gradients,
)
from distca_hf.integrations.models.structure import attention_layers, transformers_model
from distca_hf.parallel_context import DeviceMesh, ParallelContext
from distca_hf.torch_private import sharded_by_fsdp2


# Lowest Transformers that trains with tensor parallelism, and with experts divided between the same tensor ranks.
LOWEST_TENSOR = "5.19"
# Lowest that sends tokens to experts on other data ranks.
LOWEST_EXPERTS = "5.20"
# Lowest that gives experts the right gradients if no two ranks hold parts of the same expert.
LOWEST_WHOLE_EXPERTS = "5.23"


def check_distribution(model: nn.Module) -> ModelMesh | None:
    """Runs all checks, and returns the mesh that a model is divided over, as `distributed.model_mesh` does.

    Raises:
        ConfigError: the model, or its data, is divided in a way that cannot train with distca; gives all reasons.
        UnsupportedAttentionError: it is not a Transformers model.
    """
    reasons = list(refused_distribution(model))
    if reasons:
        name = type(transformers_model(model)).__name__
        raise ConfigError(f"{name} cannot be trained as it is divided between ranks: {'; '.join(reasons)}")
    return model_mesh(model)


def follow_mesh(model: nn.Module, context: ParallelContext) -> None:
    """Runs all checks, then makes a context follow the mesh that a model is divided over. Leaves it unchanged if
    Transformers did not divide the model.

    Raises:
        ConfigError: as `check_distribution`; or a loader, a model or the user has divided the ranks differently.
        UnsupportedAttentionError: it is not a Transformers model.
    """
    found = check_distribution(model)
    if found is not None:
        context.use_mesh(found.mesh, data=found.data, tensor=found.tensor, stages=found.stages)


def check_divided_heads(model: nn.Module, context: ParallelContext) -> None:
    """Checks that no two ranks that share documents hold different heads: rows of one rank would meet other heads on
    the other. FSDP2 gathers weights before they are used, and divides no heads. Raises ConfigError if a weight of an
    attention layer is divided between some of these ranks; names it and the ranks."""
    members, sharded = context.members, sharded_by_fsdp2(model)
    if sharded is None:
        return
    for layer, module in attention_layers(transformers_model(model)).items():
        for name, weight in _weights_as_they_are(module):
            if not isinstance(weight, DTensor):
                continue
            ranks = _ranks_of_parts(weight, sharded[weight].averaged if weight in sharded else None)
            if len(ranks & set(members.row_ranks)) > 1:
                raise ConfigError(
                    f"{members.grid.name}: {layer}.{name} is divided between ranks "
                    f"{', '.join(map(str, sorted(ranks)))} of the job, and ranks "
                    f"{', '.join(map(str, members.row_ranks))} share documents: they would exchange rows of different "
                    "heads. Call plugin.use_mesh(mesh, data=..., tensor=...) before the first loader and model, with "
                    "the dimension that divides layers as tensor"
                )


def _weights_as_they_are(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields weights that modules of a layer compute with, by name. Skips a weight if the class computes an attribute
    of its name (`torch.nn.utils.parametrize`, or sharding as a property), which may gather parts first."""
    for name, module in layer.named_modules():
        if isinstance(module, ParametrizationList):
            continue
        for of_module, weight in module.named_parameters(prefix=name, recurse=False):
            if not isinstance(getattr(type(module), of_module.rpartition(".")[2], None), property):
                yield of_module, weight


def _ranks_of_parts(weight: DTensor, sharded_over: DeviceMesh | None) -> set[int]:
    """Returns the ranks of the job that share a weight with this rank, each holding a part. FSDP2 gathers parts along
    `sharded_over` before use; None if it does not shard the weight."""
    mesh = weight.device_mesh
    at = mesh.get_coordinate()
    if at is None or mesh == sharded_over:
        return set()
    together = () if sharded_over is None else sharded_over.mesh_dim_names or ()
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    divides = [
        isinstance(placement, Shard) and name not in together
        for placement, name in zip(weight.placements, names, strict=True)
    ]
    parts = mesh.mesh[tuple(slice(None) if divided else own for divided, own in zip(divides, at, strict=True))]
    return set(parts.flatten().tolist())


def refused_distribution(model: nn.Module) -> Iterator[str]:
    """Yields all reasons against the way a model, or its data, is divided between ranks. Raises the errors of
    `distributed.model_mesh`."""
    mesh = model_mesh(model)
    tensor = 1 if mesh is None else mesh.size(mesh.tensor)
    if mesh is not None and mesh.size(mesh.stages) > 1:
        yield (
            f"pp_size={mesh.size(mesh.stages)}: Transformers runs the stages of a pipeline only for inference, "
            "without a backward pass; set it to 1, or train a pipeline as `distca examples pipeline` shows"
        )
    if wants_sequence_parallel(model):
        yield "enable_sequence_parallel=True has no effect in Transformers, or one that is not known; leave it out"
    yield from _accelerate(mesh, tensor)
    if tensor > 1 and not has_data_and_tensor_mesh(model):
        yield (
            f"tp_size={tensor} with Transformers {transformers.__version__}, which trains with tensor parallelism "
            f"from {LOWEST_TENSOR} on, and divides experts between data ranks from {LOWEST_EXPERTS} on: update it "
            "(pip install --upgrade transformers), or set tp_size=1"
        )
    elif tensor > 1:
        yield from undividable_attention(model)
        yield from _undivided_heads(model, tensor)
    adapted = next(adapters_that_fail(model), None)
    if adapted is not None:
        yield (
            f"{adapted[0]} has an adapter, and is divided between {tensor} tensor ranks ({adapted[1]}): PEFT and "
            "Transformers divide its weights in different ways; set tp_size=1 (adapters train with fsdp_size), or "
            "train without adapters"
        )
    wrong = wrong_expert_gradients(model)
    if wrong is not None:
        yield (
            f"ep_size={wrong} with Transformers {transformers.__version__}: before {LOWEST_WHOLE_EXPERTS} it gives "
            "experts that are whole on a rank a part of their gradients; update it (pip install --upgrade "
            "transformers), or set a smaller ep_size"
        )


def _undivided_heads(model: nn.Module, tensor: int) -> Iterator[str]:
    """Yields the first layer whose heads the tensor ranks cannot divide evenly. Transformers would fail in the first
    forward pass, at a reshape."""
    if heads_divided_by(model) == 1:
        return
    for layer, heads in whole_heads_of_layers(model).items():
        for number, kind in ((heads.key_value, "KV"), (heads.query, "query")):
            if number % tensor:
                sizes = ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
                yield f"{layer} has {number} {kind} heads, which tp_size={tensor} does not divide; set it to {sizes}"
                return


def _accelerate(mesh: ModelMesh | None, tensor: int) -> Iterator[str]:
    """Yields reasons against what Accelerate itself divides."""
    if not AcceleratorState._shared_state:  # no Accelerator was made
        return
    state = AcceleratorState()
    config = state.parallelism_config
    sizes = {name: getattr(config, f"{name}_size", None) or 1 for name in ("cp", "sp", "tp")}
    for name in ("cp", "sp"):
        if sizes[name] > 1:
            yield f"{name}_size={sizes[name]}: set it to 1; distca_hf spreads documents over all data ranks already"
    deepspeed = state.deepspeed_plugin
    if deepspeed is not None:
        autotp = deepspeed.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 1)
        if autotp > 1:
            yield (
                f"autotp_size={autotp} in DeepSpeed's tensor_parallel: distca_hf does not know how AutoTP divides "
                f"attention; set it to 1, or load the model with {_instead(autotp)} and without DeepSpeed"
            )
        elif mesh is not None:
            yield (
                f"the model was divided when it was loaded (DistributedConfig, {mesh.mesh.size()} ranks), and "
                "DeepSpeed would divide it again; launch without DeepSpeed, or load it without distributed_config"
            )
    if sizes["tp"] not in (1, tensor):
        yield (
            f"tp_size={sizes['tp']} in Accelerate's ParallelismConfig, and Transformers divided the model between "
            f"{tensor} tensor ranks: Accelerate's own tensor parallelism does not work with Transformers "
            f"{transformers.__version__}, and tp_plan='auto' by itself divides over all ranks. Load the model with "
            f"{_instead(sizes['tp'])}, and leave ParallelismConfig and tp_plan out"
        )
    elif mesh is not None and state.distributed_type == DistributedType.FSDP:
        yield (
            f"the model was divided when it was loaded (DistributedConfig, {mesh.mesh.size()} ranks), and Accelerate "
            "would shard it again (FSDP); launch without an FSDP configuration, because fsdp_size does the same, or "
            "load it without distributed_config"
        )


def _instead(tensor: int) -> str:
    """Returns the call that asks Transformers for this many tensor ranks."""
    return f"from_pretrained(..., distributed_config=DistributedConfig(tp_size={tensor}, fsdp_size=...))"
