"""Attention modules in tiles: they run on some heads at a time.

    forward     input ──┬─ tile ── q, k, v, attention ──┬─▶ output projection
                        ├─ tile ── q, k, v, attention ──┤
                        └─ tile ── q, k, v, attention ──┘

A tile has some KV heads and the query heads that share them: the module's own forward runs with their rows of the
projections' weights, and without the output projection, which runs once on all heads. Tiles are checkpointed one by
one. Their attention outputs are kept (`runtime.regions.TileRegion`), and backward computes queries, keys and values
again for one tile at a time. If a checkpointed layer keeps its attention outputs, its recomputation runs no tile, so
tiles cost no time. Gradients of the input are summed in fp32.

A module can run in tiles if its forward uses only attributes in `KNOWN`, and each row of its weights belongs to one
head.
"""

import ast
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel

from distca_hf.cost import heads_of_tiles
from distca_hf.errors import ConfigError
from distca_hf.integrations.models.distributed import heads_divided_by
from distca_hf.integrations.models.structure import Function, attention_layers, source_of, syntax_of
from distca_hf.integrations.models.tiles import TiledForward, Versions
from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.runtime.regions import TileRegion, current_run, is_saved, outputs_in, runs_of
from distca_hf.telemetry import get_logger
from distca_hf.torch_private import hidden_from_dynamo


