"""Batches of a training without the product: micro-batches of its loader, held in other ways.

whole      documents stay whole, the heaviest first to the rank with the least attention work so far
divided    documents one after the other, cut when a rank is full: all ranks hold equally many tokens (Ulysses)
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import distca_hf
from distca_hf.arrays import IntArray
from distca_hf.config import KernelName
from distca_hf.data.documents import IGNORED_LABEL, Tokens
from distca_hf.placement.place import fill_in_order
from lib.baselines.operators import Work, whole_call
from lib.planning.planners import whole_documents
from lib.wires import Wires


Batch = dict[str, Any]


class LoaderBatches:
    """The global micro-batches of a loader, made on the way by `batch`, as Trainer takes a loader."""

    batch_size = 1

    def __init__(self, loader: distca_hf.PlacedLoader, device: torch.device) -> None:
        self.loader, self.device, self.dataset = loader, device, loader.dataset
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for micro_batch in range(len(self.loader)):
            yield self.batch(self.loader.documents(0, micro_batch))

    def batch(self, documents: Sequence[Tokens]) -> Batch:
        """Returns this rank's part of a micro-batch: `[1, rows]` of `input_ids`, `position_ids`, `labels` and
        `shift_labels`, and what attention has to know."""
        raise NotImplementedError

    def _rows(self, segments: Sequence[tuple[Tokens, int, int]]) -> Batch:
        """Returns the columns of some segments, `[1, rows]`."""
        columns: dict[str, list[IntArray]] = {
            "input_ids": [document.input_ids[start:stop] for document, start, stop in segments],
            "position_ids": [np.arange(start, stop) for _, start, stop in segments],
            "labels": [document.labels[start:stop] for document, start, stop in segments],
            "shift_labels": [document.shift_labels[start:stop] for document, start, stop in segments],
        }
        return {name: torch.from_numpy(np.concatenate(rows))[None].to(self.device) for name, rows in columns.items()}


class WholeDocuments(LoaderBatches):
    """Batches of whole documents, with what flash-attention has to know of them."""

    def batch(self, documents: Sequence[Tokens]) -> Batch:
        """Returns this rank's documents, with their offsets."""
        lengths = np.array([len(document.input_ids) for document in documents])
        mine = whole_documents(lengths, self.num_ranks)[self.rank]
        held = lengths[mine].tolist()
        offsets = torch.tensor([0, *accumulate(held)], dtype=torch.int32, device=self.device)
        return {
            **self._rows([(documents[number], 0, int(lengths[number])) for number in mine]),
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "max_length_q": max(held),
            "max_length_k": max(held),
        }


class DividedDocuments(LoaderBatches):
    """Batches of equally many tokens for every rank; a document of padding fills room that is left."""

    def __init__(
        self, loader: distca_hf.PlacedLoader, device: torch.device, tokens_per_rank: int, kernel: KernelName
    ) -> None:
        super().__init__(loader, device)
        self._tokens_per_rank, self._kernel = tokens_per_rank, kernel
        self._wires = Wires(distca_hf.DistCAPlugin().transport(device), device)

    def batch(self, documents: Sequence[Tokens]) -> Batch:
        """Returns this rank's tokens, with the work of attention."""
        room = self._tokens_per_rank * self.num_ranks - sum(len(document.input_ids) for document in documents)
        if room:
            documents = [*documents, _padding(room)]
        lengths = [len(document.input_ids) for document in documents]
        held = fill_in_order(lengths, self.num_ranks).held_by(self.rank)
        call = whole_call(lengths, self.device)
        rows = self._rows([(documents[number], start, stop) for number, start, stop in held])
        self._work = Work([call], self._wires, self._kernel)  # operators find it only as long as somebody holds it
        return {**rows, "bench_work": self._work}


def _padding(tokens: int) -> Tokens:
    labels = np.full(tokens, IGNORED_LABEL)
    return Tokens(np.zeros(tokens, dtype=np.int64), labels, labels)
