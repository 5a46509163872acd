"""A slow rank changes no number; the metrics tell that the others wait, and for whom."""

from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import distca_hf
from distca_hf.testing.faults import Fault, FaultTransport, stall
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks
from support.training import quiet_arguments


CPU = torch.device("cpu")
SLOW = 1
SHORTEST_STALL_SECONDS = 0.05
STEPS = 4
NUM_LAYERS = 2
# Keys forward, their gradients backward.
EXCHANGES = NUM_LAYERS * 2


def _train(folder: Path, slow: int | None, stall_seconds: float = 0.0) -> list[dict[str, float]]:
    """Logs of a training in which one rank is late for every exchange."""
    args = TrainingArguments(
        **quiet_arguments(
            folder,
            max_steps=STEPS,
            use_cpu=True,
        )
    )
    dataset = random_dataset(lengths=(150, 30))
    trainer = Trainer(model=tiny_model(num_hidden_layers=NUM_LAYERS), args=args, train_dataset=dataset)
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96, metrics="all")
    transport = plugin.transport(CPU)
    if transport.rank == slow:
        faults = [Fault(at, stall(stall_seconds)) for at in range(STEPS * EXCHANGES)]
        plugin._transports[CPU] = FaultTransport(transport, faults)
    plugin.attach(trainer)
    trainer.train()
    assert transport.traffic.exchanges == STEPS * EXCHANGES
    return [log for log in trainer.state.log_history if "loss" in log]


def test_losses_are_bit_equal_and_the_wait_is_in_the_metrics(tmp_path: Path) -> None:
    usual, _ = run_ranks(2, _train, tmp_path / "usual", tmp_path, None)
    # On a busy machine ranks wait for each other anyway.
    stalled_ms = max(1e3 * EXCHANGES * SHORTEST_STALL_SECONDS, 5 * max(log["distca/wait_ms_max"] for log in usual))
    slow, also = run_ranks(2, _train, tmp_path / "slow", tmp_path, SLOW, stalled_ms / 1e3 / EXCHANGES)

    for name in ("loss", "grad_norm"):
        assert [log[name] for log in slow] == [log[name] for log in usual]
    for before, after, told in zip(usual, slow, also, strict=True):
        assert after["distca/wait_ms_max"] > 0.5 * stalled_ms > before["distca/wait_ms_max"]
        assert after["distca/slowest_rank"] == SLOW
        assert after["distca/wait_ms_max"] == told["distca/wait_ms_max"], "all ranks log the same"
