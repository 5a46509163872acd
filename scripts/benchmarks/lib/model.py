"""The model of a benchmark step: any Transformers decoder, checkpointed and sharded."""

import argparse
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.cost import Mask
from distca_hf.integrations.models.decoder_layers import masks_of_layers
from lib.baselines.operators import SAVED_OPERATORS
from lib.documents import attended_pairs


# Configurations by name. Models with windows, or with layers that carry a state, have as many layers as
# one of each kind takes; `tiny` is for CPUs: a program takes seconds with it.
PRESETS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text()) for file in sorted(Path(__file__).parents[1].glob("presets/*.json"))
}
PROBE_TOKENS = 64
FUSED_LOSS = "fused_linear_cross_entropy"
LOSSES = ("cross_entropy", FUSED_LOSS)  # parts that liger_kernel may replace


class LossModel(nn.Module):
    """A causal language model whose output is a loss.

    Calling it runs the product's hooks, as any enabled model does; `forward` runs only the model. The product finds
    the Transformers model inside as it does in a PEFT model.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def get_base_model(self) -> PreTrainedModel:
        """Returns the Transformers model, as a PEFT model has it."""
        return self.causal_lm

    def forward(self, **batch: Any) -> torch.Tensor:
        """Returns the loss of a batch: a scalar."""
        return self.causal_lm(**batch).loss

    @property
    def layers(self) -> list[nn.Module]:
        """Returns the decoder layers."""
        return [module for module in self.causal_lm.modules() if isinstance(module, GradientCheckpointingLayer)]

    @property
    def root(self) -> nn.Module:
        """Returns the module that is sharded as a whole, but for its layers."""
        return self.causal_lm


class Backbone(LossModel):
    """A causal language model without its head.

    The loss is a weighted mean of squared hidden states: no head, no labels, and yet a gradient for every weight. (A
    plain mean would have hardly any after the last norm, which makes it 1.)
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__(causal_lm)
        causal_lm.set_output_embeddings(nn.Identity())
        hidden_size = causal_lm.config.get_text_config().hidden_size
        self.register_buffer("weight", torch.linspace(0, 2, hidden_size, device=causal_lm.device), persistent=False)

    def forward(self, **batch: Any) -> torch.Tensor:
        """Returns the weighted mean of squared hidden states of a batch: a scalar in fp32."""
        squares = self.hidden_states(**batch).float().square()
        return (squares @ self.get_buffer("weight")).mean()

    def hidden_states(self, **batch: Any) -> torch.Tensor:
        """Returns `[1, T, hidden size]` outputs of the last layer, after the last norm."""
        hidden: torch.Tensor = self.causal_lm.base_model(**{"use_cache": False, **batch}).last_hidden_state
        return hidden

    @property
    def root(self) -> nn.Module:
        """Returns the model without a head."""
        return self.causal_lm.base_model


@dataclass(frozen=True)
class AttentionKind:
    """Layers that attend alike."""

    mask: Mask
    heads: int  # query heads
    kv_heads: int
    head_dim: int  # numbers of a query or key in a head
    value_dim: int  # numbers of a value in a head
    scale: float  # factor of the scores

    @property
    def window_tokens(self) -> int:
        """Returns the tokens of a sliding window; 0 without one."""
        return 0 if self.mask.chunked else self.mask.window_tokens or 0

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Returns heads and numbers of a head: of q, k, v and the output."""
        query, key = (self.heads, self.head_dim), (self.kv_heads, self.head_dim)
        return query, key, (self.kv_heads, self.value_dim), (self.heads, self.value_dim)


@dataclass(frozen=True)
class Shape:
    """The work of a model: of attention and of matrix products."""

    linear_flops: float  # flops of one token in matrix products, forward, in all layers
    # Attention layers of each kind, in order of their calls in a forward pass.
    layers: Mapping[AttentionKind, Sequence[nn.Module]]

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """Returns the kinds of attention layers."""
        return tuple(self.layers)

    @property
    def only_kind(self) -> AttentionKind:
        """Returns the kind of all layers; exits if there are several."""
        if len(self.layers) > 1:
            raise SystemExit(f"layers attend in {len(self.layers)} ways: leave modes of other packages out")
        return self.kinds[0]

    def pairs(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Returns the attended pairs of documents of so many tokens, in all layers of each kind."""
        return tuple(len(layers) * attended_pairs(lengths, kind.mask) for kind, layers in self.layers.items())

    def attention_flops(self, pairs: Sequence[float]) -> float:
        """Returns the flops of so many attended pairs of each kind, forward: of scores and weighted sums."""
        of_pairs = [2 * (kind.head_dim + kind.value_dim) * kind.heads for kind in self.kinds]
        return sum(count * of_pair for count, of_pair in zip(pairs, of_pairs, strict=True))


def read_config(options: argparse.Namespace, longest_tokens: int) -> PreTrainedConfig:
    """Returns the configuration of a file or a preset (`lib.options.add_model`), with positions for the longest
    document."""
    values = json.loads(options.config.read_text()) if options.config else PRESETS[options.preset]
    values = {**values, "num_hidden_layers": options.layers or values["num_hidden_layers"], "use_cache": False}
    for name in ("layer_types", "layers_block_type"):
        if values.get(name):
            values[name] = values[name][: values["num_hidden_layers"]]
    values["max_position_embeddings"] = max(values.get("max_position_embeddings") or 0, longest_tokens)
    return AutoConfig.for_model(**values)


