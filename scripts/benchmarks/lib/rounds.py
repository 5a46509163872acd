"""Rounds of a benchmark step: every mode in turn, again and again, each step timed by itself."""

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lib.model import LossModel
from lib.modes import Mode
from lib.rates import largest, synchronize
from lib.report import Measured
from lib.wires import Wires


# Losses of all modes are of the same tokens: how far they may differ, as a part of the first one.
LARGEST_LOSS_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3}


class Runner:
    """Runs steps of one model; all ranks run the same ones in the same order."""

    def __init__(self, model: LossModel, wires: Wires, device: torch.device) -> None:
        self._model, self._wires, self._device = model, wires, device

    def run(self, modes: Sequence[Mode], warmup: int, rounds: int, exposed: bool) -> dict[str, Measured]:
        """Times every mode in every round after the warmup, and modes that exchange anything also on silent
        wires if `exposed`. A collective call; returns the figures of every mode by its name, over all ranks."""
        tallies = {mode.name: Measured() for mode in modes}
        for _ in range(warmup + rounds):
            for mode in modes:
                with self.ready(mode) as step:
                    self._run(step, tallies[mode.name], exposed and mode.exchanges)
        return {name: self._over_ranks(tally, warmup) for name, tally in tallies.items()}

    @contextmanager
    def ready(self, mode: Mode) -> Iterator[Callable[[], torch.Tensor]]:
        """Yields a step of this mode, to be called often. Around it, which is not part of a step, the model is made to
        attend in this way, and gradients and parts that only this mode needs are let go."""
        self._set_attention(mode.implementation)
        with mode.running():
            yield functools.partial(self.step, mode)
            self._model.zero_grad(set_to_none=True)

    def _set_attention(self, implementation: str) -> None:
        self._model.causal_lm.set_attn_implementation(implementation)

    def step(self, mode: Mode) -> torch.Tensor:
        """Runs forward and backward of all micro-steps; returns the loss of this rank's tokens, a scalar."""
        call = self._model if mode.watched else self._model.forward
        losses = []
        for batch in mode.batches:
            loss = call(**batch) / len(mode.batches)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _run(self, step: Callable[[], torch.Tensor], tally: Measured, silent_too: bool) -> None:
        self._wires.reset()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        seconds, loss = self._timed(step)
        tally.loss = loss.item()
        tally.seconds.append(seconds)
        tally.exchanged_bytes = max(self._wires.sent_bytes, self._wires.received_bytes)
        if self._device.type == "cuda":
            tally.peak_bytes = max(tally.peak_bytes, torch.cuda.max_memory_allocated(self._device))
        if silent_too:
            self._model.zero_grad(set_to_none=True)
            self._wires.silence(True)
            tally.silent_seconds.append(self._timed(step)[0])
            self._wires.silence(False)

    def _timed(self, step: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
        gc.collect()  # or a rank may do so in the midst of a step
        dist.barrier()
        synchronize(self._device)
        began = time.perf_counter()
        loss = step()
        synchronize(self._device)
        return time.perf_counter() - began, loss

    def _over_ranks(self, tally: Measured, warmup: int) -> Measured:
        """Returns the slowest rank of each round, the largest one, and the mean loss."""
        seconds, silent = tally.seconds[warmup:], tally.silent_seconds[warmup:]
        numbers = largest([*seconds, *silent, tally.exchanged_bytes, tally.peak_bytes], self._device)
        *times, exchanged_bytes, peak_bytes = numbers
        loss = torch.tensor(tally.loss / dist.get_world_size(), dtype=torch.float64, device=self._device)
        dist.all_reduce(loss)
        return Measured(
            times[: len(seconds)], times[len(seconds) :], int(exchanged_bytes), int(peak_bytes), loss.item()
        )


def equal_losses(losses: Sequence[float], dtype: torch.dtype) -> bool:
    """Returns whether these may be losses of the same tokens, computed in a dtype."""
    return all(abs(loss - losses[0]) <= LARGEST_LOSS_DIFFERENCE[dtype] * abs(losses[0]) for loss in losses)
