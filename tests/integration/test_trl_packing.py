"""TRL's SFTTrainer on real ranks, unmodified but for `attach`: packs by splitting, and selective checkpointing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import distca_hf
from support.data import random_dataset
from support.models import VOCABULARY, tiny_model
from support.ranks import run_ranks
from support.training import quiet_arguments


WORLD = 2
NUM_LAYERS = 3
STEPS = 3
MAX_LENGTH = 100
PACKING: dict[str, Any] = {"packing": True, "packing_strategy": "bfd_split"}

# Losses, lengths of the packed documents, and counts of every step.
Result = tuple[list[float], list[int], list[tuple[int, int, int, bool]]]


def _documents() -> Dataset:
    return random_dataset(40, lengths=(7, 20, 95, 230))


class Counts(TrainerCallback):
    """Of every step: attention calls forward and backward, exchanges, and whether keys or queries moved."""

    def __init__(self, model: torch.nn.Module, transport: Any) -> None:
        self.steps: list[tuple[int, int, int, bool]] = []
        self._plans: list[Any] = []
        self._transport, self._exchanges = transport, 0
        model.register_forward_hook(lambda module, args, kwargs, output: self._plans.append(kwargs), with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (plan,) = (given["distca_plan"] for given in self._plans)
        exchanges = self._transport.traffic.exchanges
        moved = sum([*plan.facts.key_rows_sent, *plan.facts.query_rows_sent]) > 0
        self.steps.append(
            (plan.forward_pass.calls, plan.forward_pass.backward_calls, exchanges - self._exchanges, moved)
        )
        self._plans.clear()
        self._exchanges = exchanges


def _train(folder: Path, implementation: str, attention: str, settings: dict[str, Any]) -> Result:
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    args = SFTConfig(
        **quiet_arguments(
            folder,
            max_steps=STEPS,
            use_cpu=True,
            max_length=MAX_LENGTH,
            **{"gradient_checkpointing": False, **settings},
        )
    )
    trainer = SFTTrainer(
        model=tiny_model(implementation=implementation, num_hidden_layers=NUM_LAYERS),
        args=args,
        train_dataset=_documents(),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),
    )
    lengths = [length for pack in trainer.train_dataset["seq_lengths"] for length in pack]
    counts: list[tuple[int, int, int, bool]] = []
    if implementation == "distca":
        plugin = distca_hf.DistCAPlugin(checkpointed_attention=attention)
        plugin.attach(trainer)
        watch = Counts(trainer.model, plugin.transport(torch.device("cpu")))
        trainer.add_callback(watch)
        counts = watch.steps
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], lengths, counts


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Attached, without checkpointing."""
    folder = tmp_path_factory.mktemp("usual")
    return run_ranks(WORLD, _train, folder, folder, "distca", "save", PACKING)[0]


def test_split_packs_have_the_losses_of_sdpa(usual: Result, tmp_path: Path) -> None:
    losses, lengths, counts = usual
    expected, same, _ = run_ranks(WORLD, _train, tmp_path, tmp_path, "sdpa", "save", PACKING)[0]

    assert lengths == same
    assert max(lengths) == MAX_LENGTH
    assert sum(lengths) == sum(len(row) for row in _documents()["input_ids"]), "documents are split, not cut"
    assert losses == pytest.approx(expected, abs=1e-5)
    assert any(moved for _, _, _, moved in counts), "some must move"


@pytest.mark.parametrize(
    ("attention", "selective", "forward_calls"),
    [("recompute", True, NUM_LAYERS), ("recompute", False, 2 * NUM_LAYERS), ("save", True, NUM_LAYERS)],
    ids=["selective", "plain", "selective beside ours"],
)
def test_selective_checkpointing_neither_attends_nor_exchanges_twice(
    attention: str, selective: bool, forward_calls: int, usual: Result, tmp_path: Path
) -> None:
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": selective}}
    losses, _, counts = run_ranks(WORLD, _train, tmp_path, tmp_path, "distca", attention, PACKING | checkpointing)[0]

    assert losses == usual[0]
    assert [calls for *calls, _, _ in counts] == [[forward_calls, NUM_LAYERS]] * STEPS
    for (*_, exchanges, _), (*_, usual_exchanges, _) in zip(counts, usual[2], strict=True):
        assert exchanges >= usual_exchanges
        assert exchanges == usual_exchanges or forward_calls > NUM_LAYERS
