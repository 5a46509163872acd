"""Pieces: segments and tasks cut at each other's borders, so that every piece has one home and one server."""

from dataclasses import dataclass

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.layout import Layout
from distca_hf.planning.task import Tasks


POSITION_BITS = 31  # documents are shorter than 2 ** 31 tokens


@dataclass(frozen=True, eq=False)
class Pieces:
    """Seven int64 arrays of one length, sorted by (document, start); together they cover every document once.

    Attributes:
        document, start, stop: the tokens.
        home, row: rank that holds them, and the layout row of the first one there.
        task, server: index of the task they are queries of, and the rank that computes it.
    """

    document: IntArray
    start: IntArray
    stop: IntArray
    home: IntArray
    row: IntArray
    task: IntArray
    server: IntArray

    @classmethod
    def cut(cls, layout: Layout, tasks: Tasks) -> "Pieces":
        """Cuts a layout and the tasks that cover it at each other's borders."""
        segment_keys = position_keys(layout.segment_document, layout.segment_start)
        task_keys = position_keys(tasks.document, tasks.start)
        segments, by_task = np.argsort(segment_keys), np.argsort(task_keys)
        cuts = np.union1d(segment_keys, task_keys)
        document, start = cuts >> POSITION_BITS, cuts & ((1 << POSITION_BITS) - 1)
        stop = layout.document_tokens[document]
        goes_on = np.flatnonzero(document[1:] == document[:-1])
        stop[goes_on] = start[goes_on + 1]
        segment = segments[np.searchsorted(segment_keys[segments], cuts, side="right") - 1]
        task = by_task[np.searchsorted(task_keys[by_task], cuts, side="right") - 1]
        return cls(
            document=document,
            start=start,
            stop=stop,
            home=layout.segment_rank[segment],
            row=layout.segment_row[segment] + start - layout.segment_start[segment],
            task=task,
            server=tasks.server[task],
        )

    @property
    def tokens(self) -> IntArray:
        return self.stop - self.start

    @property
    def moved(self) -> np.ndarray:
        """Whether queries are computed elsewhere than they are held."""
        return self.home != self.server

    def select(self, chosen: np.ndarray) -> "Pieces":
        """The chosen pieces (a mask or indices), in the order given."""
        return Pieces(
            self.document[chosen],
            self.start[chosen],
            self.stop[chosen],
            self.home[chosen],
            self.row[chosen],
            self.task[chosen],
            self.server[chosen],
        )


def position_keys(documents: IntArray, tokens: IntArray) -> IntArray:
    """One sortable integer for each (document, position)."""
    return (documents << POSITION_BITS) + tokens
