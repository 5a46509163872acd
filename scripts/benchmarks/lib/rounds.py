"""Rounds of a benchmark step: every mode in turn, again and again, each step timed by itself."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from lib.place import Mode, Place
from lib.report import Measured
from lib.wires import largest, synchronize


class Runner:
    """Runs steps of one model; all ranks run the same ones in the same order."""

    def __init__(self, place: Place) -> None:
        self._model, self._wires, self._device = place.model, place.wires, place.device

    def run(self, modes: Sequence[Mode], warmup: int, rounds: int) -> dict[str, Measured]:
        """Times every mode in every round after the warmup. A collective call; returns the figures of every mode by
        its name, over all ranks."""
        tallies = {mode.name: Measured() for mode in modes}
        for _ in range(warmup + rounds):
            for mode in modes:
                with self.ready(mode) as step:
                    self._run(step, tallies[mode.name])
        return {name: self._over_ranks(tally, warmup) for name, tally in tallies.items()}

    @contextmanager
    def ready(self, mode: Mode) -> Iterator[Callable[[], torch.Tensor]]:
        """Yields a step of this mode, to be called often. Around it, which is not part of a step, the model is made to
        attend in this way, and gradients and parts that only this mode needs are let go."""
        self._set_attention(mode.implementation)
        with mode.running():
            yield partial(self.step, mode)
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

    def _run(self, step: Callable[[], torch.Tensor], tally: Measured) -> None:
        self._wires.reset()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        gc.collect()  # or a rank may do so in the midst of a step
        dist.barrier()
        synchronize(self._device)
        began = time.perf_counter()
        loss = step()
        synchronize(self._device)
        tally.seconds.append(time.perf_counter() - began)
        tally.loss = loss.item()
        tally.exchanged_bytes = self._wires.exchanged_bytes
        if self._device.type == "cuda":
            tally.peak_bytes = max(tally.peak_bytes, torch.cuda.max_memory_allocated(self._device))

    def _over_ranks(self, tally: Measured, warmup: int) -> Measured:
        """Returns the slowest rank of each round, the largest one, and the mean loss."""
        numbers = [*tally.seconds[warmup:], tally.exchanged_bytes, tally.peak_bytes]
        *seconds, exchanged_bytes, peak_bytes = largest(numbers, self._device)
        loss = torch.tensor(tally.loss / dist.get_world_size(), dtype=torch.float64, device=self._device)
        dist.all_reduce(loss)
        return Measured(seconds, int(exchanged_bytes), int(peak_bytes), loss.item())
