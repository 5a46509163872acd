"""Layer masks: which keys the attention layers of a model see, read from its modules and configuration.

Transformers models give a window to the attention function (`sliding_window`), or to the mask only. Placement must
know it before the first pass. A window that is met there first is routed then, with a warning (`forward_check`).
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from functools import lru_cache

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

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
    counted = Counter(masks_of_layers(model).values())
    return tuple(sorted(counted.items(), key=lambda item: (item[0].window_tokens or 0, item[0].chunked)))


def empty_windows(model: nn.Module) -> Iterator[str]:
    """Yields a refusal of the first window that holds not even the token itself."""
    for name, window, _ in _windows(model):
        if window is not None and window < 1:
            yield f"sliding window {window} ({name}) holds no token; it counts the token itself, so 1 is the shortest"
            return


def masks_of_layers(model: nn.Module) -> dict[str, Mask]:
    """Returns the mask of every attention layer, by name."""
    return {name: Mask(window, is_chunk) for name, window, is_chunk in _windows(model)}


def makes_chunks(model: nn.Module) -> bool:
    """Returns whether a model makes masks of chunks, inside of which some of its layers attend."""
    return _makes(transformers_model(model), "create_chunked_causal_mask")


def _windows(model: nn.Module) -> Iterator[tuple[str, int | None, bool]]:
    """Yields name and window of every attention layer, None for one that sees all of its document; and whether the
    window is a chunk.

    A layer attends with the window that it passes to the attention function, or with that of its mask. Its attribute
    does not count: many classes set one on layers that pass none.
    """
    inner = transformers_model(model)
    in_mask, in_chunks = _makes(inner, "create_sliding_window_causal_mask"), makes_chunks(inner)
    for name, module in attention_layers(inner).items():
        config = getattr(module, "config", inner.config.get_text_config())
        chunk = getattr(config, "attention_chunk_size", None)
        if in_chunks and isinstance(chunk, int) and "chunked" in _kind_of(module, config, ""):
            yield name, chunk, True
            continue
        pass_on = keyword_passed(type(module), "attention_interface", "sliding_window")  # type: ignore[arg-type]
        passed = None if pass_on is None else pass_on(module)
        is_sliding = in_mask and "sliding" in _kind_of(module, config, "sliding_attention")
        of_mask = getattr(config, "sliding_window", None) if is_sliding else None
        yield name, min((one for one in (passed, of_mask) if isinstance(one, int)), default=None), False


def _kind_of(module: nn.Module, config: PreTrainedConfig, otherwise: str) -> str:
    """Returns the type of a layer in its model's configuration, or what it is where types are not listed."""
    kinds, number = getattr(config, "layer_types", None) or [], getattr(module, "layer_idx", None)
    return str(kinds[number]) if isinstance(number, int) and number < len(kinds) else otherwise


def _makes(model: PreTrainedModel, mask: str) -> bool:
    """Returns whether a forward function of a model's text part calls the function that makes such masks."""
    return any(_calls(type(part), mask) for part in text_modules(model).values())  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _calls(module_class: Hashable, name: str) -> bool:
    return name in source_of(getattr(module_class, "forward", None))
