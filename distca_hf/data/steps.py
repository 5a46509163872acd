"""Steps: an epoch whose documents are divided anew within every optimizer step. A step holds the same documents as
before."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.data.epochs import Epoch
from distca_hf.layout import Layout


@dataclass(frozen=True, eq=False)
class MicroStep:
    """Documents of one micro-step.

    Attributes:
        documents: `[documents]` their numbers.
        layout: their placement, with equal work on all ranks; None if no placement was tried.
    """

    documents: IntArray
    layout: Layout | None = None


class SteppedEpoch(ABC):
    """An epoch in optimizer steps, each of which divides its documents among its micro-batches in a way of its own.

    Every `micro_steps` micro-batches are one optimizer step; the first and the last of an epoch may have fewer.

    Args:
        epoch: micro-batches as they were packed.
        document_tokens: `[documents]` lengths of all documents.
        micro_steps: micro-batches of an optimizer step.
        steps_from: a micro-batch that some optimizer step begins with.
    """

    def __init__(self, epoch: Epoch, document_tokens: IntArray, micro_steps: int, steps_from: int = 0) -> None:
        self._epoch, self._document_tokens = epoch, document_tokens
        self._micro_steps, self._steps_from = micro_steps, steps_from
        self._step: tuple[int, list[MicroStep]] = (-1, [])

    @property
    def num_micro_batches(self) -> int:
        return self._epoch.num_micro_batches

    def micro_batch(self, index: int) -> IntArray:
        """Returns the documents of one micro-batch."""
        return self._micro_step(index).documents

    def layout(self, index: int) -> Layout | None:
        """Returns the placement of one micro-batch by which its step was divided; None if no placement was tried."""
        return self._micro_step(index).layout

    @abstractmethod
    def _divide(self, document_tokens: IntArray, as_packed: list[IntArray]) -> list[MicroStep]:
        """Divides the documents of one optimizer step.

        Args:
            document_tokens: `[documents]` lengths.
            as_packed: documents of each micro-batch, as indices.

        Returns:
            As many micro-steps, whose documents are indices, too.
        """

    def _micro_step(self, index: int) -> MicroStep:
        """Returns one micro-batch. Its optimizer step is divided at the first call."""
        first = max(0, index - (index - self._steps_from) % self._micro_steps)
        if self._step[0] != first:
            self._step = (first, self._divided(first))
        return self._step[1][index - first]

    def _divided(self, first: int) -> list[MicroStep]:
        """Returns the micro-batches of the step that begins with this one; documents are numbers of the epoch."""
        last = first + self._micro_steps - (first - self._steps_from) % self._micro_steps
        offsets = self._epoch.offsets[first : last + 1]
        documents = self._epoch.documents[offsets[0] : offsets[-1]]
        as_packed = np.split(np.arange(len(documents)), offsets[1:-1] - offsets[0])
        divided = self._divide(self._document_tokens[documents], as_packed)
        return [MicroStep(documents[one.documents], one.layout) for one in divided]