def build_model(config: PreTrainedConfig, options: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """Returns the model with random weights, equal on all ranks; with FSDP and bf16 they are fp32, as in training."""
    torch.manual_seed(0)
    dtype = torch.float32 if options.fsdp else options.dtype
    with device:
        causal_lm = AutoModelForCausalLM.from_config(config, attn_implementation="distca", dtype=dtype)
    if options.liger:
        use_liger_layers(causal_lm)
    return causal_lm.train()


class AttentionCall(NamedTuple):
    """The arguments of a layer's attention."""

    module: nn.Module
    query: torch.Tensor  # `[B, N, T, H]`
    value: torch.Tensor  # `[B, G, T, V]`
    scale: float  # of scores


@contextmanager
def without_attention(causal_lm: PreTrainedModel) -> Iterator[list[AttentionCall]]:
    """Lets attention return zeros, whatever the dtype; yields the calls that it gets."""
    calls: list[AttentionCall] = []

    def look(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **given: Any
    ) -> tuple[torch.Tensor, None]:
        scale = given.get("scaling")
        calls.append(AttentionCall(module, query, value, query.shape[-1] ** -0.5 if scale is None else scale))
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None

    AttentionInterface.register("bench_probe", look)
    causal_lm.set_attn_implementation("bench_probe")
    yield calls
    causal_lm.set_attn_implementation("distca")
    AttentionInterface.register("bench_probe", _leave_alone)  # the other one holds the calls, and so the model


def _leave_alone(module: nn.Module, *inputs: Any, **given: Any) -> tuple[torch.Tensor, None]:
    raise RuntimeError(f"{type(module).__name__} attends as `without_attention` had it, which has ended")


def probe(model: LossModel) -> Shape:
    """Runs a few tokens through the model without attention; counts flops, and keeps attention's arguments.

    A collective call: if experts are divided, their flops are those of all ranks' tokens, and the mean is taken.
    """
    causal_lm = model.causal_lm
    positions = torch.arange(PROBE_TOKENS, device=causal_lm.device)[None]
    counter = FlopCounterMode(display=False)
    used = causal_lm.config._experts_implementation  # `get_experts_implementation` is new in Transformers 5.14
    causal_lm.set_experts_implementation("eager")  # torch counts no flops of grouped matrix products
    with without_attention(causal_lm) as calls, torch.no_grad(), counter:
        model.forward(input_ids=torch.zeros_like(positions), position_ids=positions)
    causal_lm.set_experts_implementation(used)
    flops = torch.tensor(counter.get_total_flops(), dtype=torch.float64, device=causal_lm.device)
    dist.all_reduce(flops)
    masks = {causal_lm.get_submodule(name): mask for name, mask in masks_of_layers(model).items()}
    layers: dict[AttentionKind, list[nn.Module]] = {}
    for call in calls:
        _, heads, _, head_dim = call.query.shape
        _, kv_heads, _, value_dim = call.value.shape
        kind = AttentionKind(masks[call.module], heads, kv_heads, head_dim, value_dim, call.scale)
        layers.setdefault(kind, []).append(call.module)
    return Shape(float(flops) / dist.get_world_size() / PROBE_TOKENS, layers)


def prepare(model: LossModel, options: argparse.Namespace, device: torch.device) -> None:
    """Adds checkpointing, and then FSDP2 if Transformers has not, in several replicas (HSDP) if that is asked for; in
    place. Weights and sums of gradients over ranks keep their dtypes, and all else has `dtype`."""
    if options.checkpointing != "none":
        model.causal_lm.gradient_checkpointing_enable(checkpointing_keywords(options.checkpointing == "saved"))
    if not options.fsdp or options.ep_size > 1 or options.tp_size > 1:
        return
    replicas = options.dp_replicate_size
    sizes = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp_replicate", "fsdp"))
    # FSDP casts what a layer is given in forward, but not in recomputation: OLMo's rotary embeddings are fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=options.dtype, reduce_dtype=options.reduce_dtype, cast_forward_inputs=False
    )
    shard = functools.partial(
        fully_shard,
        mesh=mesh if replicas > 1 else mesh["fsdp"],
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda") if options.offload else OffloadPolicy(),
    )
    for layer in model.layers:
        shard(layer, reshard_after_forward=True)
    shard(model.root)


def checkpointing_keywords(saves: bool) -> dict[str, Any]:
    """Returns keywords of torch's checkpointing. `saves`: it saves attention outputs as the product does
    (`checkpointed_attention="save"`), for the operators of all modes."""
    context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _saving_policy)} if saves else {}
    return {"use_reentrant": False, **context}


def _saving_policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    of_product = (torch.ops.distca.flash_attn.default, torch.ops.distca.flash_attn_local.default)
    saved = operator in (*SAVED_OPERATORS, *of_product)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def use_liger_layers(causal_lm: PreTrainedModel) -> None:
    """Replaces norms, rotary embeddings and MLPs: whatever liger_kernel has for the model; in place."""
    patch, parts = _patch_of(causal_lm)
    patch(model=causal_lm, **{name: False for name in LOSSES if name in parts})


def use_liger_loss(causal_lm: PreTrainedModel) -> None:
    """Replaces the loss by one without logits of all tokens, and nothing else; in place."""
    patch, parts = _patch_of(causal_lm)
    if FUSED_LOSS not in parts:
        raise SystemExit(f"liger_kernel has no fused loss for {causal_lm.config.model_type}")
    patch(model=causal_lm, **{name: name == FUSED_LOSS for name in parts})


def _patch_of(causal_lm: PreTrainedModel) -> tuple[Callable[..., None], list[str]]:
    """Returns the function that replaces parts of these models, and the parts' names; exits if there is none."""
    from liger_kernel.transformers import monkey_patch

    patch = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(causal_lm.config.model_type)
    if patch is None:
        raise SystemExit(f"liger_kernel does not know {causal_lm.config.model_type}")
    return patch, [name for name in inspect.signature(patch).parameters if name != "model"]
