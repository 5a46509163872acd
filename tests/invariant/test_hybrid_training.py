"""A model whose layers carry a state from token to token trains on documents longer than a rank: it follows one
process with sdpa."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn

from support.data import random_dataset
from support.ranks import run_ranks, start_ranks
from support.thorough import is_thorough
from support.training import (
    DISTRIBUTED_TYPES,
    LEARNING_RATE,
    MANY_STEPS,
    SEED,
    STEPS,
    Curve,
    assert_same_curve,
    computing_arguments,
    curve_of,
    load_model,
    quiet_arguments,
    save_initial_model,
)
from support.versions import states_travel


TOKENS_PER_RANK = 128
# Classes of decoder layers.
LAYERS = {
    "qwen3_5": "Qwen3_5DecoderLayer",
    "nemotron_h": "NemotronHBlock",
    "minimax": "MiniMaxDecoderLayer",
}
# Documents of every step: their tokens and labels.
Documents = list[list[tuple[Any, Any]]]


def dataset(kind: str) -> Dataset:
    longest = 100 if kind == "minimax" else 200  # must be whole on a rank
    return random_dataset(60, lengths=(3, 9, 17, 40, longest))


def train(kind: str, wrap: str, checkpointing: str, steps: int, folder: Path) -> tuple[Curve, Documents]:
    """An attached Trainer, and what it trained on."""
    from transformers import Trainer, TrainingArguments

    import distca_hf

    computing = computing_arguments(wrap, checkpointing, LAYERS[kind])
    arguments = quiet_arguments(
        folder / "trainer", max_steps=steps, optim="adamw_torch", max_grad_norm=1.0, seed=SEED, **computing
    )
    trainer = Trainer(load_model(folder, "distca"), TrainingArguments(**arguments), train_dataset=dataset(kind))
    distca_hf.DistCAPlugin(tokens_per_rank=TOKENS_PER_RANK, metrics="all").attach(trainer)
    loader = trainer.get_train_dataloader()
    per_epoch = len(loader)
    documents = [
        [(one.input_ids, one.labels) for one in loader.documents(step // per_epoch, step % per_epoch)]
        for step in range(steps)
    ]
    return curve_of(trainer), documents


def train_alone(folder: Path, documents: Documents) -> Curve:
    """sdpa in one process, every document alone; the mean over all labels of a step."""
    model = load_model(folder, "sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses, norms = [], []
    for of_step in documents:
        labels = sum(int((targets[1:] != -100).sum()) for _, targets in of_step)
        total = 0.0
        for ids, targets in of_step:
            if (targets[1:] != -100).any():
                row = {"input_ids": torch.from_numpy(ids)[None], "labels": torch.from_numpy(targets)[None]}
                loss = model(**row, num_items_in_batch=labels, use_cache=False).loss
                loss.backward()
                total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Curve(losses, norms)


@states_travel
@pytest.mark.parametrize(
    ("kind", "wrap", "checkpointing", "ranks", "servers", "steps"),
    [
        ("qwen3_5", "fsdp2", "non-reentrant", 3, 0, MANY_STEPS if is_thorough() else STEPS),
        ("nemotron_h", "zero3", "", 3, 0, MANY_STEPS if is_thorough() else STEPS),
        ("qwen3_5", "ddp", "", 2, 1, STEPS),
        *([("qwen3_5", "zero3", "reentrant", 2, 0, STEPS)] if is_thorough() else []),
    ],
)
def test_losses_follow_one_process_sdpa(
    kind: str,
    wrap: str,
    checkpointing: str,
    ranks: int,
    servers: int,
    steps: int,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Mixers run as often on every rank, so ZeRO-3 can gather their weights."""
    folder = save_initial_model(kind, tmp_path / "model")
    curve, documents = run_ranks(ranks, train, tmp_path, kind, wrap, checkpointing, steps, folder, servers=servers)[0]

    assert curve.distributed_type == DISTRIBUTED_TYPES[wrap.rstrip("123")]
    assert curve.imbalance[1] < curve.imbalance[0]
    assert_same_curve(curve, train_alone(folder, documents), record_property)


def test_zero3_is_refused_by_name_if_a_state_cannot_travel(tmp_path: Path) -> None:
    """It gathers the weights of a mixer in every run, and ranks run mixers unequally often: once for documents of
    about one length."""
    folder = save_initial_model("minimax", tmp_path / "model")
    outcomes = start_ranks(2, train, tmp_path, "minimax", "zero3", "", 1, folder)

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert any("MiniMaxLightningAttention) run once for documents" in outcome.output for outcome in outcomes)
