"""Enabling: a model is checked once, and from then on watched in every forward pass."""

from collections.abc import Callable

import torch
from torch import nn

from distca_hf.integrations.attention import LAYER_SETTINGS, LayerSettings
from distca_hf.integrations.models.check import check_model
from distca_hf.integrations.models.forward_watch import ForwardWatch, watch_of
from distca_hf.integrations.models.parts import attention_layers, transformers_model
from distca_hf.parallel_context import ParallelContext
from distca_hf.telemetry import get_logger


log = get_logger(__name__)


def enable(model: nn.Module, plugin: ParallelContext, longest_document_tokens: int | None = None) -> nn.Module:
    """Checks a model and watches its forward passes. Call it before wrapping the model (DDP, FSDP,
    `accelerator.prepare`).

    The model can train on any packed batch: ranks plan it together, and attention tasks move between them. With
    batches of `plugin.dataloader`, `model(**batch)` also returns a loss whose mean over ranks is the mean over all
    labels of the global micro-batch. For that `num_items_in_batch` is filled in, unless the caller passes one (for
    accumulation, say).

    Args:
        model: a Transformers causal language model loaded with `attn_implementation="distca"`, or a PEFT model around
            one.
        plugin: settings, and the transport between ranks. A model that is enabled again follows the new plugin.
        longest_document_tokens: longest document that the model will see. Sliding windows and some rotary embeddings
            are refused or accepted by it. By default the longest that all ranks together can hold.

    Returns:
        The same model.

    Raises:
        UnsupportedAttentionError: the model would compute something else than its own attention; gives all reasons.
        ConfigError: the model was not loaded for distca.
    """
    config = plugin.config
    longest = (
        longest_document_tokens
        if longest_document_tokens is not None
        else config.tokens_per_rank * len(plugin.members.token_ranks)
    )
    check_model(model, longest, config.kernel, plugin.device)
    inner = transformers_model(model)
    watch = watch_of(inner)
    if watch is None or watch.root is not model or watch.context is not plugin:
        if watch is not None:
            log.info("%s was enabled before; from now on it follows the new plugin", type(inner).__name__)
            watch.leave({model, inner})
        watch = ForwardWatch(model, plugin)
        watch.enter()
    for number, layer in enumerate(attention_layers(inner).values()):
        settings = LayerSettings(
            config.kernel, config.deterministic, torch.tensor(number, device="cpu"), watch.is_running
        )
        setattr(layer, LAYER_SETTINGS, settings)
    return model


def restorer(model: nn.Module) -> Callable[[], None]:
    """Returns a function that leaves a model as it is now: not enabled, or enabled as before.

    Raises:
        UnsupportedAttentionError: it is no Transformers model.
    """
    inner = transformers_model(model)
    earlier = watch_of(inner)
    settings_of_layers = {layer: vars(layer).get(LAYER_SETTINGS) for layer in attention_layers(inner).values()}

    def restore() -> None:
        watch = watch_of(inner)
        if watch is not None and watch is not earlier:
            watch.leave({model, inner})
            if earlier is not None:
                earlier.enter()
        for layer, settings in settings_of_layers.items():
            if settings is not None:
                setattr(layer, LAYER_SETTINGS, settings)
            elif hasattr(layer, LAYER_SETTINGS):
                delattr(layer, LAYER_SETTINGS)

    return restore
