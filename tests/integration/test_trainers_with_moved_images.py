"""A Trainer whose batches have images on some ranks: losses and weights are those of sdpa, and towers are even; also
if its model is sharded, with attention servers, and in reported steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from test_padded_trainers import WORLD, arguments
from test_trainers_with_images import joined as joined_with_images
from transformers import Trainer, TrainerCallback, TrainingArguments

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.multimodal import document, multimodal_model
from support.ranks import run_ranks
from support.thorough import is_thorough
from support.training import DISTRIBUTED_TYPES, computing_arguments
from support.versions import images_may_move


STEPS = 3
Result = tuple[list[tuple[float, float]], dict[str, torch.Tensor], list[tuple[float, float]]]


def joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Padded rows. Those of an odd number have an image."""
    if rows[0]["number"] % 2:
        return joined_with_images(rows)
    ids = torch.stack([document(row["number"], 90)["input_ids"][0] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "mm_token_type_ids": 0 * ids}


class Towers(TrainerCallback):
    """Notes the imbalance of towers after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if (watch := watch_of(getattr(model, "module", model))) is not None:
            self.seen.append(watch.towers.imbalance)


def _train(folder: Path, implementation: str, wrap: str = "ddp", report_every_steps: int = 0) -> Result:
    # Rank 0 gets rows with images in every step, rank 1 none.
    rows = [{"number": 2 * row + (1 if row // 2 % WORLD == 0 else 0), "answer": [3 + row] * 12} for row in range(24)]
    settings: dict[str, Any] = {"max_steps": STEPS, "gradient_accumulation_steps": 2}
    settings |= {"train_sampling_strategy": "sequential", "ddp_find_unused_parameters": True}
    if wrap != "ddp":  # towers are sharded with the rest
        of_wrap = computing_arguments(wrap, "", "Qwen2_5_VLDecoderLayer")
        settings |= {"ddp_find_unused_parameters": None, "use_cpu": False, **of_wrap}
    common = arguments(folder, **settings, remove_unused_columns=False) | {"per_device_train_batch_size": 2}
    torch.manual_seed(0)
    model, towers = multimodal_model("qwen2_5_vl", implementation), Towers()
    data = Dataset.from_list(rows)
    trainer = Trainer(model, TrainingArguments(**common), train_dataset=data, data_collator=joined, callbacks=[towers])
    if implementation == "distca":
        distca_hf.DistCAPlugin(report_every_steps=report_every_steps).attach(trainer)
    trainer.train()
    assert trainer.accelerator.distributed_type == DISTRIBUTED_TYPES[wrap.rstrip("123")]
    losses = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()} if wrap == "ddp" else {}
    return losses, weights, towers.seen


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What rank 0 has with sdpa."""
    folder = tmp_path_factory.mktemp("usual")
    result: Result = run_ranks(WORLD, _train, folder / "ranks", folder, "sdpa")[0]
    return result


@images_may_move
def test_losses_are_those_of_sdpa_and_towers_are_even(usual: Result, tmp_path: Path) -> None:
    ours, _ = run_ranks(WORLD, _train, tmp_path / "ranks", tmp_path, "distca")

    for (loss, norm), (loss_of_sdpa, norm_of_sdpa) in zip(ours[0], usual[0], strict=True):
        assert loss == pytest.approx(loss_of_sdpa, rel=2e-6, abs=1e-5)
        assert norm == pytest.approx(norm_of_sdpa, rel=5e-5, abs=1e-6)
    for name, weight in usual[1].items():
        torch.testing.assert_close(ours[1][name], weight, atol=2e-4, rtol=0, msg=name)
    assert ours[2] == [(2.0, 1.0)] * STEPS


@images_may_move
@pytest.mark.parametrize(
    ("wrap", "servers", "report"),
    [("fsdp2", 0, True), ("zero3", 0, False), ("ddp", 1, True), *([("fsdp1", 0, True)] if is_thorough() else [])],
)
def test_losses_of_wrapped_models_and_with_attention_servers_are_those_of_sdpa(
    wrap: str, servers: int, report: bool, usual: Result, tmp_path: Path
) -> None:
    """A rank without images takes part in towers that are sharded."""
    of_ours = tmp_path, "distca", wrap, int(report)
    ours, _ = run_ranks(WORLD, _train, tmp_path / "ours", *of_ours, servers=servers)

    assert len(ours[0]) == STEPS
    for (loss, norm), (loss_of_sdpa, norm_of_sdpa) in zip(ours[0], usual[0], strict=True):
        assert loss == pytest.approx(loss_of_sdpa, rel=2e-6, abs=1e-5)
        assert norm == pytest.approx(norm_of_sdpa, rel=5e-5, abs=1e-6)
    assert ours[2] == [(2.0, 1.0)] * STEPS
    assert len([*(tmp_path / "distca_report").glob("*.jsonl")]) == (WORLD if report else 0)
