"""A model that trains on several ranks and was never enabled: said once, by rank 0."""

import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

import distca_hf
from support.models import VOCABULARY, tiny_model
from support.ranks import run_ranks


def _warnings_of_training(
    enabled: bool, training: bool, checkpointed: bool = False, merged: bool = False
) -> list[str]:
    model = tiny_model().train(training)
    if merged:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    if enabled:
        distca_hf.enable(model, distca_hf.DistCAPlugin())
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if merged:
        model = model.merge_and_unload().requires_grad_()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    ids = torch.randint(3, VOCABULARY, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 1 - int(checkpointed)  # padded, so that backward attends once more on each rank alone
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            wrapped(input_ids=ids, labels=ids, attention_mask=mask).loss.backward()
    return [str(warning.message) for warning in told if "enabled" in str(warning.message)]


def test_training_without_enable_is_mentioned_once(tmp_path: Path) -> None:
    (told,), others = run_ranks(2, _warnings_of_training, tmp_path, False, True)

    assert others == []
    assert "LlamaAttention trains with distca on 2 rank(s), but was not enabled" in told
    assert "nothing is balanced" in told


def test_enabled_models_and_evaluation_are_not_mentioned(tmp_path: Path) -> None:
    assert run_ranks(2, _warnings_of_training, tmp_path / "enabled", True, True) == [[], []]
    assert run_ranks(2, _warnings_of_training, tmp_path / "checkpointed", True, True, True) == [[], []]
    assert run_ranks(2, _warnings_of_training, tmp_path / "evaluation", False, False) == [[], []]
    # A model that lost its adapters is watched from its backbone on.
    assert run_ranks(2, _warnings_of_training, tmp_path / "merged", True, True, False, True) == [[], []]
