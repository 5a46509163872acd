"""Enabling a model: checked before the first step, and watched in every forward pass.

Batches of `plugin.dataloader` bring their plan along. Any other batch that an enabled model trains on is planned here,
right before its forward pass.
"""

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

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
from distca_hf.integrations.mask_numbers import check_mask_numbers
from distca_hf.integrations.model_check import (
    IMPLEMENTATION,
    attention_layers,
    check_model,
    forward_accepts,
    transformers_model,
)
from distca_hf.integrations.model_facts import ConfigFacts, module_facts
from distca_hf.integrations.packs import PackPlanner, fill_empty, tokens_of
from distca_hf.integrations.positions import PositionLimits
from distca_hf.runtime.plans import LivePlan
from distca_hf.telemetry import get_logger


if TYPE_CHECKING:
    from distca_hf.integrations.plugin import DistCAPlugin

log = get_logger(__name__)

# Attribute of an enabled model, and of the Transformers model inside it, that holds the watch.
WATCH = "_distca_watch"


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
        plugin: settings, and the transport between ranks. A model that is enabled again follows the new plugin.
        longest_document_tokens: longest document the model will see, for sliding windows and rotary embeddings that
            depend on it; by default the longest that all ranks together can hold.

    Returns:
        The same model.

    Raises:
        UnsupportedAttentionError: the model would compute something else than its own attention; says what.
        ConfigError: the model was not loaded for distca.
    """
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    longest = longest_document_tokens if longest_document_tokens is not None else plugin.tokens_per_rank * world_size
    check_model(model, longest, plugin.kernel, default_device())
    inner = transformers_model(model)
    earlier = watch_of(inner)
    if earlier is None or earlier.root is not model or earlier.plugin is not plugin:
        if earlier is not None:
            log.info("%s was enabled before; from now on it follows the new plugin", type(inner).__name__)
            earlier.leave({model, inner})
        watch = ForwardWatch(model, plugin)
        for part in {model, inner}:
            setattr(part, WATCH, watch)
    for number, layer in enumerate(attention_layers(inner).values()):
        of_layer = torch.tensor(number, device="cpu")
        setattr(layer, ENABLED, LocalSettings(plugin.kernel, plugin.deterministic, of_layer))
    return model


def watch_of(model: nn.Module) -> "ForwardWatch | None":
    """Returns the watch of a model; None if it is not enabled."""
    return getattr(model, WATCH, None)


class ForwardWatch:
    """Hooks around the forward pass of the outermost module.

    Attributes:
        root: the module that was enabled.
        plugin: settings and transports that its passes follow.
        packs: plans batches without a plan; None before the first one.
        position_limits: of the model.
    """

    def __init__(self, root: nn.Module, plugin: "DistCAPlugin") -> None:
        self.root, self.plugin = root, plugin
        self.packs: PackPlanner | None = None
        inner = transformers_model(root)
        self._class_name = type(inner).__name__
        self._layers = attention_layers(inner)
        self._module_facts: dict[str, object] | None = None
        self._config_facts = ConfigFacts(root)
        # Layers look their implementation up in their config; most often it is one for all of them.
        configs = [getattr(layer, "config", inner.config.get_text_config()) for layer in self._layers.values()]
        self._attention_configs = list({id(config): config for config in configs}.values())
        self._parameters = list(inspect.signature(root.forward).parameters)
        self._accepts_use_cache = forward_accepts(inner, "use_cache")
        self._told_of_cache = self._warned_of_plugin = False
        self._head_groups, self._token_bytes = head_groups_of(root), token_bytes_of(root)
        self.position_limits = PositionLimits(inner)
        self._calls: int | None = None
        self._checkpointed: list[nn.Module] | None = None
        self._handles: list[RemovableHandle] = [
            root.register_forward_pre_hook(torch.compiler.disable(self._before), with_kwargs=True),
            root.register_forward_hook(torch.compiler.disable(self._after), with_kwargs=True),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ForwardWatch":
        """A copied model keeps the watch of the original, which notices that it is another one."""
        return self

    def leave(self, modules: Iterable[nn.Module]) -> None:
        """Takes the hooks away from modules of the enabled model, or of a copy, whose hooks are copies, too."""
        for hooks in (hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)):
            for handle in self._handles:
                hooks.pop(handle.id, None)
        if transformers_model(self.root) in modules:
            for handle in self._handles:
                handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = kwargs.get("distca_plan")
        if plan is None:
            batch = dict(zip(self._parameters, args, strict=False)) | kwargs
            plan = self._plan_packs(module, batch)
            if plan is None:
                return None
            args, kwargs = (), {**batch, **fill_empty(batch), "distca_plan": plan}
        if not isinstance(plan, LivePlan):
            raise PlanError(
                f"distca_plan is a {type(plan).__name__}, not the plan that plugin.dataloader made; pass batches on "
                "unchanged"
            )
        self._check_model(module)
        self._check_plan(plan)
        self._begin(module, plan)
        return args, {**kwargs, **_label_count(kwargs, plan), **self._no_cache(kwargs)}

    def _begin(self, module: nn.Module, plan: LivePlan) -> None:
        """Prepares checkpointing, and the pass with its facts."""
        rows_wait = False
        if self.plugin.checkpointed_attention != "recompute":
            self._save_attention(module)
        elif self.plugin.kv_residency != "refetch" and plan.transport.world_size > 1:
            rows_wait = keep_received(self._checkpointed_modules(module))
        layers_kept = 1 if self._recomputes_attention(module) else len(self._layers)
        if self._module_facts is None:
            self._module_facts = module_facts(self.root, self._layers)
        facts = {
            **plan.config.shared_settings(),
            "gradients": torch.is_grad_enabled(),
            "training": module.training,
            "layers saved at the same time": layers_kept,
            "received rows wait for recomputation": rows_wait,
            **self._module_facts,
            **self._config_facts.now(),
        }
        plan.begin_forward_pass(self._calls, facts, layers_kept, self._calls or len(self._layers))

    def _check_model(self, module: nn.Module) -> None:
        """Checks that the model is the one that was enabled, and that it still attends through distca.

        Raises:
            PlanError: it is a copy, or its attention implementation was changed.
        """
        if module is not self.root:
            raise PlanError(
                f"this {type(module).__name__} is a copy of a model that was enabled; call distca_hf.enable(copy, "
                "plugin) before it trains"
            )
        for implementation in [config._attn_implementation for config in self._attention_configs]:
            if implementation == IMPLEMENTATION:
                continue
            raise PlanError(
                f"{self._class_name} was enabled for distca, but its config now says "
                f"attn_implementation={implementation!r}: documents that are cut between ranks need distca. "
                'Call model.set_attn_implementation("distca"). If you did not change it: another model was made from '
                "model.config, which then shares it; give that one copy.deepcopy(model.config)"
            )

    def _check_plan(self, plan: LivePlan) -> None:
        """Checks that the model's positions reach as far as the longest document; warns of another plugin.

        Raises:
            UnsupportedAttentionError: the longest document is too long for them.
        """
        self.position_limits.check(plan.facts.longest_document_tokens, f"micro-batch {plan.micro_batch}")
        if plan.config is not self.plugin and not self._warned_of_plugin:
            self._warned_of_plugin = True
            of_batch, of_model = plan.config.shared_settings(), self.plugin.shared_settings()
            different = [
                f"{name}={value} and {of_model[name]}" for name, value in of_batch.items() if of_model[name] != value
            ]
            if different:
                log.warning(
                    "batches were made by one plugin, and %s was enabled with another: %s. The first counts for "
                    "exchanges and kernels, the second for checkpointing and evaluation; use one plugin for both",
                    self._class_name,
                    ", ".join(different),
                )

    def _no_cache(self, batch: dict[str, Any]) -> dict[str, bool]:
        """Returns `use_cache=False`, unless the caller decided: nobody generates from a batch with a plan, and a cache
        would keep the keys of all layers alive."""
        if not self._accepts_use_cache or batch.get("use_cache") is not None:
            return {}
        if getattr(transformers_model(self.root).config, "use_cache", False) and not self._told_of_cache:
            self._told_of_cache = True
            log.info("%s: config.use_cache=True is not followed for batches with a plan", self._class_name)
        return {"use_cache": False}

    def _plan_packs(self, module: nn.Module, batch: dict[str, Any]) -> LivePlan | None:
        """Returns the plan of a batch without one; None if it attends locally. That is decided alike on all ranks:
        there is one rank, or the model is not training (evaluation, generation, a teacher) and evaluation is not
        shared, or some rank's batch is padded."""
        trains = module.training and torch.is_grad_enabled()
        evaluates = not module.training and self.plugin.evaluate == "distca"
        alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
        if alone or not (trains or evaluates) or batch.get("past_key_values") is not None:
            check_mask_numbers(batch)
            return None
        self._check_model(module)
        if self.packs is None:
            transport = self.plugin.transport(tokens_of(batch).device)
            self.packs = PackPlanner(self.plugin, transport, self._head_groups, self._token_bytes)
        return self.packs.plan(batch)

    def _recomputes_attention(self, module: nn.Module) -> bool:
        """Returns whether backward computes attention again, one layer after the other."""
        return recomputes_attention(self._checkpointed_modules(module))

    def _checkpointed_modules(self, module: nn.Module) -> list[nn.Module]:
        """Returns modules that are or may be checkpointed: wrappers may come until the first forward pass."""
        if self._checkpointed is None:
            self._checkpointed = checkpointed_modules(module)
        return self._checkpointed

    def _save_attention(self, module: nn.Module) -> None:
        first = self._checkpointed is None
        on_host = self.plugin.checkpointed_attention == "offload"
        if not save_attention(self._checkpointed_modules(module), on_host) and first:
            log.warning(
                "reentrant activation checkpointing recomputes attention and its exchanges; use_reentrant=False saves "
                "their outputs instead"
            )

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Counts attention calls: as many as there are layers, and as many in every pass.

        Raises:
            UnsupportedAttentionError, PlanError: some layer computed something else.
            PlanMismatchError: no backward pass follows, and ranks ran different passes.
        """
        plan = kwargs.get("distca_plan")
        if plan is None:
            return
        calls = plan.forward_calls
        if self._calls is None and calls < len(self._layers):
            raise UnsupportedAttentionError(
                f"{self._class_name}: {calls} of its {len(self._layers)} attention layers came "
                "through distca in the first forward pass; the others computed something else, and no step was taken"
            )
        if self._calls is not None and calls != self._calls:
            raise PlanError(
                f"rank {plan.transport.rank}, micro-batch {plan.micro_batch}: {calls} attention calls of "
                f"{self._class_name} came through distca, and {self._calls} did in every forward pass before; the "
                "others computed something else or were left out, and no step was taken. Keep attn_implementation "
                '"distca" for all layers, and leave none out (layerdrop)'
            )
        self._calls = calls
        plan.end_forward_pass(derives=torch.is_grad_enabled())


def _label_count(batch: dict[str, Any], plan: LivePlan) -> dict[str, torch.Tensor]:
    """Returns `num_items_in_batch`: the caller's, or this rank's share of all labels of the micro-batch, if they were
    counted. Never 0: a window without labels has loss 0, not 0 / 0."""
    count, labels = batch.get("num_items_in_batch"), batch.get("labels")
    if count is not None:
        return {"num_items_in_batch": count + (count == 0)}
    if labels is None or plan.label_tokens is None:
        return {}
    share = max(1, plan.label_tokens) / plan.transport.world_size
    return {"num_items_in_batch": labels.new_tensor(share, dtype=torch.float32)}
