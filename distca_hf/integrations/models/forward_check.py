"""Forward check: an enabled model must stay as it was checked, and all of its attention must go through distca.

A model is checked once, when it is enabled. Programs may copy or change it afterwards. So every forward pass with a
plan is checked before its first layer and after its last one. Ranks that run a model together compare its facts, which
must be equal.
"""

import copy
import json
import zlib
from collections import Counter
from functools import cached_property
from itertools import chain

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from distca_hf.batches.batch_documents import Batch
from distca_hf.comm.grid import Grid, Scope
from distca_hf.config import DistCAConfig
from distca_hf.errors import PlanError, UnsupportedAttentionError
from distca_hf.integrations.models.check import PositionLimits, refused_loss
from distca_hf.integrations.models.decoder_layers import layer_masks_of, masks_of_layers
from distca_hf.integrations.models.head_tiles import tiled_attention
from distca_hf.integrations.models.structure import (
    IMPLEMENTATION,
    asks_for_kinds,
    attention_layers,
    attention_of,
    embedding_holder,
    own_entries,
    text_configs,
    towers,
    transformers_model,
    weights_outside_text,
)
from distca_hf.integrations.models.weights_check import SharedState, replicated_parameters
from distca_hf.runtime.forward_pass import ForwardPass, PassCalls
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.retention import PassLayers, Regions
from distca_hf.telemetry import OF_THIS_RANK, get_logger
from distca_hf.torch_private import ddp_awaits_every_gradient


log = get_logger(__name__)

