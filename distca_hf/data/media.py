"""Media: images, videos and sound next to tokens, known by the names that Transformers' processors give them.

Micro-batches that are placed here hold only tokens, so a dataset with media is refused. Batches of others may hold
them (`batches.given`).
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from datasets import Dataset

# Names of columns and of arguments of models; also within a longer name ("pixel_values_videos").
MEDIA = re.compile(r"pixel_values|(^|_)(images?|videos?|audios?|speech)(_|$)|^input_(features|values)$")
# Kinds of columns that are media by any name, by the names of their classes.
MEDIA_FEATURES = ("Image", "Audio", "Video")


def media_columns(dataset: "Dataset") -> list[str]:
    """Returns names of the stored columns that hold images, videos or sound. A number or a text (a
    caption, a path) is none."""
    return [name for name, feature in dataset.features.items() if is_media(name, feature)]


def is_media(name: str, feature: Any = None) -> bool:
    """Returns whether a column holds images, videos or sound, by its name, or by its kind where that is known."""
    inner: Any = feature
    while isinstance(inner, list) or hasattr(inner, "feature"):
        inner = inner[0] if isinstance(inner, list) else inner.feature
    kind = type(inner).__name__
    is_plain = kind == "Value" and inner is feature
    return kind in MEDIA_FEATURES or (MEDIA.search(name) is not None and not is_plain)


def media_refusal(columns: Iterable[str]) -> str:
    """Returns why a dataset with these columns of media cannot be placed."""
    return (
        f"the dataset has images, videos or sound ({', '.join(columns)}), and placed micro-batches hold only tokens: "
        "they would be left out. Leave tokens_per_rank out, and train on batches of your own, which may hold them; or "
        "remove the columns to train on text"
    )
