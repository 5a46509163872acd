"""A model that trains on several ranks and was never enabled: said once, by rank 0."""

import warnings
from pathlib import Path

import torch

import distca_hf
from support.models import VOCABULARY, tiny_model
from support.ranks import run_ranks


def _warnings_of_training(enabled: bool, training: bool) -> list[str]:
    model = tiny_model().train(training)
    if enabled:
        distca_hf.enable(model, distca_hf.DistCAPlugin())
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    ids = torch.randint(3, VOCABULARY, (2, 8))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            wrapped(input_ids=ids, labels=ids).loss.backward()
    return [str(warning.message) for warning in told if "enabled" in str(warning.message)]


def test_training_without_enable_is_mentioned_once(tmp_path: Path) -> None:
    (told,), others = run_ranks(2, _warnings_of_training, tmp_path, False, True)

    assert others == []
    assert "LlamaAttention trains with distca on 2 rank(s), but was not enabled" in told
    assert "nothing is balanced" in told


def test_enabled_models_and_evaluation_are_not_mentioned(tmp_path: Path) -> None:
    assert run_ranks(2, _warnings_of_training, tmp_path / "enabled", True, True) == [[], []]
    assert run_ranks(2, _warnings_of_training, tmp_path / "evaluation", False, False) == [[], []]
