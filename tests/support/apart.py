"""A small training in which one rank does something else than the others: it skips a batch, has one more, or ends."""

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import distca_hf
from distca_hf.comm import whereabouts
from support.data import random_dataset, random_documents
from support.models import tiny_model


KINDS = ("skips", "has one more", "raises", "exits", "is killed", "is stopped")
WHERE = ("forward", "backward", "between steps")
BATCHES = ("placed", "packs")
STEPS, AT_STEP = 5, 2
# Micro-batches that packs of all ranks hold; placed ones have as many tokens.
LENGTHS = (150, 20)
# Deadline of a rank that is stopped, which nothing else tells from a slow one.
STOPPED_SECONDS = 8.0


@dataclass(frozen=True)
class Apart:
    """What one rank does.

    Attributes:
        kind, where, batches: of `KINDS`, `WHERE` and `BATCHES`.
        rank: that does it.
    """

    kind: str
    where: str
    batches: str
    rank: int

    def words(self) -> tuple[str, ...]:
        """Words of which survivors must say one."""
        # Packs are planned in a forward pass, and placed batches are taken before it.
        begun = AT_STEP - ((self.where, self.batches) == ("between steps", "packs"))
        of_rank = {
            "raises": (f"rank {self.rank} left: ValueError: this batch is bad",),
            "exits": (f"rank {self.rank} left in micro-batch {begun} with exit status 0",),
            "is killed": (f"rank {self.rank} does not answer",),
            "is stopped": (f"rank {self.rank} does not answer",),
        }
        of_ddp = f"rank {self.rank} left: RuntimeError: Expected to have finished reduction in the prior iteration"
        apart = *(f"on rank {self.rank}{mark}" for mark in ".,;"), of_ddp
        return of_rank.get(self.kind, apart)


def hurry() -> None:
    """Lets ranks of this process find out within a second or two that they wait in vain."""
    whereabouts.LOOK_SECONDS, whereabouts.SHOW_SECONDS = 0.2, 0.5
    whereabouts.READ_SECONDS, whereabouts.SHORTEST_PAUSE_SECONDS = 0.8, 0.5


def train(apart: Apart, folder: Path, hurried: bool, timeouts: dict[str, float]) -> None:
    """Trains with DDP, and writes down when the rank goes apart.

    Args:
        timeouts: of the plugin; the default ones where they are not given.
    """
    if hurried:
        hurry()
    if apart.kind == "is stopped":  # DDP waits over this group
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=STOPPED_SECONDS), dist.group.WORLD)
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96, timeouts=distca_hf.Timeouts(**timeouts))
    plugin.transport(device)
    model = tiny_model(num_hidden_layers=2).train().to(device, torch.bfloat16 if device.type == "cuda" else None)
    distca_hf.enable(model, plugin)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches: Iterator[dict[str, Any]] = _packs(rank, device)
    if apart.batches == "placed":
        batches = iter(plugin.dataloader(random_dataset(lengths=LENGTHS), seed=0))
    armed: list[bool] = []

    def go_apart(*_: Any) -> None:
        if armed:
            armed.clear()
            (folder / "apart").touch()
            _ends(apart.kind)
            raise torch.OutOfMemoryError("this batch does not fit")  # it is caught, and the batch left out

    model.model.layers[1].mlp.register_forward_pre_hook(go_apart if apart.where == "forward" else lambda *_: None)
    for step, batch in enumerate(batches):
        is_here = step == AT_STEP and rank == apart.rank
        if is_here and apart.kind == "has one more":
            (folder / "apart").touch()
            _run_more(apart.where, wrapped, batch, batches)
        armed += [True] * (is_here and apart.kind != "has one more")
        try:
            if apart.where == "between steps":
                go_apart()
            loss = wrapped(**batch).loss
            if apart.where == "backward":
                model.model.layers[1].mlp.down_proj.weight.register_hook(go_apart)
            loss.backward()
            optimizer.step()
        except torch.OutOfMemoryError:
            sys.stdout.write("this batch is left out\n")
        optimizer.zero_grad()
        if step + 1 == STEPS:
            break


def _run_more(where: str, wrapped: nn.Module, batch: dict[str, Any], batches: Iterator[dict[str, Any]]) -> None:
    """Runs a pass more than the other ranks, or a whole batch."""
    if where == "forward":
        wrapped(**batch)
    elif where == "backward":
        loss = wrapped(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        wrapped(**batch).loss.backward()
        wrapped(**next(batches)).loss.backward()


def _ends(kind: str) -> None:
    """Ends this process, or stops it; returns for a rank that only skips a batch."""
    if kind == "raises":
        raise ValueError("this batch is bad")
    if kind == "exits":  # as a script does, whose interpreter then ends
        atexit._run_exitfuncs()
        os._exit(0)
    if kind.startswith("is "):
        os.kill(os.getpid(), signal.SIGKILL if kind == "is killed" else signal.SIGSTOP)


def _packs(rank: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """A long document on rank 0, short ones elsewhere."""
    documents = random_documents(2, seed=rank, lengths=LENGTHS[:1] if rank == 0 else LENGTHS[1:])
    ids = torch.tensor([token for document in documents for token in document])[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    while True:
        yield {"input_ids": ids.to(device), "labels": ids.to(device), "position_ids": positions.to(device)}
