"""Layer masks: which keys the attention layers of a model see, read from its modules and configuration.

Transformers models give a window to the attention function (`sliding_window`), or to the mask alone. Planning must
know it before the first pass; a window that is met there first is routed then.
"""

from collections import Counter
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig

from distca_hf.cost import LayerMasks, Mask
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.structure import attention_layers, transformers_model


def layer_masks_of(model: nn.Module) -> LayerMasks:
    """Returns the masks of a model, each with the number of its layers: full causal layers first, then windows from
    the shortest on.

    Args:
        model: a Transformers model, or a PEFT model around one.

    Raises:
        UnsupportedAttentionError: a window holds no token.
    """
    for refusal in empty_windows(model):
        raise UnsupportedAttentionError(f"{type(transformers_model(model)).__name__}: {refusal}")
    counted = Counter(window for _, window in layer_windows(model))
    in_order = sorted(counted.items(), key=lambda item: item[0] or 0)
    return tuple((Mask(window), count) for window, count in in_order)


def empty_windows(model: nn.Module) -> Iterator[str]:
    """Yields a refusal of the first window that holds not even the token itself."""
    for name, window in layer_windows(model):
        if window is not None and window < 1:
            yield f"sliding window {window} ({name}) holds no token; it counts the token itself, so 1 is the shortest"
            return


def layer_windows(model: nn.Module) -> Iterator[tuple[str, int | None]]:
    """Yields name and window of every attention layer; None for a layer that sees all of its document."""
    inner = transformers_model(model)
    for name, module in attention_layers(inner).items():
        yield name, _window_of(module, getattr(module, "config", inner.config.get_text_config()))


def _window_of(module: nn.Module, config: PreTrainedConfig) -> int | None:
    window = module.sliding_window if hasattr(module, "sliding_window") else _window_of_config(module, config)
    if not isinstance(window, int) or getattr(config, "use_sliding_window", True) is False:
        return None
    return window


def _window_of_config(module: nn.Module, config: PreTrainedConfig) -> object:
    """Returns the window of a layer that does not hold one itself; None in a layer of full attention."""
    kinds, number = getattr(config, "layer_types", None) or [], getattr(module, "layer_idx", None)
    full = isinstance(number, int) and number < len(kinds) and kinds[number] == "full_attention"
    return None if full else getattr(config, "sliding_window", None)
