"""Inputs and results of a decoder: vectors for all rows stay, features in an unknown form are refused, and several
states of a token return."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

import distca_hf
from distca_hf.analysis.check.tiny_config import tiny_config
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.counted_rows import CountedRows
from distca_hf.integrations.models.decoder_borders import DecoderBorders
from support.given_batches import Batch, Gradients, gradients_of, in_double, of_all_hidden_states, packed
from support.ranks import run_ranks
from support.versions import classes_of_today


pytestmark = classes_of_today


def model_of(model_type: str, **settings: object) -> PreTrainedModel:
    config_class = CONFIG_MAPPING[model_type]
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config_class(**settings) if settings else tiny_config(config_class))
    return model.to(torch.float64).train()


def sound(rank: int, row_tokens: int) -> Batch:
    """Returns a row of Voxtral Realtime, whose tokens each have eight frames of sound; that of rank 1 is padded."""
    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 100, (1, row_tokens), generator=random)
    mask = (torch.arange(row_tokens)[None] < row_tokens // (1 + 3 * rank)).long()
    frames = torch.randn(1, 128, 8 * row_tokens, generator=random, dtype=torch.float64)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "input_features": frames}


def _listen() -> tuple[bool, Gradients]:
    """Returns whether rows crossed ranks, and the sum of the gradients of both ranks."""
    plugin = distca_hf.DistCAPlugin()
    model = distca_hf.enable(model_of("voxtral_realtime"), plugin)
    with in_double():
        model(**sound(dist.get_rank(), model.config.text_config.hidden_size), num_delay_tokens=3).loss.backward()
    crossed = plugin.transport(torch.device("cpu")).traffic.exchanges > 0
    gradients = gradients_of(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    plugin.close()
    return crossed, gradients


def test_a_vector_for_all_rows_stays_even_if_it_is_as_long_as_a_row(tmp_path: Path) -> None:
    alone = model_of("voxtral_realtime")
    for rank in range(2):
        with in_double():
            alone(**sound(rank, alone.config.text_config.hidden_size), num_delay_tokens=3).loss.backward()
    expected = gradients_of(alone)

    for crossed, gradients in run_ranks(2, _listen, tmp_path):
        assert crossed
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-10, rtol=1e-8, msg=name)


def test_features_that_do_not_move_with_their_tokens_are_refused() -> None:
    """Granite 4 Vision adds features to the images of its batch, in a dict by layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    towers = sizes | {"model_type": "clip_vision_model", "image_size": 64, "patch_size": 16}
    settings = {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": []}
    model = model_of("granite4_vision", text_config=sizes | {"vocab_size": 128}, vision_config=towers, **settings)
    borders, embeddings = DecoderBorders(model, False, CountedRows(model), lambda plan: None), torch.zeros(1, 8, 64)

    borders._check_known({"inputs_embeds": embeddings, "deepstack_features": None}, "rank 0")
    with pytest.raises(UnsupportedAttentionError, match=r"rank 0: .* gets deepstack_features, a dict of"):
        borders._check_known({"inputs_embeds": embeddings, "deepstack_features": {0: embeddings[0, :4]}}, "rank 0")


def several_states() -> PreTrainedModel:
    """Returns a Gemma 3n, whose layers have states `[states of a token, batch, tokens, width]`."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING["gemma3n_text"])).to(torch.float64).train()


def _return_states() -> tuple[bool, float, Gradients]:
    """Returns whether rows crossed ranks, the loss, and the sum of the gradients of both ranks."""
    plugin = distca_hf.DistCAPlugin()
    model = distca_hf.enable(several_states(), plugin)
    with in_double():
        loss = of_all_hidden_states(model, packed((9,) if dist.get_rank() else (60, 5), dist.get_rank()))
        loss.backward()
    crossed = plugin.transport(torch.device("cpu")).traffic.exchanges > 0
    gradients = gradients_of(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    plugin.close()
    return crossed, loss.item(), gradients


def test_several_states_of_a_token_return_to_its_batch(tmp_path: Path) -> None:
    alone, losses = several_states(), []
    for rank in range(2):
        with in_double():
            loss = of_all_hidden_states(alone, packed((9,) if rank else (60, 5), rank))
            loss.backward()
        losses.append(loss.item())
    expected = gradients_of(alone)

    for (crossed, loss, gradients), of_batch in zip(run_ranks(2, _return_states, tmp_path), losses, strict=True):
        assert crossed
        assert loss == pytest.approx(of_batch, rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-10, rtol=1e-8, msg=name)
