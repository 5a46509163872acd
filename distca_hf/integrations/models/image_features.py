"""Image features: finds out whether a multimodal class lets other ranks compute its images, and computes them.

Another rank can compute an image if the class has `get_image_features` with known arguments, and if its forward takes
the result instead of pixels (`mm_encoder_outputs`) and reads only features of tokens from it.
"""

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from distca_hf.arrays import IntArray
from distca_hf.batches.beginnings import IMAGES
from distca_hf.batches.image_plans import ImageCost
from distca_hf.batches.images import CHOICES, KNOWN, OUTPUTS, SIZES, PixelForm, PixelKind
from distca_hf.integrations.models.mixers import OVER_ROWS
from distca_hf.integrations.models.structure import (
    backbone_of,
    forward_names,
    passes_keywords_on,
    syntax_of,
    text_decoder,
    towers,
)


# Features that are moved.
FEATURES = "pooler_output", "deepstack_features"
# Keywords of a pass that are for its text, and may differ between ranks.
OF_TEXT = frozenset(
    {"num_items_in_batch", "max_length_q", "max_length_k", "use_cache", "logits_to_keep", "return_dict"}
)
# A dtype of the backbone or of a part of it, in source text.
CAST = re.compile(r"self(\.\w+)*\.dtype")
# Names of sizes in configurations of towers.
WIDTHS, DEPTHS = ("hidden_size", "embed_dim", "embed_hidden_size"), ("num_hidden_layers", "depth")


class Towers(NamedTuple):
    """What is known of a model's towers."""

    stay: str  # why images must stay where they arrived; empty if they may move
    cost: ImageCost = ImageCost()  # work of an image
    side: int = 1  # side of a patch in pixels, for towers that take whole images
    has_frames: bool = False  # whether each frame of a video is computed like an image
    # Attribute of the backbone, such as "visual.dtype", to which pixels are cast before anything else; or empty. Under
    # autocast, too, they are then cast to it.
    cast: str = ""
    # Names of arguments of forward that are not settings of the tower; None if it gets no settings.
    not_settings: frozenset[str] | None = None

    def settings(self, given: Mapping[str, Any]) -> dict[str, object]:
        """Returns which arguments of a pass are settings of the tower, such as `interpolate_pos_encoding`."""
        if self.not_settings is None:
            return {}
        named = {name: value for name, value in given.items() if isinstance(value, bool | int | float | str)}
        return {name: value for name, value in named.items() if name not in self.not_settings}


def towers_of(model: PreTrainedModel) -> Towers:
    """Returns what is known of the towers of a model, which are not divided between ranks yet."""
    backbone = backbone_of(model)
    if text_decoder(model) is model:
        return Towers("it has no towers")
    if stay := _stay(backbone):
        return Towers(stay)
    vision = getattr(model.config, "vision_config", None)
    tower = next((one for one in towers(model).values() if one.config is vision), None)
    if tower is None:
        return Towers("none of its towers has its vision_config")
    if any(isinstance(module, OVER_ROWS) for module in tower.modules()):
        return Towers("its tower computes means over images")
    side = getattr(vision, "patch_size", 1)
    side = max(side) if isinstance(side, list | tuple) else side
    named = None
    if passes_keywords_on(type(backbone).forward, "get_image_features"):
        named = OF_TEXT.union(inspect.signature(backbone.forward).parameters)
    return Towers("", _cost(tower, side), side, _has_frames(tower, backbone), _cast(backbone), named)


def _stay(backbone: PreTrainedModel) -> str:
    get_features = getattr(backbone, "get_image_features", None)
    if get_features is None:
        return "it has no get_image_features"
    if OUTPUTS not in inspect.signature(backbone.forward).parameters:
        return f"its forward takes no {OUTPUTS}, as in newer Transformers"
    known = {*KNOWN, *CHOICES}
    others = [name for name in _named(get_features) if name not in known]
    if others:
        return f"its get_image_features takes {others[0]}"
    read = [node for node in syntax_of(type(backbone).forward) if isinstance(node, ast.Subscript | ast.Attribute)]
    entries = [node for node in read if _is_entry(node)]
    features = [node for node in read if isinstance(node, ast.Attribute) and _is_entry(node.value)]
    if not entries or len(features) < len(entries) or any(node.attr not in FEATURES for node in features):
        return "its forward reads more than features of tokens"
    return ""


def _named(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]


def _is_entry(node: ast.AST) -> bool:
    """Returns whether a node reads an entry of the argument of forward."""
    is_entry = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == OUTPUTS
    return is_entry and isinstance(node.ctx, ast.Load)  # type: ignore[attr-defined]


def _has_frames(tower: PreTrainedModel, backbone: PreTrainedModel) -> bool:
    """Returns whether frames of videos are computed like images: layers attend within a frame, and no name in the
    class has to do with time."""
    get_videos = getattr(type(backbone), "get_video_features", None)
    if get_videos is None or not {*_named(get_videos)} <= {"self", *KNOWN}:
        return False
    if not forward_names(tower, "get_vision_attention_seqlens"):
        return False
    names = set[str]()
    for function in (type(tower).forward, type(backbone).get_image_features, get_videos):
        for node in syntax_of(function):
            names.update(str(of) for name in ("id", "attr", "arg") if (of := getattr(node, name, None)) is not None)
    return not any("tempor" in name or "resampl" in name for name in names)