log = get_logger(__name__)

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# Names that Transformers gives to the output projection.
OUTPUTS = ("o_proj", "out_proj", "dense")
# Norms of queries, keys and values. If a weight has the size of one head, each head is normalized by itself.
NORMS = ("q_norm", "k_norm", "v_norm", "qk_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
SINKS = "sinks"
# In the source of modules whose query projection also computes gates of the heads' outputs (Qwen3-Next).
GATED = "self.head_dim * 2"
# Dropout after the output projection; it must be 0.
DROPOUTS = ("residual_dropout", "resid_dropout")
# Other attributes that do not depend on the number of heads.
PLAIN = (
    *("attention_dropout", "attn_logit_softcapping", "attn_scale", "attn_temperature_tuning", "config", "dropout"),
    *("floor_scale", "force_rope", "head_dim", "is_causal", "is_sliding", "key_multiplier", "layer_idx", "layer_type"),
    *("num_key_value_groups", "qk_layernorm", "rotary_emb", "rotary_ndims", "scaling", "sliding_window", "training"),
    *("use_qk_norm", "use_rope", "config._attn_implementation", "config.clip_qkv", "config.rope_parameters"),
)
KNOWN = frozenset({*PROJECTIONS, *OUTPUTS, *NORMS, SINKS, *DROPOUTS, *PLAIN})
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Functions to which a forward may pass the module itself.
TAKE_MODULE = ("attention_interface", "hasattr")


def tiled_attention(model: PreTrainedModel, most: int) -> dict[nn.Module, int]:
    """Returns the number of tiles of every attention module of a model that runs in more than one. Raises ConfigError
    if there is none, or a module cannot run on some of its heads; names the module and the reason."""
    layers, setting = attention_layers(model), f"{TiledAttention.setting}={most}"
    if heads_divided_by(model) > 1:
        raise ConfigError(f"{setting}: tensor ranks divide the heads of this model already; leave out one of the two")
    for name, layer in layers.items():
        reason = next(head_refusals(layer), None)
        if reason is not None:
            raise ConfigError(
                f"{setting}: {name} ({type(layer).__name__}) {reason}; leave {TiledAttention.setting} out"
            )
    tiles = {layer: len(heads_of_tiles(_kv_heads(layer), most)) for layer in layers.values()}
    tiled = {layer: number for layer, number in tiles.items() if number > 1}
    if not tiled:
        heads = max(map(_kv_heads, layers.values()), default=0)
        raise ConfigError(
            f"{setting}: no layer of {type(model).__name__} has more than {heads} KV heads, so there is nothing to "
            f"divide; set it below {heads}, or leave it out"
        )
    log.info("attention of %d of %d layers runs in tiles of at most %d KV heads", len(tiled), len(layers), most)
    return tiled


def head_refusals(layer: nn.Module) -> Iterator[str]:
    """Yields why an attention module cannot run on some of its heads."""
    if any(hasattr(weight, "ds_id") for weight in layer.parameters()):
        yield "has weights that DeepSpeed ZeRO-3 divides between ranks"
        return
    used = _used(type(layer).forward)
    missing = [name for name in PROJECTIONS if name not in used]
    unknown = sorted(used - KNOWN, key=lambda name: (name.startswith("config."), name))
    if unknown and not missing:
        yield f"uses {unknown[0]}, which is not known to work on some of the heads"
        return
    missing += [] if used & {*OUTPUTS} else [OUTPUTS[0]]
    missing += [] if "head_dim" in used else ["head_dim"]
    if missing:
        yield f"has no {missing[0]}"
        return
    projections = {name: getattr(layer, name) for name in PROJECTIONS}
    for name, projection in projections.items():
        if not _is_linear(projection):
            kind = type(projection).__name__
            yield f"has a {kind} as {name}, which is neither a linear layer nor one with plain LoRA"
            return
    head_dim, (q, k, v) = int(layer.head_dim), (one.out_features for one in projections.values())  # type: ignore[arg-type]
    output = getattr(_output(layer), "in_features", q)
    gated = 2 if GATED in source_of(type(layer).forward) else 1
    if k != v or k % head_dim or output % k or q != gated * output:
        yield (
            f"has {q}, {k} and {v} rows in {', '.join(PROJECTIONS)}, and {output} columns in its output projection: "
            f"these are not heads of {head_dim} numbers"
        )
    for name, weight in layer.named_parameters():
        shape, part = tuple(weight.shape), name.partition(".")[0]
        right = {SINKS: (output // head_dim,)} | dict.fromkeys(NORMS, (head_dim,))
        if part in right and shape != right[part]:
            yield f"has {name} of shape {shape}, which is not {right[part]}: it acts on all heads together"
    for name in DROPOUTS:
        dropout = getattr(layer, name, 0.0)
        if getattr(dropout, "p", dropout):
            yield f"drops some of its outputs ({name}); set it to 0"


@lru_cache(maxsize=256)
def _used(forward: Function) -> frozenset[str]:
    """Returns names of the attributes that a forward function reads from its module and its configuration; also "self"
    if it passes the module to a function that is not in `TAKE_MODULE`."""
    nodes = list(syntax_of(forward))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own = {node.attr for node in attributes if ast.unparse(node.value) == "self"}
    of_config = {f"config.{node.attr}" for node in attributes if ast.unparse(node.value) == "self.config"}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in TAKE_MODULE]
    allowed = {id(argument) for call in calls for argument in call.args}
    allowed |= {id(node.value) for node in attributes}
    passes = {
        node.id for node in nodes if isinstance(node, ast.Name) and node.id == "self" and id(node) not in allowed
    }
    return frozenset(own | of_config | passes)


def _is_linear(projection: nn.Module) -> bool:
    """Returns whether a projection is a linear layer, or has plain LoRA."""
    if type(projection) is nn.Linear:
        return True
    of_lora = type(projection).__module__.startswith("peft.tuners.lora.") and hasattr(projection, "lora_variant")
    return of_lora and not projection.lora_variant and type(projection.base_layer) is nn.Linear


def _output(layer: nn.Module) -> nn.Module:
    return next(part for name in OUTPUTS if (part := getattr(layer, name, None)) is not None)


def _kv_heads(layer: nn.Module) -> int:
    return layer.k_proj.out_features // layer.head_dim  # type: ignore[operator, return-value, union-attr]


class TiledAttention(TiledForward):
    """The function of an attention module that runs in tiles of at most `most` KV heads."""

    setting = "attention_kv_heads"
    # Whether a tile returns the output of its only attention call, without gates, and nothing in it drops at random.
    _only_attends = False

    @hidden_from_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Runs the module in tiles; with a cache, outside of training, on all heads, because a cache has all of them.
        Raises ConfigError if the module has parts that act on all heads, or results of them."""
        if any(isinstance(given, Cache) for given in (*args, *kwargs.values())):
            if not (self.module.training and torch.is_grad_enabled()):
                whole: tuple[Any, ...] = type(self.module).forward(self.module, *args, **kwargs)
                return whole
            raise ConfigError(
                f"{self.setting}={self.most}: {type(self.module).__name__} got a cache of all heads; train with "
                f"use_cache=False, or leave {self.setting} out"
            )
        self._check()
        x, args = (kwargs.pop("hidden_states"), args) if "hidden_states" in kwargs else (args[0], args[1:])
        if not torch.is_grad_enabled():
            return self._project(*[self._run(part, x, *args, **kwargs) for part in self._parts(False)]), None
        outputs, versions = [], self.versions()
        for part in self._parts(True):
            region = TileRegion()
            given = partial(self._run_kept, region, part, versions), x, *args
            outputs.append(checkpoint(*given, use_reentrant=False, context_fn=partial(runs_of, region), **kwargs))
            region.hold()
        # Outputs of tiles are kept anyway; checkpointing avoids keeping a joined copy of them.
        return checkpoint(self._project, *outputs, use_reentrant=False), None

    def _run_kept(
        self, region: TileRegion, part: nn.Module, versions: Versions, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Runs a tile, in forward or in its recomputation.

        If the enclosing layer is recomputed and kept its attention outputs, it needs nothing else of a tile: they are
        returned. The tile is recomputed later, in its backward.
        """
        self.check_versions(versions)
        run = current_run()
        assert run is not None
        if run.recomputes:
            return self._run(part, x, *args, **kwargs)
        if self._only_attends and is_saved(run.outer):
            outputs = outputs_in(run.outer, tuple)
            region.note(outputs)
            return _Again.apply(torch.empty(0, requires_grad=True), outputs[0].view(*x.shape[:-1], -1))
        output = self._run(part, x, *args, **kwargs)
        # A dropout that is skipped would shift the random numbers of the next one.
        drops = any(isinstance(one, nn.Dropout) and one.p for one in self.module.modules())
        self._only_attends = not drops and region.is_only_output(output)
        return output

    def _run(self, part: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        returned = type(self.module).forward(part, *args, **kwargs)
        if not isinstance(returned, tuple) or len(returned) != 2 or returned[1] is not None:
            raise ConfigError(
                f"{self.setting}={self.most}: {type(self.module).__name__} does not return a tuple of its "
                f"output and None; leave {self.setting} out"
            )
        output: torch.Tensor = returned[0]
        return output

    def _project(self, *outputs: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = _output(self.module)(torch.cat(outputs, dim=-1))
        return projected

    def _check(self) -> None:
        """Raises ConfigError if the function was replaced, or parts of the module act on all heads."""
        self.check_weights()
        what = "" if self.replaced is None else "another function in place of its forward"
        for name in PROJECTIONS:
            part = getattr(self.module, name)
            if any("forward" in vars(one) or any(getattr(one, hooks) for hooks in HOOKS) for one in part.modules()):
                what = f"hooks of {name}, or a function in place of its forward"
            elif isinstance(part.weight, DTensor):
                what = f"{name} divided between ranks"
        if what:
            raise ConfigError(
                f"{self.setting}={self.most}: {type(self.module).__name__} has {what}, which would act on all heads; "
                f"remove it, or leave {self.setting} out"
            )

    def _parts(self, sums_gradient: bool) -> list[nn.Module]:
        """Returns the module once for each tile, with rows of its heads."""
        module = self.module
        kv_heads = heads_of_tiles(_kv_heads(module), self.most)

        def rows(number: int) -> list[int]:
            return [number // sum(kv_heads) * heads for heads in kv_heads]

        projections = {name: getattr(module, name) for name in PROJECTIONS}
        of_tiles = {
            name: _rows_of(projection, rows(projection.out_features)) for name, projection in projections.items()
        }
        if sums_gradient:
            total = _SummedGradient(len(PROJECTIONS) * len(kv_heads))
            of_tiles = {
                name: [partial(_summed, total, project) for project in each] for name, each in of_tiles.items()
            }
        sinks: Any = getattr(module, SINKS, None)
        if sinks is not None:
            of_tiles[SINKS] = list(sinks.split(rows(len(sinks))))
        output = next(name for name in OUTPUTS if hasattr(module, name))
        of_tiles[output] = [_same] * len(kv_heads)
        return [
            _with(module, dict(zip(of_tiles, values, strict=True))) for values in zip(*of_tiles.values(), strict=True)
        ]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _summed(total: "_SummedGradient", project: Callable[..., Any], x: torch.Tensor) -> Any:
    """Returns a projection of the input, and lets `total` sum the gradient of the input."""
    return project(_Input.apply(x, total))


def _with(module: nn.Module, attributes: dict[str, Any]) -> nn.Module:
    """Returns a shallow copy of a module with some attributes replaced."""
    part = object.__new__(type(module))
    vars(part).update(vars(module), **attributes)
    return part


def _rows_of(projection: Any, rows: list[int]) -> list[Callable[..., Any]]:
    """Splits a linear layer, perhaps with LoRA, into layers with these numbers of consecutive rows."""
    if type(projection) is nn.Linear:
        biases: Any = [None] * len(rows) if projection.bias is None else projection.bias.split(rows)
        weights = projection.weight.split(rows)
        return [partial(linear, weight=weight, bias=bias) for weight, bias in zip(weights, biases, strict=True)]
    bases = _rows_of(projection.base_layer, rows)
    adapters = {name: _rows_of(adapter, rows) for name, adapter in projection.lora_B.items()}
    return [
        partial(
            type(projection).forward,
            _with(projection, {"base_layer": base, "lora_B": {name: each[at] for name, each in adapters.items()}}),
        )
        for at, base in enumerate(bases)
    ]


class _SummedGradient:
    """Sum of an input's gradients of all projections in all tiles, in fp32 at least."""

    def __init__(self, parts: int) -> None:
        self._parts = self._missing = parts
        self._total: torch.Tensor | None = None

    def add(self, dx: torch.Tensor) -> torch.Tensor | None:
        """Adds a gradient; returns the sum after the last one, in the dtype of the input."""
        if self._total is None:
            total = dx.to(accumulation_dtype(dx.dtype), copy=True)
        else:
            total = self._total.add_(dx)
        self._total, self._missing = total, self._missing - 1
        if self._missing:
            return None
        self._total, self._missing = None, self._parts
        return total.to(dx.dtype)


class _Again(torch.autograd.Function):
    """Gives a kept output a node in the graph, as it has in forward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, None]:
        raise AssertionError("backward of a layer runs through the graph of forward")


class _Input(torch.autograd.Function):
    """Passes the input to a projection, and its gradient to the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: _SummedGradient) -> torch.Tensor:
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.total.add(dx), None
