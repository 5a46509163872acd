"""Tiny multimodal models of Transformers, and documents for them with images."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from distca_hf.analysis.check.tiny_config import tiny_config


IMAGE_TOKEN, VIDEO_TOKEN, IMAGE_TOKENS = 100, 101, 4
# Patches of an image in rows and columns; two by two of them become a token.
GRID = (4, 4)
# Settings of small towers, whose images have few tokens; of Qwen3-VL's, features of a layer join a layer of the text.
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_size": 64},
    "internvl": {"image_size": (56, 56)},
    "llava": {"image_size": 64},
    "qwen3_vl": {"deepstack_visual_indexes": [0]},
}


# Of what follows towers: Gemma 3 averages features to so many tokens, and Kimi K2.5 takes features of so many numbers.
AFTER_TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": IMAGE_TOKENS},
    "kimi_k25": {"projection_hidden_size": 64},
}


def multimodal_model(model_type: str, implementation: str | dict[str, str] = "distca") -> PreTrainedModel:
    """Returns a tiny model in fp32 that trains; its weights are random and equal every time."""
    config = tiny_config(CONFIG_MAPPING[model_type])
    config.image_token_id, config.video_token_id = IMAGE_TOKEN, VIDEO_TOKEN
    for name, value in TOWERS.get(model_type, {}).items():
        setattr(config.vision_config, name, value)
    for name, value in AFTER_TOWERS.get(model_type, {}).items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=implementation).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def document(seed: int, tokens: int, image_at: int | None = None) -> dict[str, Any]:
    """Returns a document of random tokens as Qwen2.5-VL takes it, `[1, tokens]`, with one image or none."""
    random = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, IMAGE_TOKEN, (1, tokens), generator=random)
    kinds = torch.zeros_like(input_ids)
    if image_at is None:
        return {"input_ids": input_ids, "mm_token_type_ids": kinds}
    image = slice(image_at, image_at + IMAGE_TOKENS)
    input_ids[:, image], kinds[:, image] = IMAGE_TOKEN, 1
    patches = torch.randn(GRID[0] * GRID[1], 3 * 2 * 14 * 14, generator=random)
    grid = torch.tensor([[1, *GRID]])
    return {"input_ids": input_ids, "mm_token_type_ids": kinds, "pixel_values": patches, "image_grid_thw": grid}


def pack(documents: list[dict[str, Any]], positions: list[torch.Tensor]) -> dict[str, Any]:
    """Returns one row of documents, with offsets and positions `[3, 1, tokens]`, as a collator would."""
    lengths = torch.tensor([0, *(one["input_ids"].shape[1] for one in documents)])
    offsets = lengths.cumsum(0).to(torch.int32)
    images = [one for one in documents if "pixel_values" in one]
    return {
        **{name: torch.cat([one[name] for one in documents], 1) for name in ("input_ids", "mm_token_type_ids")},
        **{name: torch.cat([one[name] for one in images]) for name in ("pixel_values", "image_grid_thw") if images},
        "position_ids": torch.cat(positions, 2),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
    }
