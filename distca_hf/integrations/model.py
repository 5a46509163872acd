"""Enabling a model: checked before the first step, watched during it, and told what only the plan knows."""

from typing import Any

import torch
from torch import nn

from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.comm.groups import default_device
from distca_hf.config import DistCAConfig
from distca_hf.errors import PlanError, UnsupportedAttentionError
from distca_hf.integrations.model_check import attention_layers, check_model, forward_accepts, transformers_model
from distca_hf.runtime.plans import LivePlan


# Attribute of an enabled model that holds its watch.
WATCH = "_distca_watch"
# Order is part of what ranks agree on.
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def enable(model: nn.Module, config: DistCAConfig, longest_document_tokens: int | None = None) -> nn.Module:
    """Checks a model and watches its forward passes. Call it before wrapping the model (DDP, FSDP,
    `accelerator.prepare`).

    With batches of `plugin.dataloader`, `model(**batch)` then returns a loss whose mean over ranks is the mean over
    all labels of the global micro-batch: `num_items_in_batch` is filled in, unless the caller passes one (for an
    accumulation window, say).

    Args:
        model: a Transformers causal language model loaded with `attn_implementation="distca"`, or a PEFT model around
            one.
        config: settings (a `DistCAPlugin` is one).
        longest_document_tokens: longest document the model will see, if known, for sliding windows.

    Returns:
        The same model. Enabling it again does nothing.

    Raises:
        UnsupportedAttentionError: the model would compute something else than its own attention; says what.
        ConfigError: the model was not loaded for distca.
    """
    longest = longest_document_tokens if longest_document_tokens is not None else config.tokens_per_rank
    check_model(model, longest, config.kernel, default_device())
    if not hasattr(model, WATCH):
        setattr(model, WATCH, ForwardWatch(model))
    return model


class ForwardWatch:
    """Hooks around the forward pass of the outermost module."""

    def __init__(self, model: nn.Module) -> None:
        inner = transformers_model(model)
        self._class_name = type(inner).__name__
        self._attention_layers = len(attention_layers(inner))
        self._accepts_use_cache = forward_accepts(inner, "use_cache")
        self._calls: int | None = None
        model.register_forward_pre_hook(torch.compiler.disable(self._before), with_kwargs=True)
        model.register_forward_hook(torch.compiler.disable(self._after), with_kwargs=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = kwargs.get("distca_plan")
        if plan is None:
            return None
        if not isinstance(plan, LivePlan):
            raise PlanError(
                f"distca_plan is a {type(plan).__name__}, not the plan that plugin.dataloader made; pass batches on "
                "unchanged"
            )
        plan.agree()
        plan.begin_pass(self._calls)
        plan.agreement = Agreement.start(
            plan.transport,
            Occasion.FORWARD,
            plan.micro_batch,
            {
                "gradients": int(torch.is_grad_enabled()),
                "training": int(module.training),
                "parameter_dtype": _dtype_number(module),
            },
            {},
        )
        added: dict[str, Any] = {}
        if kwargs.get("labels") is not None and kwargs.get("num_items_in_batch") is None:
            share = max(1, plan.label_tokens) / plan.transport.world_size
            added["num_items_in_batch"] = kwargs["labels"].new_tensor(share, dtype=torch.float32)
        if self._accepts_use_cache and kwargs.get("use_cache") is None:
            added["use_cache"] = False  # nobody generates from a training batch, and a cache would keep all keys alive
        return args, {**kwargs, **added}

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        plan = kwargs.get("distca_plan")
        if plan is None or self._calls is not None:
            return
        if plan.forward_calls < self._attention_layers:
            raise UnsupportedAttentionError(
                f"{self._class_name}: {plan.forward_calls} of its {self._attention_layers} attention layers came "
                "through distca in the first forward pass; the others computed something else, and no step was taken"
            )
        self._calls = plan.forward_calls


def _dtype_number(module: nn.Module) -> int:
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), None)
    return PARAMETER_DTYPES.index(dtype) if dtype in PARAMETER_DTYPES else -1
