"""A small training run in which one rank comes to harm."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import distca_hf
from distca_hf.comm.torch_transport import TorchTransport
from distca_hf.testing import Fault, FaultTransport, fail
from support.commands import HANG_SECONDS
from support.data import random_dataset, random_documents
from support.models import tiny_model


NUM_LAYERS = 2
STEPS = 6
CPU = torch.device("cpu")
# Ranks that leave before such a deadline, and are not killed as hanging, did not wait for it.
NEVER_SECONDS = 10 * HANG_SECONDS
SHORT_SECONDS = 0.5


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
        """The harm as a fault of the rank's transport, which writes down that it happens."""
        actions = {
            "raise": fail(ValueError("this batch is bad")),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        }

        def act() -> None:
            (folder / "harmed").touch()
            actions[self.kind]()

        return Fault(self._at(), act, self._of())

    def wait_briefly(self, folder: Path, transport: TorchTransport) -> Fault:
        """Another rank's share in a stop, as a fault of its transport that does no harm: a short deadline for what
        the stopped rank does not take part in any more, and for nothing before."""

        def act() -> None:
            while not (folder / "harmed").exists():
                time.sleep(0.01)
            for group in transport._groups:
                torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_SECONDS), group)

        return Fault(self._at(), act, self._of())

    def _of(self) -> Literal["exchange", "gather"]:
        return "gather" if self.phase == "agreement" else "exchange"

    def _at(self) -> int:
        """Number of the gather, or of the layer's first exchange; received keys are kept until backward.

        Keys forward, their gradients backward. Packs: rows move in before the layers, and home after them; gradients
        of the latter move before backward of the layers.
        """
        gathers, rows_move = (3, 0) if self.batches == "placed" else (4, 1)
        if self.phase == "agreement":  # in the first pass there is one before rows move and every later layer, too
            return self.step * gathers + (NUM_LAYERS - 1 + rows_move if self.step else 0)
        first = self.step * (2 * NUM_LAYERS + 3 * rows_move) + rows_move
        if self.phase == "forward":
            return first + self.layer
        return first + NUM_LAYERS + 2 * rows_move + NUM_LAYERS - 1 - self.layer


def train_until_harm(harm: Harm, folder: Path) -> None:
    """Trains with DDP and writes down every finished step and the harm."""
    rank = torch.distributed.get_rank()
    plugin = distca_hf.DistCAPlugin(
        tokens_per_rank=96,
        timeouts=distca_hf.Timeouts(exchange_seconds=NEVER_SECONDS, agreement_seconds=NEVER_SECONDS),
    )
    transport = plugin.transport(CPU)
    if harm.kind == "raise":
        transport._rollcall._patience_seconds = NEVER_SECONDS  # the words are waited for, however slow the machine is
    if rank == harm.rank:
        plugin._transports[CPU] = FaultTransport(transport, [harm.fault(folder)])
    elif harm.kind == "stop":
        plugin._transports[CPU] = FaultTransport(transport, [harm.wait_briefly(folder, transport)])
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


def finished_steps(folder: Path, rank: int) -> int:
    """Steps that a rank finished."""
    path = folder / f"steps-{rank}"
    return int(path.read_text()) if path.is_file() else 0
