"""Passes on given batches wait for no device: what ranks tell each other, and how they plan, is on the host.
Transformers does not look for packed documents on the device, either.

But for checksums of weights, which are compared in passes 1, 2, 4, 8, ..., each time with one wait.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.data import random_documents
from support.models import tiny_model
from support.ranks import run_ranks
from support.training import quiet_arguments


pytestmark = pytest.mark.multigpu

STEPS, STEADY = 6, 2
# Attention of GPUs takes heads of multiples of 8. States of the second one travel.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    "qwen3_5": {},
}
# Beginnings of the names of files that are between the line that waits and the warning.
INNER = (str(Path(torch.__file__).parent), warnings.__file__)
WAITS, CHECKSUMS = "synchronizing CUDA operation", "weights_check.py"
PACKAGE, MASKS = "distca_hf/", "masking_utils.py"


@contextmanager
def waits_noted(places: list[str]) -> Iterator[None]:
    """Notes lines that wait for the device: of the package, and where Transformers makes masks."""

    def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        outside = [frame for frame in traceback.extract_stack()[:-1] if not frame.filename.startswith(INNER)]
        waits = outside[-1]
        noted = PACKAGE in waits.filename or waits.filename.endswith(MASKS)
        if WAITS in str(message) and noted and not waits.filename.endswith(CHECKSUMS):
            places.append(f"{waits.filename}:{waits.lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Noting(Trainer):
    """Notes waits of forward and backward, from the third step on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.places: list[str] = []
        self.accelerator.backward = self._noting(self.accelerator.backward)

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            with waits_noted(self.places if self.state.global_step >= STEADY else []):
                return run(*args, **kwargs)

        return noting

    @contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:
        with super().compute_loss_context_manager():
            with waits_noted(self.places if self.state.global_step >= STEADY else []):
                yield


def train(folder: Path, kind: str) -> tuple[list[str], bool, float]:
    """Waits of the package, whether rows moved, and the last loss."""
    rows = random_documents(4 * STEPS, lengths=(900, 70, 300, 40))
    arguments = quiet_arguments(folder, per_device_train_batch_size=2, max_steps=STEPS, bf16=True)
    model = tiny_model(kind, **SIZES[kind])
    trainer = Noting(
        model=model,
        args=TrainingArguments(**arguments | {"gradient_checkpointing": True}),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        data_collator=DataCollatorWithFlattening(),
        callbacks=[distca_hf.DistCACallback(distca_hf.DistCAPlugin())],
    )
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    moves = watch_of(model).planner.latest_moves
    dist.barrier()
    return trainer.places, moves.crosses, losses[-1]


@pytest.mark.parametrize("kind", SIZES)
def test_no_line_of_a_pass_waits_for_the_device(kind: str, tmp_path: Path) -> None:
    for places, crosses, loss in run_ranks(2, train, tmp_path / "run", tmp_path, kind, backend="nccl"):
        assert places == []
        assert crosses
        assert loss == loss
