"""Steps: the micro-batches of an epoch, their documents regrouped within every optimizer step (see `windows`)."""

from typing import Protocol

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.packing.epochs import Epoch
from distca_hf.packing.windows import group_documents
from distca_hf.topology import Topology


class MicroBatches(Protocol):
    """Documents of every micro-batch of an epoch, or of what is left of one."""

    @property
    def num_micro_batches(self) -> int: ...

    def micro_batch(self, index: int) -> IntArray:
        """Documents of one micro-batch."""
        ...


class RegroupedEpoch:
    """An epoch whose long documents train together, as far as optimizer steps allow.

    Every `micro_steps` micro-batches are a window; those at the ends of the epoch may be shorter. A window holds the
    same documents as before.

    Args:
        epoch: micro-batches as they were packed.
        document_tokens: `[documents]` lengths of all documents.
        micro_steps: micro-batches of an optimizer step.
        capacity_tokens: most tokens of a micro-batch.
        topology, head_groups: as for `placement.place`.
        windows_from: a micro-batch that some window begins with.
    """

    def __init__(
        self,
        epoch: Epoch,
        document_tokens: IntArray,
        micro_steps: int,
        capacity_tokens: int,
        topology: Topology,
        head_groups: int = 1,
        windows_from: int = 0,
    ) -> None:
        self._epoch, self._document_tokens = epoch, document_tokens
        self._micro_steps, self._capacity_tokens = micro_steps, capacity_tokens
        self._topology, self._head_groups, self._windows_from = topology, head_groups, windows_from
        self._regrouped: tuple[int, list[IntArray]] = (-1, [])

    @property
    def num_micro_batches(self) -> int:
        return self._epoch.num_micro_batches

    def micro_batch(self, index: int) -> IntArray:
        """Documents of one micro-batch; those of its window are regrouped once."""
        first = max(0, index - (index - self._windows_from) % self._micro_steps)
        if self._regrouped[0] != first:
            self._regrouped = (first, self._regroup(first))
        return self._regrouped[1][index - first]

    def _regroup(self, first: int) -> list[IntArray]:
        last = first + self._micro_steps - (first - self._windows_from) % self._micro_steps
        offsets = self._epoch.offsets[first : last + 1]
        documents = self._epoch.documents[offsets[0] : offsets[-1]]
        if len(offsets) == 2:
            return [documents]
        as_packed = np.split(np.arange(len(documents)), offsets[1:-1] - offsets[0])
        tokens = self._document_tokens[documents]
        groups = group_documents(
            tokens, len(as_packed), self._capacity_tokens, self._topology, self._head_groups, as_packed
        )
        return [documents[group] for group in groups]
