"""Multimodal models in a Trainer: losses over all labels, and datasets with images are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from datasets import Dataset
from transformers import Trainer, TrainingArguments

import distca_hf
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError, PackingError
from distca_hf.integrations.trainer.check import wrong_settings
from support.data import random_dataset
from support.models import tiny_model
from support.multimodal import document, multimodal_model
from support.training import quiet_arguments
from support.versions import takes_label_counts


@pytest.fixture
def attached(tmp_path: Path) -> Callable[..., Trainer]:
    def attach(model: Any, dataset: Dataset) -> Trainer:
        quiet = quiet_arguments(tmp_path, max_steps=2, use_cpu=True, gradient_accumulation_steps=3, logging_steps=1)
        trainer = Trainer(model, TrainingArguments(**quiet), train_dataset=dataset)
        distca_hf.DistCAPlugin(tokens_per_rank=192).attach(trainer)
        return trainer

    return attach


def losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@takes_label_counts
def test_loss_is_a_mean_over_all_labels_also_where_the_class_does_not_say_so(attached: Callable[..., Trainer]) -> None:
    """Trainer would divide by micro-batches; `accepts_loss_kwargs` of the model itself counts more."""
    model, says_so = (multimodal_model("qwen3_vl") for _ in range(2))
    says_so.accepts_loss_kwargs = True
    assert not model.accepts_loss_kwargs
    trainer = attached(model, random_dataset(40))
    of_labels = losses(attached(says_so, random_dataset(40)))

    assert losses(trainer) == of_labels
    assert len(of_labels) == 2
    distca_hf.DistCAPlugin().detach(trainer)
    assert not trainer.model_accepts_loss_kwargs


@takes_label_counts
@pytest.mark.parametrize(
    ("finds_unused", "is_frozen", "is_refused"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_towers_that_ddp_would_count_on_are_refused(
    finds_unused: bool, is_frozen: bool, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = multimodal_model("qwen3_vl")
    model.model.visual.requires_grad_(not is_frozen)
    quiet = quiet_arguments(tmp_path, use_cpu=True, ddp_find_unused_parameters=finds_unused)
    trainer = Trainer(model, TrainingArguments(**quiet), train_dataset=random_dataset(4))
    assert list(wrong_settings(trainer, DistCAConfig(tokens_per_rank=64))) == []
    monkeypatch.setattr(type(trainer.accelerator), "distributed_type", DistributedType.MULTI_GPU)
    reasons = list(wrong_settings(trainer, DistCAConfig(tokens_per_rank=64)))

    assert any("more weights outside the text model train" in reason for reason in reasons) == is_refused
    assert len(reasons) == is_refused


def test_reference_models_look_at_images_as_well(tmp_path: Path) -> None:
    trainer = Trainer(multimodal_model("qwen2_5_vl"), TrainingArguments(**quiet_arguments(tmp_path, use_cpu=True)))
    trainer.ref_model = multimodal_model("qwen2_5_vl").eval()
    distca_hf.DistCAPlugin().attach(trainer)
    batch, usual = document(0, 12, image_at=2), multimodal_model("qwen2_5_vl", "sdpa").eval()

    with torch.no_grad():
        torch.testing.assert_close(trainer.ref_model(**batch).logits, usual(**batch).logits)


def with_images() -> Dataset:
    rows = random_dataset(8)
    return rows.add_column("pixel_values", [[[0.5, 0.5]]] * len(rows)).add_column("images", [["a.png"]] * len(rows))


def test_images_that_would_be_left_out_are_refused(attached: Callable[..., Trainer]) -> None:
    told = r"the dataset has images, videos or sound \(pixel_values, images\), .* Leave tokens_per_rank out"
    with pytest.raises(ConfigError, match=told):
        attached(tiny_model(), with_images())
    with pytest.raises(PackingError, match=told):
        distca_hf.DistCAPlugin(tokens_per_rank=192).dataloader(with_images(), device="cpu")