def _cast(backbone: PreTrainedModel) -> str:
    """Returns the attribute to which the first line of `get_image_features` casts pixels; empty if it casts none."""
    function = next(node for node in syntax_of(type(backbone).get_image_features) if isinstance(node, ast.FunctionDef))
    first = function.body[ast.get_docstring(function) is not None]
    match first:
        case ast.Assign(
            targets=[ast.Name(id=IMAGES.values)],
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=IMAGES.values), attr="type" | "to")) as call,
        ):
            given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "dtype")]
            path = ast.unparse(given[0]) if len(given) == len(call.args) + len(call.keywords) == 1 else ""
            return path.removeprefix("self.") if CAST.fullmatch(path) else ""
    return ""


def _cost(tower: PreTrainedModel, side: int) -> ImageCost:
    """Counts the operations of a tower. For each patch, every weight takes two; for each pair of patches, every number
    of a layer's width takes four. Weights after the layers merge several patches into one. In layers with windows, a
    patch attends to as many others in every image."""
    config: Any = tower.config
    width, depth = (
        next((getattr(config, of) for of in names if hasattr(config, of)), None) for names in (WIDTHS, DEPTHS)
    )
    if not isinstance(width, int) or not isinstance(depth, int):
        return ImageCost()
    lists = (module for module in tower.modules() if isinstance(module, nn.ModuleList) and len(module) == depth)
    of_layers = {weight for layers in lists for weight in layers.parameters()}
    tables = {module.weight for module in tower.modules() if isinstance(module, nn.Embedding)}
    merged, matrices = getattr(config, "spatial_merge_size", 1) ** 2, 0
    for weight in tower.parameters():
        if weight.ndim > 1 and weight not in tables:
            share = 1 if weight in of_layers else merged
            matrices += 2 * prod(getattr(weight, "ds_shape", weight.shape)) // share
    window, whole = getattr(config, "window_size", None), getattr(config, "fullatt_block_indexes", None)
    if window is None or whole is None:
        return ImageCost(4 * width * depth, matrices)
    in_window = 4 * width * (depth - len(whole)) * (window // side) ** 2
    return ImageCost(4 * width * len(whole), matrices + in_window)


class FeatureForm(NamedTuple):
    """Form of the features of images, the same on all ranks."""

    is_stacked: bool  # whether they are one tensor `[images, ...]`, not one tensor for each image
    deep_layers: int  # layers of the text decoder that add further features (DeepStack)
    width: int
    dtype: torch.dtype


class Features(NamedTuple):
    """Features that one rank has computed."""

    rows: torch.Tensor  # `[tokens, (1 + deep_layers) * width]`
    tokens: Sequence[int]  # number of rows of each unit
    form: FeatureForm


@dataclass
class MovedFeatures(ModelOutput):
    """Features of images, as `get_image_features` returns them: a tensor for each image, or one `[images, ...]`."""

    pooler_output: Any = None
    deepstack_features: Any = None

    @classmethod
    def of(cls, form: FeatureForm, rows: torch.Tensor, tokens: Sequence[int]) -> "MovedFeatures":
        """Returns the features of images with these numbers of rows; without images, features without rows."""

        def divided(part: torch.Tensor) -> Any:
            if not form.is_stacked:
                return part.split([*tokens]) if tokens else (part,)
            return part.view(len(tokens), -1, form.width) if tokens else part[None]

        pooled, *deep = map(divided, rows.split(form.width, dim=1))
        return cls(pooled, deep)


def compute_features(
    backbone: nn.Module, settings: Mapping[str, object], pixels: torch.Tensor, sizes: IntArray, form: PixelForm
) -> Features | None:
    """Returns the features of images; None without images.

    Args:
        pixels: patches or whole images.
        sizes: `[images, 3]` as in `BatchImages`.
    """
    if not len(sizes):
        return None
    arguments: dict[str, Any] = {**settings, IMAGES.values: pixels}
    if form.has_patches:
        arguments[IMAGES.grid] = torch.from_numpy(sizes).to(pixels.device)
    elif form.kind is PixelKind.PADDED_IMAGE:
        arguments[SIZES] = torch.from_numpy(sizes[:, 1:]).to(pixels.device)
    output = backbone.get_image_features(**arguments | {"return_dict": True})  # type: ignore[operator]
    pooled, deep = output.pooler_output, getattr(output, "deepstack_features", None) or ()
    if isinstance(pooled, torch.Tensor) and pooled.ndim == 3:
        tokens, rows = [pooled.shape[1]] * len(pooled), pooled.flatten(0, 1)
    else:
        tokens, rows = [len(of) for of in pooled], torch.cat([*pooled])
    columns = [rows, *(torch.cat([*of_layer]) for of_layer in deep)]
    form_of = FeatureForm(isinstance(pooled, torch.Tensor), len(deep), rows.shape[-1], rows.dtype)
    return Features(torch.cat(columns, dim=1) if deep else rows, tokens, form_of)
