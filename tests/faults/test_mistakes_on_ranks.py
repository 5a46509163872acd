"""Mistakes of newcomers that take two ranks, all in one run: each is answered in at most four lines of a terminal,
with what is wrong, where, and what to do. Those of one process are in `unit/test_mistakes.py`."""

import logging
import os
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState

import distca_hf
from distca_hf.errors import DistCAError
from support.data import random_dataset
from support.log_lines import KeptLines
from support.models import VOCABULARY, tiny_model
from support.ranks import run_ranks
from support.versions import ignores_cpu_count


CPU = torch.device("cpu")
COLUMNS, LINES = 80, 4


def attach_is_forgotten() -> None:
    ids = torch.randint(3, VOCABULARY, (2, 8))
    torch.nn.parallel.DistributedDataParallel(tiny_model())(input_ids=ids, labels=ids).loss.backward()


def train_is_forgotten() -> None:
    model = distca_hf.enable(tiny_model(), distca_hf.DistCAPlugin()).eval()
    ids = torch.randint(3, VOCABULARY, (2, 8))
    for _ in range(2):  # warns once
        model(input_ids=ids, labels=ids).loss.backward()


def padded_batches() -> None:
    model = distca_hf.enable(tiny_model(), distca_hf.DistCAPlugin(tokens_per_rank=96)).train()
    ids = torch.randint(3, VOCABULARY, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()


def other_tokens_per_rank() -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=(96, 160)[dist.get_rank()])
    next(iter(plugin.dataloader(random_dataset())))


def other_data() -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=160)
    next(iter(plugin.dataloader(random_dataset(seed=dist.get_rank()))))


def accelerate_looks_for_gpus() -> None:
    del os.environ["ACCELERATE_USE_CPU"]
    PartialState._reset_state()
    PartialState()
    distca_hf.DistCAPlugin().transport(CPU)


# What is wrong, where, what to do; numbers are those of the study of newcomers.
TOLD: dict[str, tuple[Callable[[], None], str, str, str]] = {
    "02 attach is forgotten": (
        attach_is_forgotten,
        "nothing is balanced",
        "LlamaAttention trains with distca on 2 rank(s)",
        "Call plugin.attach(trainer), or in your own loop distca_hf.enable(model, plugin)",
    ),
    "a model that stays in evaluation mode": (
        train_is_forgotten,
        "nothing is balanced",
        "LlamaForCausalLM runs backward in evaluation mode: this rank attended only to its own batch",
        "Call model.train() on all ranks",
    ),
    "05 padded batches": (
        padded_batches,
        "every rank attends to this batch by itself",
        "micro-batch 0 is padded on rank 0, 1",
        "Pad on the right with labels of -100, or pack documents",
    ),
    "32 other settings": (
        other_tokens_per_rank,
        "ranks disagree, nothing was sent",
        "tokens_per_rank is 96 on rank 0, 160 on rank 1",
        "Ranks need equal data, seeds, models, settings",
    ),
    "32 other data": (
        other_data,
        "ranks disagree, nothing was sent",
        "lengths of documents is",
        "Ranks need equal data",
    ),
    "18 Accelerate looks for GPUs": (
        accelerate_looks_for_gpus,
        "gradients would not be synchronised",
        "2 processes are in the process group, but Accelerate trains 1 together",
        "On CPUs set use_cpu=True",
    ),
}


def _make_all() -> dict[str, list[str]]:
    """Everything that this rank is told of each mistake."""
    kept = KeptLines()
    logging.getLogger("distca_hf").addHandler(kept)
    answers: dict[str, list[str]] = {}
    for name, (mistake, *_) in TOLD.items():
        kept.lines = answers[name] = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                mistake()
            except DistCAError as error:
                answers[name].append(str(error))
        answers[name] += [str(warning.message) for warning in warned]
        dist.barrier()
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(2, _make_all, tmp_path_factory.mktemp("mistakes"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate would find a GPU")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[ignores_cpu_count] if name.startswith("18 ") else []) for name in TOLD],
)
def test_mistake_is_answered_with_what_where_and_what_to_do(name: str, answers: list[Any]) -> None:
    _, what, where, do = TOLD[name]
    told = [[message for message in of_rank[name] if what in message] for of_rank in answers]

    assert any(told), answers
    for message in {message for messages in told for message in messages}:
        assert [part for part in (where, do) if part not in message] == [], message
        assert len(textwrap.wrap(message, COLUMNS)) <= LINES, message
