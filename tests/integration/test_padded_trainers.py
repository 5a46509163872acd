"""TRL's trainers that pad their batches, unmodified but for `attach`, on two real ranks: losses are those of sdpa, and
rows are placed inside the model."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast, Trainer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.models import VOCABULARY, tiny_config, tiny_model
from support.ranks import run_ranks
from support.training import quiet_arguments


WORLD = 2
STEPS = 6
ROWS = 2 * STEPS  # two epochs
# Of answers, in turn: most are short, so that one rank has most of the work.
LENGTHS = (70, 4, 9, 40, 6, 120, 3, 12)

# Losses of all steps, and how many of their micro-batches rows were moved in.
Result = tuple[list[float], int]


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(str(rng.randrange(3, VOCABULARY)) for _ in range(count))


def rows(*columns: str) -> Dataset:
    """Prompts and answers; `completion` has a label that says whether it is liked."""
    made: dict[str, list[Any]] = {
        column: [words(LENGTHS[(row + 3 * at) % len(LENGTHS)], ROWS * at + row) for row in range(ROWS)]
        for at, column in enumerate(columns)
    }
    if "completion" in columns:
        made["label"] = [row % 3 == 0 for row in range(ROWS)]
    return Dataset.from_dict(made)


def tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    known = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="0", eos_token="1", **settings)


def save_models(kind: str, folder: Path) -> Path:
    """Writes a language model, which references are loaded from, too, and one with a head for rewards."""
    tiny_model(kind, "sdpa", num_hidden_layers=2, pad_token_id=0, eos_token_id=1).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = tiny_config(kind, num_hidden_layers=2, pad_token_id=0, eos_token_id=1, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward")
    return folder


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    quiet = quiet_arguments(folder, per_device_train_batch_size=2, max_steps=STEPS, use_cpu=True)
    return {**quiet, "gradient_checkpointing": False, **changes}


def _language_model(folder: Path, implementation: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation=implementation)


def _dpo(folder: Path, implementation: str) -> Trainer:
    data = rows("prompt", "chosen", "rejected")
    args = DPOConfig(**arguments(folder, max_length=None))
    return DPOTrainer(
        _language_model(folder, implementation), args=args, train_dataset=data, processing_class=tokenizer()
    )


def _kto(folder: Path, implementation: str) -> Trainer:
    data = rows("prompt", "completion")
    args = KTOConfig(**arguments(folder, max_length=None))
    return KTOTrainer(
        _language_model(folder, implementation), args=args, train_dataset=data, processing_class=tokenizer()
    )


def _reward(folder: Path, implementation: str) -> Trainer:
    data = rows("chosen", "rejected").add_column("margin", [0.1 * row for row in range(ROWS)])
    args = RewardConfig(**arguments(folder, max_length=None))
    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward", attn_implementation=implementation)
    return RewardTrainer(model, args=args, train_dataset=data, processing_class=tokenizer())


def _policy(trainer: type[Trainer], config: type[Any], folder: Path, implementation: str) -> Trainer:
    def share_of_even_words(completions: list[str], **_: Any) -> list[float]:
        return [sum(int(word) % 2 == 0 for word in text.split()) / 6 for text in completions]

    args = config(
        **arguments(folder, per_device_train_batch_size=4),
        num_generations=4,
        max_completion_length=6,
        beta=0.1,
        temperature=1.0,
    )
    return trainer(
        model=_language_model(folder, implementation),
        reward_funcs=share_of_even_words,
        args=args,
        train_dataset=rows("prompt"),
        processing_class=tokenizer(padding_side="left"),
    )


TRAINERS: dict[str, Callable[[Path, str], Trainer]] = {
    "dpo": _dpo,
    "kto": _kto,
    "reward": _reward,
    "grpo": partial(_policy, GRPOTrainer, GRPOConfig),
    "rloo": partial(_policy, RLOOTrainer, RLOOConfig),
}


def _train(folder: Path, implementation: str) -> dict[str, Result]:
    results = {}
    for name, make in TRAINERS.items():
        torch.manual_seed(0)
        trainer = make(folder, implementation)
        if implementation == "distca":
            distca_hf.DistCAPlugin().attach(trainer)
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        watch = watch_of(trainer.accelerator.unwrap_model(trainer.model))
        facts = () if watch is None else watch.packs.history
        results[name] = losses, sum(fact.imbalance < fact.imbalance_before for fact in facts)
    return results


def _train_both(folder: Path) -> tuple[dict[str, Result], dict[str, Result]]:
    """With sdpa, before this process has attached anything, and with distca."""
    return _train(folder, "sdpa"), _train(folder, "distca")


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_padding_trainers_have_the_losses_of_sdpa(kind: str, tmp_path: Path) -> None:
    folder = save_models(kind, tmp_path)
    usual, ours = run_ranks(WORLD, _train_both, tmp_path / "ranks", folder)[0]

    for name, (losses, balanced) in ours.items():
        assert len(losses) == STEPS, name
        assert losses == pytest.approx(usual[name][0], abs=1e-5), name
        assert len(set(losses)) > STEPS / 2, name
        assert balanced > 0, name
