"""Code of one rank fails on the host, before what ranks do next together. It tells the others, who end with rank and
cause, although its process goes on: nothing else tells them."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distca_hf
from distca_hf.batches.prepare import Preparer
from distca_hf.batches.step_ahead import StepAhead
from distca_hf.data.readers import StreamDocument
from distca_hf.data.streams import StreamSource
from distca_hf.integrations.models.forward_check import ForwardCheck
from distca_hf.integrations.models.sharing import Sharing
from distca_hf.integrations.models.tower_borders import TowerBorders
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import start_ranks
from support.streams import numbered_stream


FAILS = 1
WATCH, GATHER = "distca_hf.integrations.models.forward_watch", "distca_hf.batches.document_gather"
NEVER = distca_hf.Timeouts(agreement_seconds=3600.0, exchange_seconds=3600.0)
SETTINGS: dict[str, Any] = {"timeouts": NEVER}
PREFIX = 64


class Broken(Exception):
    """What fails on one rank."""


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise Broken("no space left on this rank\nand more")


@contextmanager
def _goes_on() -> Iterator[None]:
    """A program whose process lives on after an error."""
    try:
        yield
    except Broken:
        threading.Event().wait()


def _break(owner: object, name: str) -> None:
    if dist.get_rank() == FAILS:
        setattr(import_module(owner) if isinstance(owner, str) else owner, name, _fail)


def _train(model: torch.nn.Module, batches: Iterable[Any], owner: object, name: str) -> None:
    _break(owner, name)
    with _goes_on():
        for batch in batches:
            model(**batch).loss.backward()


def _read_a_stream(owner: object, name: str) -> None:
    loader = distca_hf.DistCAPlugin(tokens_per_rank=48, **SETTINGS).dataloader(numbered_stream(), device="cpu")
    _break(owner, name)
    with _goes_on():
        list(loader)


def _train_on_placed(owner: object, name: str) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96, **SETTINGS)
    model = distca_hf.enable(tiny_model(num_hidden_layers=1).train(), plugin)
    _train(model, plugin.dataloader(random_dataset(), seed=0), owner, name)


def _pack(rank: int) -> dict[str, torch.Tensor]:
    """Two documents that begin alike, and are longer on rank 0."""
    tokens = PREFIX + 80 - 40 * rank
    document = torch.arange(1, tokens + 1)
    ids, positions = torch.cat([document, document])[None] % 90, torch.arange(tokens).repeat(2)[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}


def _train_on_packs(owner: object, name: str, passes_before: int = 0, **flags: bool) -> None:
    model = tiny_model(num_hidden_layers=1, attention_dropout=0.0).train()
    model = distca_hf.enable(model, distca_hf.DistCAPlugin(shared_prefix_tokens=PREFIX, **SETTINGS))
    for _ in range(passes_before):
        model(**_pack(dist.get_rank())).loss.backward()
    _train(model, [_pack(dist.get_rank()) | flags], owner, name)


# What runs on all ranks, and whose function fails on one of them.
CASES: dict[str, tuple[Callable[[object, str], None], object, str]] = {
    "what ranks compare of a stream": (_read_a_stream, StreamSource, "facts"),
    "how a stream is divided": (_read_a_stream, StreamSource, "log_division"),
    "a reader of a stream": (_read_a_stream, StreamSource, "part"),
    "tokens of a stream": (_read_a_stream, StreamDocument, "segment"),
    "a placed batch": (_train_on_placed, Preparer, "finish"),
    "the look at a model, on placed batches": (_train_on_placed, WATCH, "check_averaging"),
    "what follows a placed batch": (_train_on_placed, ForwardCheck, "facts"),
    "the model": (_train_on_packs, ForwardCheck, "check_model"),
    "the look at a model": (_train_on_packs, WATCH, "check_averaging"),
    # The third pass does not look at the model before ranks agree.
    "what follows the agreement on a pack": (partial(_train_on_packs, passes_before=2), ForwardCheck, "facts"),
    # Ranks compare what moves first, because the batch has another form.
    "a pack of another form": (
        partial(_train_on_packs, passes_before=2, output_hidden_states=False),
        ForwardCheck,
        "facts",
    ),
    "whether prefixes may be shared": (_train_on_packs, Sharing, "why_unshared"),
    "why prefixes are not shared": (_train_on_packs, Sharing, "_of_modules"),
    "what is shown of documents": (_train_on_packs, GATHER, "_beginnings"),
    "arguments of towers": (_train_on_packs, TowerBorders, "arguments"),
    "what was planned ahead": (_train_on_packs, StepAhead, "take"),
    "batches that follow": (_train_on_packs, StepAhead, "show"),
}
# Of these, other ranks hear only that the rank failed, and not why.
NOT_NAMED = {
    "what follows the agreement on a pack",
    "why prefixes are not shared",
    "what is shown of documents",
}


@pytest.mark.parametrize("case", CASES)
def test_the_other_rank_ends_with_rank_and_cause(case: str, tmp_path: Path) -> None:
    run, owner, name = CASES[case]

    other, _ = start_ranks(2, run, tmp_path, owner, name, endless=frozenset({FAILS}))

    assert other.exit_code == 1
    told = rf"PeerLostError: rank 0, micro-batch [02].*: rank {FAILS} could not do its part; see the error there"
    if case not in NOT_NAMED:
        told += ": Broken: no space left on this rank on rank 1"
    assert re.search(told, other.output), other.output
