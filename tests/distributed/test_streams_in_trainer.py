"""A Trainer on a stream goes on after two stops: bit by bit on the same ranks, with every document on others."""

import re
from collections import Counter
from pathlib import Path

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from transformers import AutoTokenizer, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import distca_hf
from support.commands import REPOSITORY
from support.models import tiny_model
from support.ranks import run_ranks
from support.resuming import (
    TOKENS,
    TOKENS_PER_RANK,
    all_tokens,
    count_tokens,
    numbered_trainer,
    resumes_on_cpu_ranks,
    train,
)
from support.texts import save_word_model
from support.training import quiet_arguments


def _train(
    folder: Path,
    max_steps: int,
    accumulation: int,
    resume: bool,
    stop_at: int | None,
    compute: bool = False,
    own_rows: bool = False,
) -> tuple[Counter[int], list[float], list[torch.Tensor], int]:
    """Tokens that this rank has trained, losses, weights, and the pass of the stream.

    Args:
        own_rows: whether a `StatefulDataLoader` gives each rank its rows.
    """
    arguments = {"max_steps": max_steps, "gradient_accumulation_steps": accumulation, "logging_steps": 1}
    trainer = numbered_trainer(folder, **arguments)
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset(num_shards=4)
    if own_rows:
        stateful = pytest.importorskip("torchdata.stateful_dataloader")
        part = split_dataset_by_node(trainer.train_dataset, torch.distributed.get_rank(), 2)
        trainer.train_dataset = stateful.StatefulDataLoader(part, batch_size=None)
    distca_hf.DistCAPlugin(tokens_per_rank=TOKENS_PER_RANK, pad_to_multiple_of=1).attach(trainer)
    seen = count_tokens(trainer, compute)
    train(trainer, resume, stop_at)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    weights = [weight.detach().clone() for weight in trainer.model.parameters()]
    assert trainer.state.global_step == (stop_at or max_steps)
    return seen, losses, weights, trainer.get_train_dataloader().pass_number


@resumes_on_cpu_ranks
def test_every_document_is_trained_once_per_pass(tmp_path: Path) -> None:
    worlds, accumulation, max_steps = (4, 1, 2), (3, 1, 3), 12
    seen: Counter[int] = Counter()
    for at, stop in enumerate((3, 5, None)):
        ranks = run_ranks(
            worlds[at], _train, tmp_path / str(at), tmp_path / "run", max_steps, accumulation[at], at > 0, stop
        )
        for tokens, *_ in ranks:
            seen += tokens
    passes = ranks[0][-1]

    assert passes >= 1
    assert all_tokens(passes) <= seen < all_tokens(passes + 1)
    assert all(times % TOKENS[token] == 0 for token, times in seen.items())


@resumes_on_cpu_ranks
@pytest.mark.parametrize(("accumulation", "own_rows"), [(1, False), (3, True)])
def test_losses_and_weights_are_bit_equal_after_two_stops(accumulation: int, own_rows: bool, tmp_path: Path) -> None:
    steps = 8 if accumulation == 1 else 5
    whole = run_ranks(2, _train, tmp_path / "0", tmp_path / "whole", steps, accumulation, False, None, True, own_rows)
    for at, stop in enumerate((2, 4, None)):
        ranks = tmp_path / f"ranks-{at}"
        parts = run_ranks(2, _train, ranks, tmp_path / "parts", steps, accumulation, at > 0, stop, True, own_rows)

    assert len(whole[0][1]) == steps
    for (_, losses, weights, _), (_, losses_in_parts, weights_in_parts, _) in zip(whole, parts, strict=True):
        assert losses == losses_in_parts
        assert all(map(torch.equal, weights, weights_in_parts))


def _texts(folder: Path) -> tuple[int, list[float]]:
    """Steps and imbalances of TRL's trainer, which tokenises texts as they come."""
    model = save_word_model(folder / str(torch.distributed.get_rank()))
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [" ".join(["one", "two"] * (5 + number % 30)) for number in range(200)]
    stream = datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=4)
    settings = {"use_cpu": True, "max_steps": 6, "max_length": None, "gradient_accumulation_steps": 2}
    args = SFTConfig(**quiet_arguments(folder / "output", **settings))
    trainer = SFTTrainer(tiny_model(vocab_size=len(tokenizer)), args, train_dataset=stream, processing_class=tokenizer)
    distca_hf.DistCAPlugin(tokens_per_rank=128).attach(trainer)
    trainer.train()
    return trainer.state.global_step, [facts.imbalance for facts in trainer.get_train_dataloader().history]


def test_trl_streams_texts(tmp_path: Path) -> None:
    for steps, imbalances in run_ranks(2, _texts, tmp_path, tmp_path):
        assert steps == 6
        assert max(imbalances) < 1.05


def _page(folder: Path) -> tuple[int, list[float], list[int]]:
    """Steps, imbalances and tokens of this rank, as the page has it."""
    section = (REPOSITORY / "docs" / "trainer.md").read_text().partition("\n## Streams\n")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    args = TrainingArguments(**quiet_arguments(folder, use_cpu=True, max_steps=6))
    names = {"datasets": datasets, "distca_hf": distca_hf, "Trainer": Trainer, "args": args}
    names["model"] = tiny_model(vocab_size=512, max_position_embeddings=1024)
    exec(code, names)
    trainer = names["trainer"]
    trainer.train()
    loader = trainer.get_train_dataloader()
    facts = [*loader.history][:6]
    return trainer.state.global_step, [one.imbalance for one in facts], [one.num_tokens for one in facts]


def test_example_of_the_page_trains_evenly(tmp_path: Path) -> None:
    for steps, imbalances, tokens in run_ranks(2, _page, tmp_path, tmp_path / "output"):
        assert steps == 6
        assert max(imbalances) < 1.02
        assert min(tokens) > 0.95 * 2 * 1024
