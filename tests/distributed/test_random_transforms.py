"""Datasets whose transform draws at random: all ranks, worker processes and resumed runs see the same rows."""

import multiprocessing
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import distca_hf
from support.ranks import run_ranks
from support.resuming import LOADS_ON_CPU_RANKS
from support.training import quiet_arguments


LENGTHS = (20, 90, 33, 150, 8, 61, 47, 120, 75, 12)
# Of all ranks together: the longest documents are cut.
CAPACITY_TOKENS = 180
# A rank's batches: tokens, positions, labels and shifted labels of each.
Batches = list[torch.Tensor]


def dataset() -> Dataset:
    """Documents with a hole in their midst that is moved to their end, and some other tokens."""

    def fill_in_the_middle(batch: dict[str, Any]) -> dict[str, Any]:
        rows = []
        for number, length in zip(batch["number"], batch["length"], strict=True):
            tokens = [3 + (7 * number + at) % 100 for at in range(length)]
            begin, end = sorted(random.sample(range(1, length), 2))
            tokens = tokens[:begin] + tokens[end:] + tokens[begin:end]
            tokens[np.random.randint(length)] = int(torch.randint(103, 120, ()))
            rows.append(tokens)
        return {"input_ids": rows, "labels": rows}

    stored = {"number": list(range(40)), "length": [LENGTHS[row % len(LENGTHS)] for row in range(40)]}
    return Dataset.from_dict(stored).with_transform(fill_in_the_middle)


def _generators(seed: int | None = None) -> tuple[Any, ...]:
    """States of the generators that training draws from."""
    if seed is not None:
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def _batches(workers: int, num_ranks: int, of_rank: int, taken: int, state: Any = None) -> tuple[Batches, Any]:
    """Some batches of this rank from a position on, and the position behind them."""
    before = _generators(seed=1000 * workers + of_rank)
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS // num_ranks)
    loader = plugin.dataloader(dataset(), seed=5, num_workers=workers, device="cpu")
    if state is not None:
        loader.load_state_dict(state)
    names = ("input_ids", "position_ids", "labels", "shift_labels", "attention_mask")
    found: Batches = []
    while len(found) < taken:
        for batch in islice(loader, taken - len(found)):
            found.append(torch.cat([batch[name] for name in names]))
    assert _generators() == before, "what the training draws depends on no row"
    return found, loader.state_dict()


def _allow_workers() -> None:
    """Lets a process of the fork server have workers, as one of a launcher may."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)


def _in_many_ways(num_ranks: int, per_epoch: int) -> Batches:
    """Batches of two epochs; asserts that they are the same by workers and resumed in the middle of an epoch."""
    _allow_workers()
    rank, stop, end = torch.distributed.get_rank(), per_epoch // 2, 2 * per_epoch
    whole, _ = _batches(0, num_ranks, rank, end)
    by_workers, _ = _batches(2, num_ranks, rank, end)
    first, state = _batches(2, num_ranks, rank, stop)
    rest, _ = _batches(0, num_ranks, rank, end - stop, state)
    for way in (by_workers, [*first, *rest]):
        assert all(torch.equal(*pair) for pair in zip(whole, way, strict=True))
    return whole


def _losses(folder: str, workers: int, resumes: bool = False) -> list[float]:
    """Losses of a Trainer, whose model draws from the generators, too."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 128, "n_positions": 192}
    config = GPT2Config(attn_pdrop=0.0, resid_pdrop=0.3, embd_pdrop=0.3, **sizes)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="distca")
    saving = {"save_strategy": "steps", "save_steps": 5, "num_train_epochs": 2, "dataloader_num_workers": workers}
    args = TrainingArguments(**quiet_arguments(Path(folder), use_cpu=True, **saving))
    trainer = Trainer(model, args, train_dataset=dataset())
    distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS // 2).attach(trainer)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-5" if resumes else None)
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def _trained_in_many_ways(folder: str) -> list[list[float]]:
    _allow_workers()
    return [_losses(folder, 0), _losses(folder, 2), _losses(folder, 2, resumes=LOADS_ON_CPU_RANKS)]


def test_trainings_with_workers_and_resumed_are_bit_equal(tmp_path: Path) -> None:
    alone, by_workers, resumed = run_ranks(2, _trained_in_many_ways, tmp_path, str(tmp_path / "run"))[0]

    assert len(alone) > 20
    assert len(set(alone)) == len(alone)
    assert by_workers == alone
    assert resumed == alone


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_rank_worker_and_resumed_run_sees_the_same_rows(num_ranks: int, tmp_path: Path) -> None:
    alone = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS).dataloader(dataset(), seed=5)
    batches = run_ranks(num_ranks, _in_many_ways, tmp_path, num_ranks, len(alone))
    for number, of_ranks in enumerate(zip(*batches, strict=True)):
        tokens = torch.cat([rows[:4, rows[4] == 1] for rows in of_ranks], dim=1)
        expected = [
            np.stack([document.input_ids, np.arange(len(document.input_ids)), document.labels, document.shift_labels])
            for document in alone.documents(*divmod(number, len(alone)))
        ]
        assert sorted(tokens.T.tolist()) == sorted(np.concatenate(expected, axis=1).T.tolist())
        ids, _, labels, _ = tokens
        assert ((labels == -100) | (labels == ids)).all()
    assert any(len(of_rank) > 0 and bool((rows[1, :1] > 0).any()) for of_rank in batches[1:] for rows in of_rank) == (
        num_ranks > 1
    ), "documents are cut"
