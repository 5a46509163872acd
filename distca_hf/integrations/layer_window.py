"""The window of a layer: as long as every document it changes nothing, a shorter one is refused by the layer."""

from torch import nn

from distca_hf.errors import UnsupportedAttentionError


def check_window(window_tokens: int | None, longest_tokens: int, layer: nn.Module | None = None) -> None:
    """Checks a window against the longest document.

    Args:
        layer: whose window it is; its number is looked at in an error alone, because graphs are made for each value
            of an attribute.

    Raises:
        UnsupportedAttentionError: it is shorter.
    """
    if window_tokens is not None and window_tokens < longest_tokens:
        place = "a compiled layer" if layer is None else name_of(layer)
        raise UnsupportedAttentionError(
            f"{place}: sliding window {window_tokens} is shorter than a document of {longest_tokens} tokens, and "
            "windows are not computed; split documents at the window, or disable it in the config"
        )


def shortest_window(*windows: int | None) -> int | None:
    """Returns the window of a layer, if any. Some models speak of it to their layers, some in the mask alone."""
    return min([window for window in windows if window is not None], default=None)


def name_of(module: nn.Module) -> str:
    """Returns class and number of a layer."""
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
