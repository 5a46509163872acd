"""Enabling a model: checked before the first step, watched during it, and told what only the plan knows.

Batches of `plugin.dataloader` bring their plan along. Any other batch that an enabled model trains on is planned here,
right before its forward pass.
"""

import inspect
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from distca_hf.comm.groups import default_device
from distca_hf.errors import PlanError, UnsupportedAttentionError
from distca_hf.integrations.attention import ENABLED, LocalSettings
from distca_hf.integrations.checkpointing import (
    checkpointed_modules,
    keep_received,
    recomputes_attention,
    save_attention,
)
from distca_hf.integrations.heads import head_groups_of, token_bytes_of
from distca_hf.integrations.model_check import (
    attention_layers,
    check_model,
    forward_accepts,
    longest_rotary_tokens,
    rotary_refusal,
    transformers_model,
)
from distca_hf.integrations.packs import PackPlanner, fill_empty, tokens_of
from distca_hf.runtime.plans import LivePlan
from distca_hf.telemetry import get_logger


if TYPE_CHECKING:
    from distca_hf.integrations.plugin import DistCAPlugin

log = get_logger(__name__)

# Attribute of an enabled model that holds its watch.
WATCH = "_distca_watch"
# Order is part of what ranks agree on.
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def enable(model: nn.Module, plugin: "DistCAPlugin", longest_document_tokens: int | None = None) -> nn.Module:
    """Checks a model and watches its forward passes. Call it before wrapping the model (DDP, FSDP,
    `accelerator.prepare`).

    Any packed batch can be trained on: the ranks plan it together, and attention tasks move between them. With batches
    of `plugin.dataloader`, `model(**batch)` also returns a loss whose mean over ranks is the mean over
    all labels of the global micro-batch: `num_items_in_batch` is filled in, unless the caller passes one (for an
    accumulation window, say).

    Args:
        model: a Transformers causal language model loaded with `attn_implementation="distca"`, or a PEFT model around
            one.
        plugin: settings, and the transport between ranks.
        longest_document_tokens: longest document the model will see, for sliding windows and rotary embeddings that
            depend on it; by default the longest that all ranks together can hold.

    Returns:
        The same model. Enabling it again does nothing.

    Raises:
        UnsupportedAttentionError: the model would compute something else than its own attention; says what.
        ConfigError: the model was not loaded for distca.
    """
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    longest = longest_document_tokens if longest_document_tokens is not None else plugin.tokens_per_rank * world_size
    check_model(model, longest, plugin.kernel, default_device())
    if not hasattr(model, WATCH):
        setattr(model, WATCH, ForwardWatch(model, plugin))
        for layer in attention_layers(transformers_model(model)).values():
            setattr(layer, ENABLED, LocalSettings(plugin.kernel, plugin.deterministic))
    return model


def packs_of(model: nn.Module) -> PackPlanner | None:
    """The planner of an enabled model's packs; None before the first one."""
    watch: ForwardWatch | None = getattr(model, WATCH, None)
    return None if watch is None else watch.packs


