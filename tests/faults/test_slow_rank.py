"""A slow rank changes no number; the metrics tell that the others wait, and for whom."""

from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import distca_hf
from distca_hf.testing import Fault, FaultTransport, stall
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
# Each with a stall four times as long: sooner or later it is longer than all that a busy machine does to ranks.
ATTEMPTS = 5


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
    usual_ms = max(log["distca/wait_ms_max"] for log in usual)
    stalled_ms = 1e3 * EXCHANGES * SHORTEST_STALL_SECONDS
    for attempt in range(ATTEMPTS):
        # On a busy machine ranks wait for each other anyway, now more and then less.
        stalled_ms = max(stalled_ms, 5 * usual_ms)
        slow, also = run_ranks(2, _train, tmp_path / f"slow {attempt}", tmp_path, SLOW, stalled_ms / 1e3 / EXCHANGES)
        assert _numbers(slow) == _numbers(usual)
        waits = [log["distca/wait_ms_max"] for log in slow]
        assert waits == [log["distca/wait_ms_max"] for log in also], "all ranks log the same"
        if min(waits) > 0.5 * stalled_ms and {log["distca/slowest_rank"] for log in slow} == {SLOW}:
            return
        stalled_ms *= 4
    raise AssertionError(f"stalled for {stalled_ms / 4:.0f} ms, usual wait {usual_ms:.0f} ms, metrics say {slow}")


def _numbers(logs: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(log["loss"], log["grad_norm"]) for log in logs]
