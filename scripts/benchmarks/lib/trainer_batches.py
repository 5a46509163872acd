"""Batches of a benchmark step: as Trainer has them, and rows of layers with a state."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import nn

from distca_hf.batches.read_documents import DocumentReader, Reading, mark
from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.layout import Layout
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import plan_in_place
from distca_hf.runtime.carried_states import CarriedRows
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan
from lib.documents import Segment


Batch = dict[str, Any]


class Batches(Protocol):
    """Keywords of the model for each micro-step, anew for every step."""

    def __len__(self) -> int:
        """Returns the number of micro-steps."""
        ...

    def __iter__(self) -> Iterator[Batch]: ...


def _each_tensor(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Batch:
    return {name: function(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


class AsOfTrainer:
    """Batches of steps as Trainer has them: their documents are read on the host, and its loader holds one batch
    more, which ranks plan ahead.

    The model is enabled before the first step. All steps have equally many batches; after the last one the first
    follows. Documents may share prefixes if the settings say so and `shares`.
    """

    def __init__(self, model: nn.Module, steps: Sequence[Sequence[Batch]], shares: bool = True) -> None:
        self._model, self._shares, self._len = model, shares, len(steps[0])
        on_host = [[_each_tensor(torch.Tensor.cpu, batch) for batch in step] for step in steps]
        self._following = cycle([[*zip(*both, strict=True)] for both in zip(steps, on_host, strict=True)])
        self._held: list[tuple[Batch, Reading]] = []

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Batch]:
        watch = watch_of(self._model)
        assert watch is not None
        reader = watch.reader if self._shares else replace(watch.reader, shared_tokens=0)
        step = self._held or self._next_step(reader)
        self._held = self._next_step(reader)
        following = [reading for _, reading in [*step[1:], self._held[0]]]
        watch.begin_step(following, len(step), step[0][0]["input_ids"].device)
        for batch, _ in step:
            yield batch

    def _next_step(self, reader: DocumentReader) -> list[tuple[Batch, Reading]]:
        step = []
        for batch, on_host in next(self._following):
            copied, reading = _each_tensor(torch.Tensor.clone, batch), Reading(reader, on_host)
            mark(copied, reading)
            step.append((copied, reading))
        return step


def rows_on_one_device(segments: Sequence[Segment], halo_tokens: int, device: torch.device) -> CarriedRows:
    """Returns the rows of the only rank: segments of all tokens of all documents, in row order. Mixers see
    `halo_tokens` before a token."""
    tokens = [0] * (1 + max(document for document, _, _ in segments))
    for document, _, stop in segments:
        tokens[document] = max(tokens[document], stop)
    plan = plan_in_place(Layout.from_segments(tokens, [segments]))
    kinds = PinnedKinds.prepare(RoutedKinds.of(plan, 0), device.type == "cuda", halo_tokens)
    return CarriedRows(LivePlan(0, kinds.planned(device, plan.fingerprint), LocalTransport(), DistCAConfig()))
