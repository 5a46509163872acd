"""Kernels of liger_kernel in a model that exists already: its layers' parts, or its loss."""

import inspect
from collections.abc import Callable

from transformers import PreTrainedModel


FUSED_LOSS = "fused_linear_cross_entropy"
LOSSES = ("cross_entropy", FUSED_LOSS)


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
