"""A Trainer with a hybrid has the numbers of sdpa: its steps are planned ahead, some of their micro-batches have cut
documents and others none, and between steps it evaluates on all ranks and generates on one."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import distca_hf
from distca_hf.batches.given import GivenPlanner
from distca_hf.runtime.live_plan import LivePlan
from support.data import random_documents
from support.models import tiny_model
from support.ranks import run_ranks
from support.training import quiet_arguments
from support.versions import states_travel


MICRO_BATCHES, STEPS = 3, 3
# Tokens of two documents of either rank, in each micro-batch of a step. Those of the second are even, and stay.
LENGTHS = (150, 9, 20, 14, 40, 40, 40, 40, 30, 61, 5, 120)
LAYERS = {"qwen3_5": 2, "nemotron_h": 4}


class Numbers(NamedTuple):
    """What a training made.

    Attributes:
        tokens: generated after each step; none on other ranks.
        cut_documents: of each planned pass.
        gathered: passes that were not planned ahead.
    """

    losses: list[float]
    evaluated: list[float]
    tokens: list[torch.Tensor]
    cut_documents: list[int]
    gathered: int


class Generates(TrainerCallback):
    """Generates from two prompts after each step, one of them padded, on one rank."""

    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **keywords: Any) -> None:
        """See `TrainerCallback`."""
        if args.process_index:
            return
        inner: Any = getattr(model, "module", model)
        prompts = torch.arange(3, 23).view(2, 10)
        mask = torch.ones_like(prompts)
        mask[0, :3] = 0
        how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        inner.eval()
        self.tokens.append(inner.generate(input_ids=prompts, attention_mask=mask, **how))
        inner.train()


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths).to(torch.int64)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(kind: str, implementation: str, folder: Path, **settings: Any) -> Numbers:
    rows = [random_documents(1, seed, (tokens,))[0] for seed, tokens in enumerate(STEPS * LENGTHS)]
    generates = Generates()
    plugin = distca_hf.DistCAPlugin(**settings)
    arguments = quiet_arguments(
        folder / implementation,
        max_steps=STEPS,
        optim="sgd",  # unlike Adam, it makes no large step of a gradient that is rounding
        learning_rate=0.05,
        gradient_accumulation_steps=MICRO_BATCHES,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        train_sampling_strategy="sequential",
        eval_strategy="steps",
        eval_steps=1,
        use_cpu=True,
    )
    trainer = Trainer(
        model=tiny_model(kind, implementation, num_hidden_layers=LAYERS[kind], initializer_range=0.2),
        args=TrainingArguments(**arguments),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        eval_dataset=Dataset.from_dict({"input_ids": rows[:8]}),
        data_collator=padded,
        callbacks=[generates, *([distca_hf.DistCACallback(plugin)] if implementation == "distca" else [])],
    )
    plan, prepare = GivenPlanner.plan, GivenPlanner._prepare_gathered
    cut, gathered = list[int](), list[int]()

    def noted_plan(self: GivenPlanner, *given: Any) -> LivePlan | None:
        planned = plan(self, *given)
        assert planned is not None
        cut.append(planned.facts.cut_documents)
        return planned

    def noted_prepare(self: GivenPlanner, *given: Any) -> Any:
        gathered.append(len(cut))
        return prepare(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GivenPlanner, "plan", noted_plan)
        patch.setattr(GivenPlanner, "_prepare_gathered", noted_prepare)
        trainer.train()
    losses, evaluated = (
        [log[name] for log in trainer.state.log_history if name in log] for name in ("loss", "eval_loss")
    )
    return Numbers(losses, evaluated, generates.tokens, cut, len(gathered))


def train_all(folder: Path) -> dict[str, list[Numbers]]:
    return {
        kind: [
            train(kind, "sdpa", folder / kind),
            train(kind, "distca", folder / kind),
            train(kind, "distca", folder / f"{kind}-evaluated", evaluate="distca"),
        ]
        for kind in LAYERS
    }


@states_travel
def test_steps_evaluation_and_generation_have_the_numbers_of_sdpa(tmp_path: Path) -> None:
    first, second = run_ranks(2, train_all, tmp_path, tmp_path)
    for kind in LAYERS:
        expected, local, everywhere = first[kind]
        assert len(expected.losses) == len(expected.evaluated) == len(expected.tokens) == STEPS
        for made in (local, everywhere):
            assert made.losses == pytest.approx(expected.losses, rel=2e-6), kind
            assert made.evaluated == pytest.approx(expected.evaluated, rel=2e-6), kind
            assert all(map(torch.equal, made.tokens, expected.tokens)), kind
        assert [cut > 0 for cut in local.cut_documents] == STEPS * [True, False, True]
        assert local.gathered == 1, "all but the first are planned ahead"
        assert len(everywhere.cut_documents) == STEPS * (MICRO_BATCHES + 2), "in evaluation, too"
        assert [made.cut_documents for made in second[kind]] == [made.cut_documents for made in first[kind]]
