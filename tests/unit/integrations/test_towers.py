"""Towers of multimodal models: they keep an attention of their own, and nothing but the text part is looked at."""

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import distca_hf
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.check import PositionLimits, check_model
from distca_hf.integrations.models.forward_watch import enable, watch_of
from distca_hf.integrations.models.planner import step_flops
from distca_hf.integrations.models.structure import attention_layers, text_decoder, towers, undivided
from distca_hf.integrations.models.tower_borders import UNKNOWN, TowerBorders
from distca_hf.integrations.trainer.attachment import restorer
from support.log_lines import KeptLines
from support.multimodal import IMAGE_TOKEN, document, multimodal_model
from support.versions import classes_of_today, images_may_move, tells_decoder


def enabled(model: PreTrainedModel) -> PreTrainedModel:
    enable(model, distca_hf.DistCAPlugin(), longest_document_tokens=64)
    return model


@tells_decoder
def test_towers_attend_with_sdpa_and_the_text_with_distca() -> None:
    model, kept = multimodal_model("qwen2_5_omni_thinker"), KeptLines()
    logging.getLogger("distca_hf").addHandler(kept)
    enabled(enabled(model))
    logging.getLogger("distca_hf").removeHandler(kept)

    assert model.config.text_config._attn_implementation == "distca"
    assert [name.removeprefix("model.") for name in towers(model)] == ["audio_tower", "visual"]
    assert {tower.config._attn_implementation for tower in towers(model).values()} == {"sdpa"}
    assert sum("visual attends with sdpa" in line for line in kept.lines) == 1
    assert {*attention_layers(model).values()} == {layer.self_attn for layer in text_decoder(model).layers}


def test_an_attention_that_was_chosen_for_a_tower_stays() -> None:
    chosen = {"": "distca", "text_config": "distca", "vision_config": "eager"}
    model = enabled(multimodal_model("internvl", chosen))

    assert model.config.vision_config._attn_implementation == "eager"


@pytest.mark.parametrize(("outer", "text", "vision"), [("sdpa", "distca", "sdpa"), ("eager", "sdpa", "eager")])
def test_only_the_text_and_its_masks_leave_the_attention_of_loading(outer: str, text: str, vision: str) -> None:
    """Some models make the masks of their text by the outer configuration."""
    model = multimodal_model("gemma3", {"": outer, "text_config": text, "vision_config": vision})
    restore = restorer(model)
    enabled(model)
    parts = (model.config, model.config.text_config, model.config.vision_config)

    assert [part._attn_implementation for part in parts] == ["distca", "distca", vision]
    restore()
    assert [part._attn_implementation for part in parts] == [outer, text, vision]


def test_operations_and_positions_are_those_of_the_text_alone() -> None:
    model = multimodal_model("llava")
    text = AutoModelForCausalLM.from_config(LlamaConfig(**model.config.text_config.to_dict()))
    vision = model.model.vision_tower.embeddings.position_embedding

    assert step_flops(model) == step_flops(text)
    assert vision.num_embeddings < 128
    PositionLimits(model).check(longest_document_tokens=128, where="here")


def test_a_layer_that_mixes_tokens_of_text_is_refused_in_the_decoder_alone() -> None:
    model = multimodal_model("llava")
    check_model(model, 64)
    model.model.language_model.layers[0].mlp.conv = torch.nn.Conv1d(1, 1, 1)

    with pytest.raises(UnsupportedAttentionError, match=r"layers\.0\.mlp\.conv .* mixes tokens"):
        check_model(model, 64)


def test_a_decoder_that_cannot_be_told_from_its_towers_is_refused() -> None:
    model = multimodal_model("llava")
    other = copy.deepcopy(model)
    other.model.language_model.config = copy.deepcopy(other.config.text_config)
    shared = copy.deepcopy(model)
    shared.model.vision_tower.encoder.layers[0].self_attn.config = shared.config.text_config

    assert list(undivided(model)) == []
    assert text_decoder(model) is model.model.language_model
    with pytest.raises(UnsupportedAttentionError, match="its text decoder cannot be told from its towers"):
        check_model(other, 64)
    with pytest.raises(UnsupportedAttentionError, match=r"layers\.0\.self_attn attends outside the text decoder"):
        check_model(shared, 64)


