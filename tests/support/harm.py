"""A small training run in which one rank comes to harm."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distca_hf
from distca_hf.testing.faults import Fault, FaultTransport, fail
from support.data import random_dataset
from support.models import tiny_model


NUM_LAYERS = 2
# Exchanges of one micro-batch when received keys are fetched again: one per layer forward, two backward.
EXCHANGES_PER_STEP = 3 * NUM_LAYERS
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Harm:
    """What happens to which rank, and at which exchange.

    Attributes:
        kind: "raise", "kill" or "stop".
    """

    rank: int
    exchange: int
    kind: str

    def fault(self) -> Fault:
        actions = {
            "raise": fail(ValueError("this batch is bad")),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        }
        return Fault(self.exchange, actions[self.kind])


def exchange_of(step: int, layer: int, phase: str) -> int:
    """Number of the (first) exchange of a layer in a step."""
    forward = step * EXCHANGES_PER_STEP
    return forward + layer if phase == "forward" else forward + NUM_LAYERS + 2 * (NUM_LAYERS - 1 - layer)


def train_until_harm(harm: Harm, folder: Path, timeout_seconds: float = 20.0) -> None:
    """Trains with DDP and writes down every finished step and the time of the harm."""
    rank = torch.distributed.get_rank()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96, exchange_timeout_seconds=timeout_seconds)
    if rank == harm.rank:
        fault = harm.fault()

        def act() -> None:
            (folder / "harmed").write_text(repr(time.time()))
            fault.action()

        plugin._transports[CPU] = FaultTransport(plugin.transport(CPU), [Fault(fault.at, act)])
    loader = plugin.dataloader(random_dataset(lengths=(150, 30)), seed=0)
    model = tiny_model(num_hidden_layers=NUM_LAYERS)
    distca_hf.enable(model, plugin)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(loader):
        wrapped(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (folder / f"steps-{rank}").write_text(str(step + 1))


def seconds_since_harm(folder: Path, ended: float) -> float:
    """From the harm to the given wall-clock time."""
    return ended - float((folder / "harmed").read_text())


def finished_steps(folder: Path, rank: int) -> int:
    """Steps that a rank finished."""
    path = folder / f"steps-{rank}"
    return int(path.read_text()) if path.is_file() else 0


def dataset_of_other_lengths(rank: int) -> Any:
    """The dataset of one rank is not that of the others."""
    return random_dataset(seed=1 if rank == 1 else 0)