class ForwardWatch:
    """Hooks around the forward pass of the outermost module."""

    def __init__(self, model: nn.Module, plugin: "DistCAPlugin") -> None:
        self.packs: PackPlanner | None = None
        self._plugin = plugin
        inner = transformers_model(model)
        self._class_name = type(inner).__name__
        layers = attention_layers(inner)
        self._attention_layers, self._attention_checksum = len(layers), _checksum_of(layers, inner.config)
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._accepts_use_cache = forward_accepts(inner, "use_cache")
        self._config = inner.config
        self._told_of_cache = False
        self._head_groups, self._token_bytes = head_groups_of(model), token_bytes_of(model)
        self._longest_rotary_tokens = longest_rotary_tokens(model)
        self._calls: int | None = None
        self._checkpointed: list[nn.Module] | None = None
        model.register_forward_pre_hook(torch.compiler.disable(self._before), with_kwargs=True)
        model.register_forward_hook(torch.compiler.disable(self._after), with_kwargs=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("distca_plan") is None:
            batch = dict(zip(self._parameters, args, strict=False)) | kwargs
            plan = self._plan_packs(module, batch)
            if plan is None:
                return None
            args, kwargs = (), {**batch, **fill_empty(batch), "distca_plan": plan}
        plan = kwargs["distca_plan"]
        if not isinstance(plan, LivePlan):
            raise PlanError(
                f"distca_plan is a {type(plan).__name__}, not the plan that plugin.dataloader made; pass batches on "
                "unchanged"
            )
        self._check_length(plan)
        rows_wait = False
        if self._plugin.checkpointed_attention != "recompute":
            self._save_attention(module)
        elif self._plugin.kv_residency != "refetch" and plan.transport.world_size > 1:
            rows_wait = keep_received(self._checkpointed_modules(module))
        layers_kept = 1 if self._recomputes_attention(module) else self._attention_layers
        plan.begin_forward_pass(
            self._calls,
            {
                "gradients": int(torch.is_grad_enabled()),
                "training": int(module.training),
                "parameter_dtype": _dtype_number(module),
                "attention layers": self._attention_layers,
                "checksum of their names and heads": self._attention_checksum,
                "layers saved at the same time": layers_kept,
                "received rows wait for recomputation": int(rows_wait),
            },
            layers_kept,
            self._calls or self._attention_layers,
        )
        return args, {**kwargs, **_label_count(kwargs, plan), **self._no_cache(kwargs)}

    def _no_cache(self, kwargs: dict[str, Any]) -> dict[str, bool]:
        """`use_cache=False`, unless the caller decided: nobody generates from a batch with a plan, and a cache would
        keep the keys of all layers alive."""
        if not self._accepts_use_cache or kwargs.get("use_cache") is not None:
            return {}
        if getattr(self._config, "use_cache", False) and not self._told_of_cache:
            self._told_of_cache = True
            log.info("%s: config.use_cache=True is not followed for batches with a plan", self._class_name)
        return {"use_cache": False}

    def _plan_packs(self, module: nn.Module, batch: dict[str, Any]) -> LivePlan | None:
        """The plan of a batch without one; None if it attends locally, which is decided alike on all ranks: there is
        one rank, or the model is not training (evaluation, generation, a teacher), unless evaluation is shared."""
        trains = module.training and torch.is_grad_enabled()
        evaluates = not module.training and self._plugin.evaluate == "distca"
        if not (trains or evaluates) or batch.get("past_key_values") is not None:
            return None
        if self.packs is None:
            if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
                return None
            transport = self._plugin.transport(tokens_of(batch).device)
            self.packs = PackPlanner(self._plugin, transport, self._head_groups, self._token_bytes)
        return self.packs.plan(batch)

    def _recomputes_attention(self, module: nn.Module) -> bool:
        """Whether backward computes attention again, one layer after the other."""
        return recomputes_attention(self._checkpointed_modules(module))

    def _checkpointed_modules(self, module: nn.Module) -> list[nn.Module]:
        """Wrappers may come, and checkpointing may be switched on, until the first forward pass."""
        if self._checkpointed is None:
            self._checkpointed = checkpointed_modules(module)
        return self._checkpointed

    def _save_attention(self, module: nn.Module) -> None:
        first = self._checkpointed is None
        on_host = self._plugin.checkpointed_attention == "offload"
        if not save_attention(self._checkpointed_modules(module), on_host) and first:
            log.warning(
                "reentrant activation checkpointing recomputes attention and its exchanges; use_reentrant=False saves "
                "their outputs instead"
            )

    def _check_length(self, plan: LivePlan) -> None:
        limit, longest = self._longest_rotary_tokens, plan.facts.longest_document_tokens
        if limit is not None and longest > limit:
            raise UnsupportedAttentionError(f"micro-batch {plan.micro_batch}: {rotary_refusal(limit, longest)}")

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        plan = kwargs.get("distca_plan")
        if plan is None or self._calls is not None:
            return
        if plan.forward_calls < self._attention_layers:
            raise UnsupportedAttentionError(
                f"{self._class_name}: {plan.forward_calls} of its {self._attention_layers} attention layers came "
                "through distca in the first forward pass; the others computed something else, and no step was taken"
            )
        self._calls = plan.num_layers = plan.forward_calls


def _label_count(kwargs: dict[str, Any], plan: LivePlan) -> dict[str, torch.Tensor]:
    """`num_items_in_batch`: the caller's, or this rank's share of all labels of the micro-batch, if they were counted.
    Never 0: a window without labels has loss 0, not 0 / 0."""
    count, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
    if count is not None:
        return {"num_items_in_batch": count + (count == 0)}
    if labels is None or plan.label_tokens is None:
        return {}
    share = max(1, plan.label_tokens) / plan.transport.world_size
    return {"num_items_in_batch": labels.new_tensor(share, dtype=torch.float32)}


def _checksum_of(layers: Iterable[str], config: Any) -> int:
    """Of what decides how wide the rows of keys and values are, and which of them meet between ranks."""
    heads = {name: value for name, value in config.get_text_config().to_dict().items() if "head" in name}
    return zlib.crc32(repr((sorted(layers), sorted(heads.items(), key=str))).encode())


def _dtype_number(module: nn.Module) -> int:
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), None)
    return PARAMETER_DTYPES.index(dtype) if dtype in PARAMETER_DTYPES else -1
