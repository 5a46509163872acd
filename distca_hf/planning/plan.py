"""Plan: all tasks of one layout. Immutable integers with a fingerprint; every rank derives the same one."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.cost import CAUSAL_MASK, imbalance
from distca_hf.layout import Layout
from distca_hf.planning.pieces import Pieces
from distca_hf.planning.tasks import Tasks


# Version of the routing, a part of every fingerprint: versions that route the same tasks differently must not agree.
PLAN_VERSION = 4


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout and the tasks computed for it."""

    layout: Layout
    tasks: Tasks

    def validate(self) -> None:
        """Checks layout and tasks.

        Raises:
            PackingError: the layout does not cover its documents.
            PlanError: the tasks do not cover them.
        """
        self.layout.validate()
        self.tasks.validate(self.layout)

    @cached_property
    def work(self) -> IntArray:
        """`[ranks]` attended pairs x groups of heads computed by each rank."""
        return self.tasks.work_of(self.layout.num_ranks)

    @property
    def imbalance(self) -> float:
        """Max over mean of `work`."""
        return imbalance(self.work)

    @cached_property
    def pieces(self) -> Pieces:
        """Layout and tasks cut at each other's borders."""
        return Pieces.cut(self.layout, self.tasks)

    @cached_property
    def moves_queries(self) -> bool:
        """Whether any query is computed on another rank than its owner."""
        return bool(self.pieces.moved.any())

    @cached_property
    def has_remote_queries(self) -> np.ndarray:
        """`[tasks]` whether queries of a task come from another rank."""
        moved = np.zeros(len(self.tasks), dtype=bool)
        moved[self.pieces.task[self.pieces.moved]] = True
        return moved

    @cached_property
    def reads_others(self) -> np.ndarray:
        """`[tasks]` whether a task may need keys that its server does not hold."""
        return self.has_remote_queries | (self.tasks.first_key < self.tasks.start)

    @cached_property
    def fingerprint(self) -> int:
        """Digest of 63 bits. It is equal on two ranks only if layout, tasks and mask are."""
        digest = hashlib.blake2b(PLAN_VERSION.to_bytes(8, "little"), digest_size=8)
        layout, tasks = self.layout, self.tasks
        for array in (
            layout.document_tokens,
            layout.segment_document,
            layout.segment_start,
            layout.segment_stop,
            layout.rank_segments,
            layout.rank_rows,
            tasks.document,
            tasks.start,
            tasks.stop,
            tasks.server,
            tasks.head,
            np.array([tasks.head_groups]),
        ):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        if tasks.mask != CAUSAL_MASK:
            digest.update(repr(tasks.mask).encode())
        return int.from_bytes(digest.digest(), "big") >> 1
