"""What is known of classes with towers, by structure: whether their images may move, and what these cost."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from distca_hf.integrations.models.image_features import towers_of
from distca_hf.integrations.models.structure import backbone_of
from support.multimodal import multimodal_model
from support.versions import images_may_move


pytestmark = images_may_move


def made(model_type: str) -> PreTrainedModel:
    return multimodal_model(model_type, "sdpa").to(torch.float64)


@pytest.mark.parametrize(
    ("model_type", "has_frames"),
    [
        *((name, True) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")),
        *((name, False) for name in ("internvl", "mistral3", "gemma3", "llava", "paligemma", "kimi_k25")),
    ],
)
def test_images_of_known_classes_may_move(model_type: str, has_frames: bool) -> None:
    towers = towers_of(made(model_type))

    assert (towers.stay, towers.has_frames) == ("", has_frames)
    assert towers.cost.pair > 0 < towers.cost.patch


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("smolvlm", "its get_image_features takes pixel_attention_mask"),
        ("llava_onevision", "its get_image_features takes vision_aspect_ratio"),
    ],
)
def test_images_of_other_classes_stay_and_it_is_said_why(model_type: str, why: str) -> None:
    assert why in towers_of(multimodal_model(model_type, "eager")).stay


@pytest.mark.parametrize(
    ("model_type", "cast"),
    [
        *((name, "visual.dtype") for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")),
        ("internvl", "dtype"),
        *((name, "") for name in ("mistral3", "gemma3", "llava", "paligemma", "kimi_k25")),
    ],
)
def test_pixels_are_cast_first_in_some_classes(model_type: str, cast: str) -> None:
    """Features of pixels that were cast before are the same bits, also under autocast."""
    model = made(model_type)
    assert towers_of(model).cast == cast
    if not cast:
        return
    backbone: Any = backbone_of(model.bfloat16())
    width = 14 if model_type in ("qwen2_vl", "qwen2_5_vl", "glm4v") else 16
    given: dict[str, Any] = {"pixel_values": torch.randn(32, 3 * 2 * width**2)}
    given["image_grid_thw"] = torch.tensor([[1, 4, 8]])
    if model_type == "internvl":
        given = {"pixel_values": torch.randn(2, 3, 56, 56)}
    for is_autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            features, of_cast = (
                backbone.get_image_features(**given | {"pixel_values": pixels}, return_dict=True).pooler_output
                for pixels in (given["pixel_values"], given["pixel_values"].bfloat16())
            )
        assert torch.equal(torch.cat([*features]), torch.cat([*of_cast]))


def test_a_tower_that_computes_means_over_images_keeps_them() -> None:
    model = made("llava")
    model.model.vision_tower.embeddings.norm = torch.nn.BatchNorm2d(3)

    assert "means over images" in towers_of(model).stay


def test_a_forward_that_reads_more_than_features_keeps_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llava")

    def forward(self: Any, mm_encoder_outputs: Any = None, **given: Any) -> Any:
        return mm_encoder_outputs["image"].pooler_output, mm_encoder_outputs["image"].last_hidden_state

    monkeypatch.setattr(type(model.model), "forward", forward)

    assert "reads more than features of tokens" in towers_of(model).stay


@pytest.mark.parametrize(
    ("model_type", "width"), [("qwen2_5_vl", 14), ("qwen3_vl", 16), ("qwen3_5", 16), ("glm4v", 14)]
)
def test_frames_are_computed_like_images_by_themselves(model_type: str, width: int) -> None:
    backbone: Any = backbone_of(made(model_type))
    patches = torch.randn(3 * 32, 3 * 2 * width**2, dtype=torch.float64)
    frames = backbone.get_video_features(patches, torch.tensor([[3, 4, 8]]), return_dict=True).pooler_output
    images = [
        backbone.get_image_features(part, torch.tensor([[1, 4, 8]]), return_dict=True).pooler_output[0]
        for part in patches.split(32)
    ]

    torch.testing.assert_close(torch.cat([*frames]), torch.cat(images), rtol=1e-12, atol=1e-12)
