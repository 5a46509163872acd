"""Stack: a model as pipeline stages see it: modules before its layers, a list of layers, modules after them.

Transformers declares this for each class whose layers pass on hidden states and nothing else (`base_model_pp_plan`).
The forward pass is then tried without weights. If all modules of the stack pass their input on, hidden states must
come out as the very tensor that went in. A model that scales or adds something on the way would repeat it in each
stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from distca_hf.errors import ConfigError
from distca_hf.integrations.models.mixers import mixers_of


class PassThrough(nn.Module):
    """Replaces a module that another stage runs, and returns its first argument."""

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Returns the first argument."""
        return hidden


@dataclass(frozen=True)
class LayerStack:
    """Names of the modules of a model, in the order in which hidden states pass them.

    Attributes:
        before: embeddings, and everything up to the first layer; the first stage runs them.
        layers: the list of layers.
        num_layers: its length.
        after: the last norm and the head; the last stage runs them.
    """

    before: tuple[str, ...]
    layers: str
    num_layers: int
    after: tuple[str, ...]

    @classmethod
    def of(cls, whole: PreTrainedModel) -> Self:
        """Finds the stack of a model.

        Args:
            whole: the model with all layers, on the meta device. It is restored afterwards.

        Raises:
            ConfigError: it cannot be divided into stages; says why.
        """
        name, config = type(whole).__name__, whole.config
        mixers = list(mixers_of(whole))
        if mixers:
            raise ConfigError(
                f"{name}: {mixers[0]} carries a state from token to token, and stages run only attention layers; "
                "train it without a pipeline"
            )
        stack = cls._written_down(whole)
        inside = tuple(f"{module}." for module in (*stack.before, stack.layers, *stack.after))
        outside = [weight for weight, _ in whole.named_parameters() if not weight.startswith(inside)]
        if outside:
            raise _no_plain_stack(name, f"{outside[0]} and {len(outside) - 1} more weights are outside of them")
        if getattr(config.get_text_config(), "output_router_logits", False):
            raise ConfigError(
                f"{name}: output_router_logits=True adds a loss of the routers of all layers, and no stage has them "
                "all; set it to False"
            )
        stack._check_nothing_else_is_done(whole)
        return stack

    @classmethod
    def _written_down(cls, whole: PreTrainedModel) -> Self:
        """Reads the stack from the configuration's class."""
        name, prefix = type(whole).__name__, whole.base_model_prefix
        config: PreTrainedConfig = whole.config
        plan, head = getattr(config, "base_model_pp_plan", None), whole.get_output_embeddings()
        if not plan or not hasattr(whole, prefix) or head is None:
            raise _no_plain_stack(name, f"{type(config).__name__} has no base_model_pp_plan")
        base = whole.base_model
        lists = [at for at, module in enumerate(plan) if isinstance(getattr(base, module, None), nn.ModuleList)]
        if len(lists) != 1:
            raise _no_plain_stack(name, f"its base_model_pp_plan has {len(lists)} lists of layers")
        names = [f"{prefix}.{module}" for module in plan]
        (head_name,) = (found for found, module in whole.named_modules() if module is head)
        layers = names[lists[0]]
        return cls(
            before=tuple(names[: lists[0]]),
            layers=layers,
            num_layers=len(whole.get_submodule(layers)),
            after=(*names[lists[0] + 1 :], head_name),
        )

    def _check_nothing_else_is_done(self, whole: PreTrainedModel) -> None:
        """Runs the model without its modules and weights: it must return its input."""
        given = torch.empty((1, 2, whole.config.get_text_config().hidden_size), device="meta", dtype=whole.dtype)
        positions = torch.zeros((1, 2), device="meta", dtype=torch.int64)
        removed = self.keep(whole, range(0), is_first=False, is_last=False)
        try:
            with torch.no_grad():
                got = whole(
                    inputs_embeds=given, position_ids=positions, attention_mask=positions + 1, use_cache=False
                ).logits
        finally:
            for name, module in removed.items():
                whole.set_submodule(name, module)
        if got is not given and (got._base is not given or got.shape != given.shape):
            raise _no_plain_stack(
                type(whole).__name__,
                f"its forward pass computes on hidden states outside of {', '.join((*self.before, self.layers))} and "
                f"{', '.join(self.after)}, as scaled embeddings or logits do",
            )

    def keep(self, model: nn.Module, layers: range, *, is_first: bool, is_last: bool) -> dict[str, nn.Module]:
        """Replaces all modules that a stage does not run, in a model with all layers.

        Args:
            layers: numbers of the layers that stay.
            is_first, is_last: whether the modules before the layers, and after them, stay.

        Returns:
            The modules that were replaced, by name.
        """
        gone = self.modules_of_others(layers, is_first=is_first, is_last=is_last)
        removed = {name: model.get_submodule(name) for name in gone}
        for name in gone:
            model.set_submodule(name, PassThrough())
        return removed

    def modules_of_others(self, layers: range, *, is_first: bool, is_last: bool) -> Sequence[str]:
        """Returns names of the modules that a stage does not run; arguments as in `keep`."""
        gone = [f"{self.layers}.{number}" for number in range(self.num_layers) if number not in layers]
        return [*gone, *([] if is_first else self.before), *([] if is_last else self.after)]


def _no_plain_stack(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be divided into stages: {reason}. A stage runs embeddings, layers that pass hidden states on, "
        "and a norm and a head, of a class whose configuration has a base_model_pp_plan; train it without a pipeline"
    )
