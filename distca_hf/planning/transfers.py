"""Transfers: which keys and values every server is missing, and who sends them."""

from dataclasses import dataclass

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.planning.plan import Plan
from distca_hf.planning.ranges import Ranges, line_keys
from distca_hf.planning.runs import Runs


@dataclass(frozen=True, eq=False)
class KeyTransfers(Ranges):
    """Keys and values that travel, sorted by (source, destination, document, head, start)."""

    source: IntArray
    destination: IntArray

    def rows_between(self, num_ranks: int) -> IntArray:
        """`[source, destination]` rows of keys and values that travel."""
        rows = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        np.add.at(rows, (self.source, self.destination), self.rows)
        return rows


def key_transfers(plan: Plan) -> KeyTransfers:
    """Keys that every server is missing for its tasks, from the ranks that hold them; each row once per server."""
    tasks, groups = plan.tasks, plan.tasks.head_groups
    reads = plan.reads_others
    server, prefix = tasks.server[reads], tasks.stop[reads]
    line = line_keys(tasks.document[reads], tasks.head[reads], groups)
    order = np.lexsort((prefix, line, server))
    server, line, prefix = server[order], line[order], prefix[order]
    longest = np.ones(len(order), dtype=bool)
    longest[:-1] = (server[1:] != server[:-1]) | (line[1:] != line[:-1])
    server, line, prefix = server[longest], line[longest], prefix[longest]

    # Join each need (server, document, head, prefix) with all pieces of that document and head.
    pieces = plan.pieces
    lines = line_keys(pieces.document, pieces.head, groups)
    first = np.searchsorted(lines, line, side="left")
    last = np.searchsorted(lines, line, side="right")
    need = np.repeat(np.arange(len(line)), last - first)
    piece = Runs.of(first, last - first).numbers
    source, destination = pieces.home[piece], server[need]
    start, stop = pieces.start[piece], np.minimum(pieces.stop[piece], prefix[need])
    travels = np.flatnonzero((source != destination) & (start < stop))
    travels = travels[np.lexsort((start[travels], line[need[travels]], destination[travels], source[travels]))]
    return KeyTransfers(
        source=source[travels],
        destination=destination[travels],
        document=pieces.document[piece[travels]],
        head=pieces.head[piece[travels]],
        start=start[travels],
        stop=stop[travels],
        head_groups=groups,
    )