# Entries of a config that do not change the numbers of a forward pass: the model's origin, its kind of output. Saving
# a model sets some of them, on the rank that saves.
ABOUT_A_CONFIG = frozenset(
    {
        "architectures",
        "dtype",
        "model_type",
        "name_or_path",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Attributes of modules that other facts cover, or that do not change numbers.
ABOUT_A_MODULE = frozenset({"gradient_checkpointing", "name_or_path", "training"})
TRAINED = "parameters and which of them are trained"
# Attributes of PEFT's layers that determine what their adapters add.
OF_ADAPTERS = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")


class ForwardCheck:
    """Checks the forward passes of one enabled model.

    Attributes:
        layers: its attention layers by name, in the order of their numbers.
        towers: parts of a multimodal model outside its text part, by name.
        drops_kinds: whether kinds of tokens that say that all are text are taken out of batches.
        tiles: tiles of heads of every layer that has several; each makes an attention call.
        call_masks: masks of each layer's attention calls in a pass that runs it once.
        num_calls: attention calls of every pass; None before the first one.
        calls_before: of the latest pass; None before the first one.
    """

    def __init__(self, root: nn.Module, config: DistCAConfig) -> None:
        self._root, self._config, inner = root, config, transformers_model(root)
        self._class_name, self._embedding_holder = type(inner).__name__, embedding_holder(inner)
        self.layers = attention_layers(inner)
        self._attention_configs = text_configs(inner)
        self.position_limits, self.towers = PositionLimits(inner), towers(inner)
        self.drops_kinds = bool(self.towers) and not asks_for_kinds(inner)
        self.masks = masks_of_layers(inner)
        self.tiles = tiled_attention(inner, config.attention_kv_heads) if config.attention_kv_heads else {}
        self.call_masks = {layer: [self.masks[name]] * self.tiles.get(layer, 1) for name, layer in self.layers.items()}
        self.num_calls: int | None = None
        self.calls_before: PassCalls | None = None
        self._module_facts: dict[str, object] | None = None
        self._state: SharedState | None = None
        self._config_facts = ConfigFacts(root)
        self._pass_layers: tuple[PassLayers | None, int | None] = None, None
        self._towers_are_sharded = False
        self._tower_parts: list[int] = []
        self._warned_of_plugin = self._warned_of_implementation = self._takes_placed = False
        self._warned_of_evaluation = False

    def forget_passes(self) -> None:
        """Forgets everything about earlier passes."""
        self.num_calls = self.calls_before = self._module_facts = self._state = None

    def pass_layers(self, regions: Regions) -> PassLayers:
        """Returns the layers of the next pass, by their calls."""
        known, known_calls = self._pass_layers
        if known is None or known.regions is not regions or known_calls != self.num_calls:
            masks = list(chain(*self.call_masks.values()))
            of_calls: tuple[int, ...] = ()
            if self.tiles and self.num_calls in (None, len(masks)):
                of_calls = tuple(number for number, calls in enumerate(self.call_masks.values()) for _ in calls)
            known = PassLayers(self.num_calls or len(masks), tuple(Counter(masks).items()), regions, of_calls)
            self._pass_layers = known, self.num_calls
        return known

    def facts(self, again: bool) -> dict[str, object]:
        """Returns facts about the model that must be the same on all ranks. Reads modules once, before the first pass.
        If `again`, reads again which parameters are trained."""
        if self._module_facts is None:
            self._module_facts = module_facts(self._root)
        elif again:
            self._module_facts[TRAINED] = _trained(self._root)
        return self._module_facts | self._config_facts.now()

    def shared_state(self, grid: Grid) -> dict[str, dict[str, str]]:
        """Returns checksums of weights and buffers to compare in this pass; see `SharedState`. Tensor ranks may hold
        parts of weights that torch does not know about."""
        if len(grid.members(Scope.LAYERS)) == 1:
            return {}
        if self._state is None:
            self._state = SharedState(self._root, with_weights=grid.shape[2] == 1)
        return self._state.now()

    def check_model(self, module: nn.Module) -> None:
        """Checks that the model is the one that was enabled, and that it still attends through distca. Raises
        PlanError if it is a copy, or its attention implementation was changed."""
        if module is not self._root:
            raise PlanError(
                f"this {type(module).__name__} is a copy of a model that was enabled; call distca_hf.enable(copy, "
                "plugin) before it trains"
            )
        self.check_implementation(trains=True)

    def check_implementation(self, trains: bool) -> None:
        """Checks that the model still attends through distca, even if a rank attends locally. In a pass that does not
        train, another implementation may be intended: only warns then, once. Raises PlanError if its attention
        implementation was changed."""
        for config in self._attention_configs:
            if (other := attention_of(config)) != IMPLEMENTATION:
                break
        else:
            return
        if not trains and self._warned_of_implementation:
            return
        message = (
            f"{self._class_name} was enabled for distca, but its config now says attn_implementation={other!r}: "
            "documents of a packed row could see each other, and documents cut between ranks need distca. Call "
            'model.set_attn_implementation("distca"). If you did not change it: another model was made from '
            "model.config, which then shares it; give that one copy.deepcopy(model.config)"
        )
        if trains:
            raise PlanError(message)
        self._warned_of_implementation = True
        log.warning("%s", message)

    def watch_evaluation(self, output: object, ranks: int) -> None:
        """Lets the first backward pass of a model in evaluation mode warn: each of several ranks attended by itself.
        `output` is the model's, with tensors as values or entries."""
        if ranks == 1 or self._warned_of_evaluation or not torch.is_grad_enabled():
            return
        for value in output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(self._warn_of_evaluation)

    def _warn_of_evaluation(self, gradient: torch.Tensor) -> None:
        if not self._warned_of_evaluation:
            self._warned_of_evaluation = True
            log.warning(
                "%s runs backward in evaluation mode: this rank attended only to its own batch, and nothing is "
                "balanced. Call model.train() on all ranks before the loop (from_pretrained returns a model in "
                "evaluation mode)",
                self._class_name,
                extra=OF_THIS_RANK,
            )

    def images_wait(self, trains: bool) -> bool:
        """Returns whether a rank with images waits for ranks without images: for weights of its towers, or for their
        gradients. Call it after the model was wrapped."""
        if not self.towers:
            return False
        modules = [module for tower in self.towers.values() for module in tower.modules()]
        parts = [id(part) for of in modules for part in (*of._modules.values(), *of._parameters.values())]
        if parts != self._tower_parts:  # wrapping replaced modules, or weights
            self._tower_parts = parts
            # With FSDP or ZeRO-3 a rank with an image waits for the weights of all others.
            wrappers = [module for module in self._root.modules() if isinstance(module, FullyShardedDataParallel)]
            wrapped = {part for wrapper in wrappers for part in wrapper.modules()}
            self._towers_are_sharded = any(
                not wrapped.isdisjoint(tower.modules())
                or len(dict(replicated_parameters(tower))) < len(list(tower.parameters()))
                for tower in self.towers.values()
            )
            vars(self).pop("_outside_text", None)
        if self._towers_are_sharded:
            return True
        if not trains or not any(weight.requires_grad for weight in self._outside_text):
            return False
        # _hp_mapping: DeepSpeed's mark of a parameter whose gradients ZeRO-1 and 2 reduce.
        return ddp_awaits_every_gradient() or any(hasattr(weight, "_hp_mapping") for weight in self._outside_text)

    def gradients_before_decoder(self) -> tuple[bool, ...]:
        """Returns whether embeddings and towers need gradients, which then travel to them from rows."""
        embedding, trains = self._embedding_holder.get_input_embeddings(), False
        for part in embedding.modules() if embedding._modules else (embedding,):
            for weight in part._parameters.values():  # quicker than its `parameters()`
                trains = trains or (weight is not None and weight.requires_grad)
        return trains, any(x.requires_grad for x in self._outside_text) if self.towers else False

    @cached_property
    def _outside_text(self) -> list[nn.Parameter]:
        return list(weights_outside_text(transformers_model(self._root)).values()) if self.towers else []

    def check_plan(self, plan: LivePlan) -> None:
        """Checks that the model's positions reach the end of the longest document; warns of another plugin. Raises
        UnsupportedAttentionError if they do not."""
        self.position_limits.check(plan.longest_document_tokens, f"micro-batch {plan.micro_batch}")
        if plan.config is self._config or self._warned_of_plugin:
            return
        self._warned_of_plugin = True
        of_batch, of_model = plan.config.shared_settings(), self._config.shared_settings()
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

    def check_placed(self, batch: Batch, plan: LivePlan) -> None:
        """Checks that a placed batch still has everything that a model cannot derive from its tokens. Raises PlanError
        if the model would count positions, or shift labels, itself; UnsupportedAttentionError if it always shifts
        labels itself."""
        if plan.label_tokens is None:  # a batch of the user's
            return
        if not self._takes_placed and (reasons := list(refused_loss(transformers_model(self._root)))):
            raise UnsupportedAttentionError(
                f"{self._class_name} cannot train on placed batches, which may cut documents: {'; '.join(reasons)}"
            )
        self._takes_placed = True
        where = f"{plan.transport.grid.name}, micro-batch {plan.micro_batch}: a placed batch has"
        if batch.get("position_ids") is None:
            raise PlanError(
                f"{where} no position_ids: the model would count positions from the first token of this rank, where a "
                "document may go on. Pass position_ids on"
            )
        if batch.get("labels") is not None and batch.get("shift_labels") is None:
            raise PlanError(
                f"{where} labels, but no shift_labels: the model would shift labels across documents and cuts "
                "between ranks. Pass shift_labels on, or leave labels out, too, and compute the loss from the batch's "
                "shift_labels"
            )

    def check_calls(self, plan: LivePlan) -> None:
        """Checks at the end of a pass that it had as many attention calls as every earlier pass. Raises
        UnsupportedAttentionError if some layers computed something else in the first pass; PlanError if some layers
        did so, or were left out, in a later pass."""
        calls = plan.forward_pass.calls
        expected = sum(map(len, self.call_masks.values()))
        if self.num_calls is None and calls < expected:
            raise UnsupportedAttentionError(
                f"{self._class_name}: {calls} of its {expected} {'tiles of heads in ' * bool(self.tiles)}"
                "attention layers came through distca in the first forward pass; the others computed something else, "
                "and no step was taken"
            )
        if self.num_calls is not None and calls != self.num_calls:
            raise PlanError(
                f"{plan.transport.grid.name}, micro-batch {plan.micro_batch}: {calls} attention calls of "
                f"{self._class_name} came through distca, and {self.num_calls} did in every forward pass before; the "
                "others computed something else or were left out, and no step was taken. Keep attn_implementation "
                '"distca" for all layers, and leave none out (layerdrop)'
            )
        if self.num_calls is None:
            self._check_masks(plan.forward_pass)
        self.num_calls, self.calls_before = calls, plan.forward_pass.made

    def _check_masks(self, forward_pass: ForwardPass) -> None:
        """Warns after the first pass of layers that attend with other windows than placement expects."""
        names, planned = list(self.layers), self.masks
        if len(forward_pass.layers) != len(forward_pass.made.masks):  # an attention server was lost meanwhile
            return
        called = zip(forward_pass.layers, forward_pass.made.masks, strict=True)
        others = {names[int(layer)]: mask for layer, mask in called if mask != planned[names[int(layer)]]}
        if others:
            name, mask = next(iter(others.items()))
            log.warning(
                "%s: %s attends with %s, and had %s when the model was enabled; %d of %d layers differ. Losses and "
                "gradients are right, but ranks may have unequal work: placement, and the balance in the log, count "
                "the windows of before. If you changed them, enable the model again; else please report this class",
                self._class_name,
                name,
                mask.in_words,
                planned[name].in_words,
                len(others),
                len(names),
            )


def module_facts(model: nn.Module) -> dict[str, object]:
    """Returns facts about modules and parameters. Call it once: reading all modules takes milliseconds."""
    inner = transformers_model(model)
    names = [(name, getattr(layer, "layer_idx", None)) for name, layer in attention_layers(inner).items()]
    # Without shapes of weights: sharding gives each rank a different part of them.
    settings = [
        (name, type(module).__name__, module.training == inner.training, _plain_attributes(module))
        for name, module in inner.named_modules()
    ]
    dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
    return {
        "model class": type(inner).__name__,
        "attention layers": len(names),
        "names and numbers of attention layers": _checksum(names),
        "sliding windows of attention layers": ", ".join(
            f"{mask.in_words} ({count})" for mask, count in layer_masks_of(model)
        ),
        "modules and their settings": _checksum(settings),
        TRAINED: _trained(model),
        "dtypes of parameters": ", ".join(dtypes),
    }


def _trained(model: nn.Module) -> str:
    """Returns a checksum of parameters' names, and of which are trained. A parameter that one rank freezes would lose
    the gradients of all rows placed on that rank."""
    return _checksum([(name, parameter.requires_grad) for name, parameter in model.named_parameters()])


def _plain_attributes(module: nn.Module) -> list[tuple[str, object]]:
    """Returns attributes of a module of torch, Transformers or PEFT; none of others, which may hold their rank."""
    of = type(module).__module__
    if of.startswith("peft.tuners."):
        return [(name, vars(module).get(name)) for name in OF_ADAPTERS]
    if not of.startswith(("torch.nn.modules.", "transformers.")):
        return []
    return [
        (name, value)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in ABOUT_A_MODULE and isinstance(value, bool | int | float | str)
    ]


class ConfigFacts:
    """Entries of a model's config, which programs may change at any time."""

    def __init__(self, model: nn.Module) -> None:
        self._config = transformers_model(model).config.get_text_config()
        self._seen: dict[str, object] | None = None
        self._facts: dict[str, object] = {}

    def now(self) -> dict[str, object]:
        """Returns them by name. Formats them only if they have changed: that takes a fifth of a millisecond."""
        if self._seen != own_entries(self._config):
            self._seen = copy.deepcopy(own_entries(self._config))
            self._facts = {
                # Memory addresses would differ between ranks.
                f"config.{name}": json.dumps(
                    value, default=lambda x: str(x) if isinstance(x, torch.dtype) else type(x).__name__, sort_keys=True
                )
                for name, value in sorted(self._seen.items())
                if not name.startswith("_") and name not in ABOUT_A_CONFIG
            }
        return self._facts


def _checksum(value: object) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"
