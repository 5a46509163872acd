"""Media: images, videos and sound beside tokens, known by the names that Transformers' processors give them.

Micro-batches that are placed here hold tokens alone, so a dataset with media is refused. Batches of others may hold
them (`batches.packed`).
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from distca_hf.errors import PackingError


if TYPE_CHECKING:
    from datasets import Dataset

# Names of columns and of arguments of models; also within a longer name ("pixel_values_videos").
MEDIA = re.compile(r"pixel_values|(^|_)(images?|videos?|audios?|speech)(_|$)|^input_(features|values)$")
# Kinds of columns that are media by any name, by the names of their classes.
MEDIA_FEATURES = ("Image", "Audio", "Video")
# Kinds of values that say something about media, at most.
PLAIN = str | int | float | None


def media_columns(dataset: "Dataset") -> list[str]:
    """Returns names of the columns that hold images, videos or sound. A number or a text beside tokens (a caption, a
    path) is none."""
    if dataset.format["type"] == "custom" and len(dataset):
        made = dataset[0].items()
        return [name for name, value in made if MEDIA.search(name) and not isinstance(value, PLAIN)]
    return [name for name, feature in dataset.features.items() if _is_media(name, feature)]


def _is_media(name: str, feature: Any) -> bool:
    inner: Any = feature
    while isinstance(inner, list) or hasattr(inner, "feature"):
        inner = inner[0] if isinstance(inner, list) else inner.feature
    kind = type(inner).__name__
    is_plain = kind == "Value" and inner is feature
    return kind in MEDIA_FEATURES or (MEDIA.search(name) is not None and not is_plain)


def media_refusal(columns: Iterable[str]) -> str:
    """Returns why a dataset with these columns of media cannot be placed."""
    return (
        f"the dataset has images, videos or sound ({', '.join(columns)}), and placed micro-batches hold tokens alone: "
        "they would be left out. Remove the columns to train on text; or keep your own packs, which may hold images "
        "(distca_hf.enable, DistCACallback)"
    )


def check_no_media(dataset: "Dataset") -> None:
    """Checks that a dataset holds tokens alone.

    Raises:
        PackingError: it has columns of images, videos or sound; names them.
    """
    if columns := media_columns(dataset):
        raise PackingError(media_refusal(columns))
