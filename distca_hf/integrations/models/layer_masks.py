"""Layer masks: which keys the attention layers of a model see, read from its modules and configuration.

Transformers models give a window to the attention function (`sliding_window`), or to the mask only. Placement must
know it before the first pass. A window that is met there first is routed then, with a warning (`forward_check`).
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from functools import lru_cache

from torch import nn
from transformers import PreTrainedConfig

from distca_hf.cost import LayerMasks, Mask
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.structure import (
    attention_layers,
    keyword_passed,
    source_of,
    text_modules,
    transformers_model,
)


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
    """Yields name and window of every attention layer; None for a layer that sees all of its document.

    A layer attends with the window that it passes to the attention function, or with that of its mask. Its attribute
    does not count: many classes set one on layers that pass none.
    """
    inner = transformers_model(model)
    in_mask = any(_makes_windows(type(part)) for part in text_modules(inner).values())  # type: ignore[arg-type]
    for name, module in attention_layers(inner).items():
        pass_on = keyword_passed(type(module), "attention_interface", "sliding_window")  # type: ignore[arg-type]
        passed = None if pass_on is None else pass_on(module)
        of_mask = _window_of_mask(module, getattr(module, "config", inner.config.get_text_config()))
        windows = [window for window in (passed, of_mask if in_mask else None) if isinstance(window, int)]
        yield name, min(windows, default=None)


def _window_of_mask(module: nn.Module, config: PreTrainedConfig) -> object:
    """Returns the window of a layer's mask, in a model that makes masks with windows."""
    kinds, number = getattr(config, "layer_types", None) or [], getattr(module, "layer_idx", None)
    kind = kinds[number] if isinstance(number, int) and number < len(kinds) else "sliding_attention"
    return getattr(config, "sliding_window", None) if "sliding" in str(kind) else None


@lru_cache(maxsize=1024)
def _makes_windows(module_class: Hashable) -> bool:
    """Returns whether the class's own forward makes masks with windows."""
    return "create_sliding_window_causal_mask" in source_of(getattr(module_class, "forward", None))