def test_a_batch_with_images_is_evaluated_and_continued_as_with_sdpa() -> None:
    model, plain = (multimodal_model("qwen2_5_vl", name).eval() for name in ("distca", "sdpa"))
    enabled(model)
    batch = document(0, 24, image_at=6)
    generated = {"max_new_tokens": 5, "do_sample": False}

    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(**batch, **generated), plain.generate(**batch, **generated))


def test_kinds_of_tokens_that_a_model_passes_on_to_its_layers_change_nothing() -> None:
    model, plain = (multimodal_model("llava", name).eval() for name in ("distca", "sdpa"))
    enabled(model)
    pixels = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    input_ids = torch.tensor([[5, 6, *[IMAGE_TOKEN] * (64 // 32) ** 2, 7, 8]])
    batch = {"input_ids": input_ids, "pixel_values": pixels}
    kinds = (input_ids == IMAGE_TOKEN).long()

    with torch.no_grad():
        logits = model(**batch, mm_token_type_ids=kinds).logits
        torch.testing.assert_close(logits, plain(**batch).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
def test_kinds_of_tokens_are_text_or_refused(trains: bool) -> None:
    """Gemma 3 lets the tokens of an image see each other in both directions, if it is told which these are."""
    model, plain = (multimodal_model("gemma3", name).train(trains) for name in ("distca", "sdpa"))
    enabled(model)
    input_ids = document(0, 12)["input_ids"]
    kinds = torch.zeros_like(input_ids)

    def logits(of: PreTrainedModel, **given: Any) -> torch.Tensor:
        logits: torch.Tensor = of(input_ids=input_ids, **given).logits
        return logits

    expected = logits(plain, token_type_ids=kinds)
    torch.testing.assert_close(logits(model, token_type_ids=kinds), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    kinds[:, 3:6] = 1
    with pytest.raises(UnsupportedAttentionError, match="combines its causal mask with another one"):
        logits(model, token_type_ids=kinds)


@classes_of_today
@pytest.mark.parametrize("packed", [False, True])
def test_a_model_that_asks_for_kinds_gets_them(packed: bool) -> None:
    """Molmo2 asks for kinds in training, also of text; tokens of its images see each other, also in a pack."""
    model, plain = (multimodal_model("molmo2", name) for name in ("distca", "sdpa"))
    enabled(model)
    batch = document(0, 24) | {"use_cache": False}
    if packed:
        batch["position_ids"] = torch.arange(12).repeat(1, 2)

    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-4, atol=1e-4)
    batch["mm_token_type_ids"][:, 3:6] = 1
    with pytest.raises(UnsupportedAttentionError, match="combines its causal mask with another one"):
        model(**batch)


@pytest.mark.parametrize("images", [0, 1])
def test_kinds_of_text_stay_next_to_a_grid(images: int) -> None:
    """Qwen3-VL asks for kinds if it gets a grid, also one of no image, or if kinds say that all is text."""
    model, plain = (multimodal_model("qwen3_vl", name) for name in ("distca", "sdpa"))
    enabled(model)
    batch = {name: column for name, column in document(0, 40).items() if name != "pixel_values"}
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4]])[:images]
    batch["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"])

    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-4, atol=1e-4)


def test_placed_batches_have_no_cache() -> None:
    """Qwen2.5-VL passes `use_cache` on among its keywords."""
    model = enabled(multimodal_model("qwen2_5_vl"))
    watch = watch_of(model)

    assert watch is not None
    assert watch._no_cache({}) == {"use_cache": False}


@images_may_move
def test_the_log_says_once_that_sound_keeps_images_where_they_arrived() -> None:
    borders, kept = TowerBorders(multimodal_model("qwen2_5_omni_thinker")), KeptLines()
    assert not borders.towers.stay
    logging.getLogger("distca_hf").addHandler(kept)
    for batch in ({}, {"input_features": torch.ones(1, 128, 8)}, {"input_features": torch.ones(1, 128, 8)}):
        borders.begin(batch, None)
    logging.getLogger("distca_hf").removeHandler(kept)

    [line] = kept.lines
    assert line.endswith("are computed on the ranks where they arrived: " + UNKNOWN)
