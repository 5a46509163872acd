"""Every supported form of activation checkpointing, asked for as users do, and what it then really recomputes."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from distca_hf.integrations.models.structure import transformers_model


# By form of activation checkpointing: how often a layer runs for one micro-batch, and how often its attention. The
# second time it is recomputed for backward.
LAYER_CALLS = {
    "": (1, 1),
    "non-reentrant": (2, 1),
    "reentrant": (2, 2),
    "fsdp": (2, 1),
    "selective": (2, 1),
    "trl": (2, 1),
    "offloaded, tiles": (2, 2),  # once for each of two KV heads
}


def checkpointing_arguments(form: str) -> dict[str, Any]:
    """Arguments of `TrainingArguments`, and of `SFTConfig` for "trl"; "fsdp" is a setting in `fsdp_config`."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
    settings = {
        "non-reentrant": {"use_reentrant": False},
        "reentrant": {"use_reentrant": True},
        "selective": {"use_reentrant": False, "context_fn": contexts},
        "trl": {"selective": True},
        "offloaded, tiles": {"use_reentrant": False},
    }.get(form)
    return {"gradient_checkpointing": settings is not None, "gradient_checkpointing_kwargs": settings}


def _keep_attention(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What users write to keep the outputs of any flash attention."""
    return CheckpointPolicy.MUST_SAVE if "flash_attn" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def settings_of(form: str) -> dict[str, Any]:
    """The plugin's settings: attention is saved, but what selective checkpointing keeps must be its own doing."""
    if form == "offloaded, tiles":
        return {"checkpointed_attention": "offload", "mlp_tokens": 16, "attention_kv_heads": 1}
    return {"checkpointed_attention": "recompute" if form in ("selective", "trl") else "save"}


def count_layer_calls(model: nn.Module) -> Callable[[], tuple[float, float]]:
    """Returns a function that tells how often a layer ran for one micro-batch so far, and how often its attention."""
    named = [(name.rpartition(".")[2], module) for name, module in model.named_modules()]
    mlps = [module for name, module in named if name == "mlp"] or [module for name, module in named if name == "mixer"]
    calls: list[nn.Module] = []
    plans: list[Any] = []
    # Hooks before the MLP: recomputation ends in its middle, as soon as backward has all that it needs.
    for mlp in mlps:
        mlp.register_forward_pre_hook(lambda module, args: calls.append(module))
    # A hook on the root or the head could read results, so that these would return.
    backbone = transformers_model(model).base_model
    backbone.register_forward_hook(
        lambda module, args, kwargs, output: plans.append(kwargs.get("distca_plan")), with_kwargs=True
    )

    def per_layer() -> tuple[float, float]:
        layers = len(mlps) * len(plans)
        return len(calls) / layers, sum(plan.forward_pass.calls for plan in plans if plan is not None) / layers

    return per_layer
