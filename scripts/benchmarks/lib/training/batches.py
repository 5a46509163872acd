"""Batches of a training without the product: micro-batches of its loader, held in other ways.

whole      documents stay whole, the heaviest first to the rank with the least attention work so far
divided    documents one after the other, cut when a rank is full: all ranks hold equally many tokens (Ulysses)
"""

from collections.abc import Callable, Iterator, Sequence
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


# Makes this rank's part of a micro-batch: `[1, rows]` of `input_ids`, `position_ids`, `labels` and `shift_labels`, and
# what attention has to know.
Pack = Callable[[Sequence[Tokens]], Batch]


class LoaderBatches:
    """The global micro-batches of a loader, packed on the way, as Trainer takes a loader."""

    batch_size = 1

    def __init__(self, loader: distca_hf.PlacedLoader, pack: Pack) -> None:
        self.loader, self.dataset, self._pack = loader, loader.dataset, pack

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for micro_batch in range(len(self.loader)):
            yield self._pack(self.loader.documents(0, micro_batch))


def _rows(segments: Sequence[tuple[Tokens, int, int]], device: torch.device) -> Batch:
    """Returns the columns of some segments, `[1, rows]`."""
    columns: dict[str, list[IntArray]] = {
        "input_ids": [document.input_ids[start:stop] for document, start, stop in segments],
        "position_ids": [np.arange(start, stop) for _, start, stop in segments],
        "labels": [document.labels[start:stop] for document, start, stop in segments],
        "shift_labels": [document.shift_labels[start:stop] for document, start, stop in segments],
    }
    return {name: torch.from_numpy(np.concatenate(rows))[None].to(device) for name, rows in columns.items()}


def whole(documents: Sequence[Tokens], device: torch.device) -> Batch:
    """Packs this rank's documents, with their offsets for flash-attention."""
    lengths = np.array([len(document.input_ids) for document in documents])
    mine = whole_documents(lengths, dist.get_world_size())[dist.get_rank()]
    spans = whole_call(lengths[mine].tolist(), device).spans
    return {
        **_rows([(documents[number], 0, int(lengths[number])) for number in mine], device),
        "cu_seq_lens_q": spans.cu_seqlens_q,
        "cu_seq_lens_k": spans.cu_seqlens_k,
        "max_length_q": spans.max_seqlen_q,
        "max_length_k": spans.max_seqlen_k,
    }


class Divided:
    """Packs equally many tokens for every rank; a document of padding fills room that is left."""

    def __init__(self, device: torch.device, tokens_per_rank: int, kernel: KernelName) -> None:
        self._device, self._tokens_per_rank, self._kernel = device, tokens_per_rank, kernel
        self._wires = Wires(distca_hf.DistCAPlugin().transport(device), device)

    def __call__(self, documents: Sequence[Tokens]) -> Batch:
        """Returns this rank's tokens, with the work of attention."""
        num_ranks = self._wires.world_size
        room = self._tokens_per_rank * num_ranks - sum(len(document.input_ids) for document in documents)
        if room:
            labels = np.full(room, IGNORED_LABEL)
            documents = [*documents, Tokens(np.zeros(room, dtype=np.int64), labels, labels)]
        lengths = [len(document.input_ids) for document in documents]
        held = fill_in_order(lengths, num_ranks).held_by(self._wires.rank)
        rows = _rows([(documents[number], start, stop) for number, start, stop in held], self._device)
        # Operators find the work only as long as somebody holds it.
        self._work = Work([whole_call(lengths, self._device)], self._wires, self._kernel)
        return {**rows, "bench_work": self._work}
