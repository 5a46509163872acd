"""Models that hear: sounds stay on the ranks where they arrived, rows move, and gradients are those of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedModel

import distca_hf
from distca_hf.analysis.check.tiny_config import tiny_config
from support.given_batches import Batch, Gradients, gradients_of, in_double
from support.ranks import run_ranks
from support.versions import classes_of_today


pytestmark = classes_of_today
SOUND, FRAMES, ROW_TOKENS = 100, 40, 90


def _qwen2_audio(config: Any) -> None:
    config.audio_config.max_source_positions, config.audio_token_id = FRAMES // 2, SOUND


def _gemma4(config: Any) -> None:
    """Small models of Gemma 4 let no token see a later one."""
    config.text_config.use_bidirectional_attention, config.audio_token_id = None, SOUND


# By model type: sets up a configuration, name of the mask of frames, and whether frames come before their numbers.
KINDS: dict[str, tuple[Callable[[Any], None], str, bool]] = {
    "qwen2_audio": (_qwen2_audio, "feature_attention_mask", False),
    "gemma4": (_gemma4, "input_features_mask", True),
}
TOKENS = FRAMES // 4  # of a sound


def model_of(kind: str) -> PreTrainedModel:
    config = tiny_config(CONFIG_MAPPING[kind])
    KINDS[kind][0](config)
    torch.manual_seed(0)
    attention = {"text_config": "sdpa", "audio_config": "sdpa" if kind == "qwen2_audio" else "eager"}
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation=attention)
    return model.to(torch.float64).train()


def batch_of(kind: str, rank: int) -> Batch:
    """Returns two rows, the second one padded; on rank 0 each has a sound."""
    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, SOUND, (2, ROW_TOKENS // (1 + 2 * rank)), generator=random)
    mask = torch.ones_like(ids)
    mask[1, ids.shape[1] // 2 :] = 0
    if rank:
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    _, mask_name, frames_first = KINDS[kind]
    ids[:, 5 : 5 + TOKENS] = SOUND
    sizes = (2, FRAMES, 128) if frames_first else (2, 128, FRAMES)
    sounds = {"input_features": torch.randn(sizes, generator=random, dtype=torch.float64)}
    sounds[mask_name] = torch.ones(2, FRAMES, dtype=torch.bool)
    kinds = {"mm_token_type_ids": 3 * (ids == SOUND)} if kind == "gemma4" else {}
    labels = ids.masked_fill((mask == 0) | (ids == SOUND), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **sounds, **kinds}


def _train(kind: str) -> tuple[int, Gradients]:
    """Returns how many exchanges a step made, and the sum of the gradients of both ranks."""
    plugin, batch = distca_hf.DistCAPlugin(), batch_of(kind, dist.get_rank())
    model = distca_hf.enable(model_of(kind), plugin)
    with in_double():
        model(**batch).loss.backward()
    exchanges = plugin.transport(torch.device("cpu")).traffic.exchanges
    gradients = {name: weight.new_zeros(weight.shape) for name, weight in model.named_parameters()}
    gradients |= gradients_of(model)  # weights of the tower have none on rank 1
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    plugin.close()
    return exchanges, gradients


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    alone = model_of(kind)
    for rank in range(2):
        with in_double():
            alone(**batch_of(kind, rank)).loss.backward()
    expected = gradients_of(alone)
    assert any("audio" in name and gradient.any() for name, gradient in expected.items())

    for exchanges, gradients in run_ranks(2, _train, tmp_path, kind):
        assert exchanges > 0
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, atol=1e-10, rtol=1e-8, msg=name)
