"""A small training run in which one rank comes to harm."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distca_hf
from distca_hf.testing.faults import Fault, FaultTransport, fail
from support.data import random_dataset, random_documents
from support.models import tiny_model


NUM_LAYERS = 2
STEPS = 6
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Harm:
    """What happens to which rank, and where.

    Attributes:
        kind: "raise", "kill" or "stop".
        phase: "agreement" (between two steps), "forward" or "backward".
        batches: "placed", or "packs" of others.
    """

    rank: int
    kind: str
    step: int
    layer: int
    phase: str
    batches: str = "placed"

    def fault(self, folder: Path) -> Fault:
        """The harm as a fault of the rank's transport, which writes down when it happens."""
        actions = {
            "raise": fail(ValueError("this batch is bad")),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        }

        def act() -> None:
            (folder / "harmed").write_text(repr(time.time()))
            actions[self.kind]()

        return Fault(self._at(), act, "gather" if self.phase == "agreement" else "exchange")

    def _at(self) -> int:
        """Number of the gather, or of the layer's first exchange; received keys are kept until backward.

        Placed: keys forward, their gradients backward. Packs: queries and what becomes of them as well.
        """
        forward, backward, gathers = (1, 1, 3) if self.batches == "placed" else (3, 3, 4)
        if self.phase == "agreement":
            return self.step * gathers
        first = self.step * NUM_LAYERS * (forward + backward)
        if self.phase == "forward":
            return first + self.layer * forward
        return first + NUM_LAYERS * forward + (NUM_LAYERS - 1 - self.layer) * backward


def train_until_harm(harm: Harm, folder: Path, timeout_seconds: float = 20.0) -> None:
    """Trains with DDP and writes down every finished step and the time of the harm."""
    rank = torch.distributed.get_rank()
    plugin = distca_hf.DistCAPlugin(
        tokens_per_rank=96, exchange_timeout_seconds=timeout_seconds, agreement_timeout_seconds=timeout_seconds
    )
    transport = plugin.transport(CPU)
    if rank == harm.rank:
        plugin._transports[CPU] = FaultTransport(transport, [harm.fault(folder)])
    model = tiny_model(num_hidden_layers=NUM_LAYERS).train()
    distca_hf.enable(model, plugin)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = _packs(rank) if harm.batches == "packs" else plugin.dataloader(random_dataset(lengths=(150, 30)), seed=0)
    for step, batch in enumerate(batches):
        wrapped(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (folder / f"steps-{rank}").write_text(str(step + 1))


def _packs(rank: int) -> Iterator[dict[str, Any]]:
    """A long document on rank 0, short ones elsewhere."""
    documents = random_documents(2, seed=rank, lengths=(150,) if rank == 0 else (20,))
    ids = torch.tensor([token for document in documents for token in document])[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    for _ in range(STEPS):
        yield {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


def seconds_since_harm(folder: Path, ended: float) -> float:
    """From the harm to the given wall-clock time."""
    return ended - float((folder / "harmed").read_text())


def finished_steps(folder: Path, rank: int) -> int:
    """Steps that a rank finished."""
    path = folder / f"steps-{rank}"
    return int(path.read_text()) if path.is_file() else 0
