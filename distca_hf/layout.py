"""Layout: the tokens of one global micro-batch that each rank holds; and topology: which ranks share a node and its
fast network. Placement makes layouts, planning reads them.

    documents   d0: 0 1 2 3 4 5 6 7      d1: 0 1 2      d2: 0

    rank 0 rows | d1[0:3] | d0[0:2] | padding      segment = (document, start, stop), held as consecutive rows
    rank 1 rows | d2[0:1] | d0[2:8]                a document may span ranks; its segments cover it exactly once

Rows of a rank are its segments in order, then padding rows. Padding belongs to no document: nothing attends to it.

If documents share a prefix, one of them holds it, and segments of the others begin after it (`prefixes`).

A *stripe* marks a long part of a document whose tokens are on consecutive ranks of one node. These ranks divide its
heads instead of its queries. Placement sets the mark, planning divides the heads.

    ranks         0  1  2  3 | 4  5        ranks that train in the order of their nodes, then ranks without tokens,
    node_of       0  0  1  1 | 1  2        which may be on any node, or on separate nodes
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from distca_hf.arrays import (
    BoolArray,
    IntArray,
    as_int_array,
    ceil_div,
    chained,
    first_gap,
    first_outside,
    offsets,
    run_starts,
    run_stops,
)
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.errors import ConfigError, PackingError, and_more
from distca_hf.prefixes import SharedPrefixes


# Longest document, in tokens: positions are 31 bits of a sort key (`planning.pieces`).
MAX_DOCUMENT_TOKENS = 2**31 - 1
# Cuts of documents fall on multiples of this if possible: attention kernels work in tiles of 128 tokens.
TILE_TOKENS = 128


def check_document_tokens(values: ArrayLike, name: str = "document lengths") -> IntArray:
    """Converts lengths to int64 and checks that each is at least 1 and below 2 ** 31. Raises PackingError, which names
    the first document out of range."""
    lengths = as_int_array(values, name)
    bad = np.flatnonzero((lengths < 1) | (lengths > MAX_DOCUMENT_TOKENS))
    if len(bad):
        raise PackingError(
            f"{name}: document {bad[0]} has {lengths[bad[0]]} tokens{and_more(len(bad) - 1)}; a document "
            f"has 1 to {MAX_DOCUMENT_TOKENS} tokens. Remove empty documents first, for example with dataset.filter."
        )
    return lengths


@dataclass(frozen=True)
class Topology:
    """Ranks in the order of their nodes; the last node may have fewer ranks. Ranks without tokens come last, on any
    nodes. Raises ConfigError if a number is below 1, or a node below 0."""

    num_ranks: int
    ranks_per_node: int  # ranks with tokens that share a node
    # Node of each rank without tokens; nodes that have only these are numbered after all others.
    extra_nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_ranks", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self._num_trainers < 1:
            raise ConfigError(f"{len(self.extra_nodes)} of num_ranks={self.num_ranks} hold no tokens; one must train")
        if min(self.extra_nodes, default=0) < 0:
            raise ConfigError(f"extra_nodes={self.extra_nodes}: a node is numbered from 0 on")

    def with_extra_ranks(self, nodes: Sequence[int]) -> "Topology":
        """Returns the topology with one more rank without tokens on each of these nodes, after all other ranks."""
        return replace(self, num_ranks=self.num_ranks + len(nodes), extra_nodes=(*self.extra_nodes, *nodes))

    @property
    def _num_trainers(self) -> int:
        return self.num_ranks - len(self.extra_nodes)

    @property
    def num_nodes(self) -> int:
        return max(ceil_div(self._num_trainers, self.ranks_per_node), 1 + max(self.extra_nodes, default=0))

    @cached_property
    def node_of(self) -> IntArray:
        """`[ranks]` node of each rank."""
        of_trainers = np.arange(self._num_trainers) // self.ranks_per_node
        return np.concatenate([of_trainers, np.array(self.extra_nodes, dtype=np.int64)])

    def ranks_of(self, node: int) -> range:
        """Returns the ranks of a node that hold tokens and train."""
        return range(node * self.ranks_per_node, min(self._num_trainers, (node + 1) * self.ranks_per_node))


def join_neighbours(
    document: IntArray, start: IntArray, stop: IntArray, rank: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Sorts ranges by (rank, document, start), and joins ranges that follow each other on one rank."""
    order = np.lexsort((start, document, rank))
    document, start, stop, rank = document[order], start[order], stop[order], rank[order]
    opens = run_starts(document, rank, chained(start, stop - start))
    return document[opens], start[opens], stop[run_stops(opens)], rank[opens]


@dataclass(frozen=True)
class Stripe:
    """Tokens [start, stop) of a document, held only by ranks [first_rank, stop_rank)."""

    document: int
    start: int
    stop: int
    first_rank: int
    stop_rank: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Segments of all ranks. All arrays are int64 and never change."""

    document_tokens: IntArray  # `[documents]` tokens of each document of the global micro-batch
    # `[segments]` ranges of tokens, grouped by rank, in row order.
    segment_document: IntArray
    segment_start: IntArray
    segment_stop: IntArray
    rank_segments: IntArray  # `[ranks + 1]` rank r has segments `rank_segments[r]` to `rank_segments[r + 1]`
    rank_rows: IntArray  # `[ranks]` rows of each rank, including padding
    stripes: tuple[Stripe, ...] = ()  # parts of documents whose heads are divided
    shared: SharedPrefixes | None = None  # prefixes of documents that others hold; None if there are none

    @classmethod
    def from_segments(
        cls,
        document_tokens: Sequence[int] | IntArray,
        segments: Sequence[Sequence[tuple[int, int, int]]],
        rank_rows: Sequence[int] | None = None,
        stripes: Sequence[Stripe] = (),
    ) -> "Layout":
        """Makes a layout from each rank's list of (document, start, stop); without `rank_rows` nothing is padded.
        Raises PackingError if the segments do not cover every document exactly once, or a stripe is held elsewhere."""
        numbers = [number for rank in segments for segment in rank for number in segment]
        flat = as_int_array(numbers, "segments").reshape(-1, 3)
        counts = np.array([len(rank) for rank in segments], dtype=np.int64)
        tokens = np.array([sum(stop - start for _, start, stop in rank) for rank in segments], dtype=np.int64)
        layout = cls(
            document_tokens=as_int_array(document_tokens, "document_tokens"),
            segment_document=flat[:, 0].copy(),
            segment_start=flat[:, 1].copy(),
            segment_stop=flat[:, 2].copy(),
            rank_segments=offsets(counts),
            rank_rows=tokens if rank_rows is None else as_int_array(rank_rows, "rank_rows"),
            stripes=tuple(stripes),
        )
        layout.validate()
        return layout

    @classmethod
    def from_packs(cls, packs: Sequence[Sequence[int] | IntArray]) -> "Layout":
        """Makes a layout of whole documents from each rank's document lengths, in row order.

        A rank without tokens has one row of padding, because models cannot run without rows.

        Raises:
            PackingError: a length is out of range.
        """
        lengths = [check_document_tokens(pack, f"the pack of rank {rank}") for rank, pack in enumerate(packs)]
        document_tokens = np.concatenate([*lengths, np.zeros(0, dtype=np.int64)])
        return cls(
            document_tokens=document_tokens,
            segment_document=np.arange(len(document_tokens)),
            segment_start=np.zeros(len(document_tokens), dtype=np.int64),
            segment_stop=document_tokens,
            rank_segments=np.cumsum([0, *map(len, lengths)]),
            rank_rows=np.array([max(1, int(pack.sum())) for pack in lengths], dtype=np.int64),
        )

    def sharing(self, shared: SharedPrefixes) -> "Layout":
        """Returns a layout of whole documents without the prefixes that other documents hold."""
        layout = replace(self, segment_start=shared.first_own[self.segment_document], shared=shared)
        return replace(layout, rank_rows=np.maximum(layout.rank_tokens, 1))

    @property
    def num_ranks(self) -> int:
        return len(self.rank_rows)

    @cached_property
    def first_own(self) -> IntArray:
        """`[documents]` first token that each document holds; not 0 if another one holds its prefix."""
        return np.zeros_like(self.document_tokens) if self.shared is None else self.shared.first_own

    @cached_property
    def shared_tokens(self) -> int:
        """Number of tokens of documents that are rows of other documents."""
        return int(self.first_own.sum())

    @property
    def num_documents(self) -> int:
        return len(self.document_tokens)

    @cached_property
    def longest_document_tokens(self) -> int:
        return int(self.document_tokens.max(initial=0))

    @cached_property
    def cut_documents(self) -> int:
        """Number of documents in several segments."""
        return int(np.count_nonzero(np.bincount(self.segment_document, minlength=1) > 1))

    @cached_property
    def segment_tokens(self) -> IntArray:
        return self.segment_stop - self.segment_start

    @cached_property
    def segment_rank(self) -> IntArray:
        """`[segments]` the rank that holds each segment."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.rank_segments))

    @cached_property
    def segment_row(self) -> IntArray:
        """`[segments]` first row of each segment on its rank."""
        first = offsets(self.segment_tokens)
        return first[:-1] - first[self.rank_segments[:-1]][self.segment_rank]

    @cached_property
    def segment_in_stripe(self) -> BoolArray:
        """`[segments]` whether a segment is a part of a stripe."""
        inside = np.zeros(len(self.segment_document), dtype=bool)
        for stripe in self.stripes:
            inside |= (
                (self.segment_document == stripe.document)
                & (self.segment_start >= stripe.start)
                & (self.segment_stop <= stripe.stop)
            )
        return inside

    @cached_property
    def rank_tokens(self) -> IntArray:
        """`[ranks]` tokens that each rank holds, without padding."""
        first = offsets(self.segment_tokens)
        return first[self.rank_segments[1:]] - first[self.rank_segments[:-1]]

    @cached_property
    def rank_work(self) -> IntArray:
        """`[ranks]` attended pairs of the rows that each rank holds, under the causal mask."""
        return self._count_rank_work(CAUSAL_MASK)

    def rank_work_of(self, mask: Mask) -> IntArray:
        """Returns `[ranks]` attended pairs of the rows that each rank holds."""
        return self.rank_work if mask == CAUSAL_MASK else self._count_rank_work(mask)

    def _count_rank_work(self, mask: Mask) -> IntArray:
        pairs = offsets(mask.pairs_of(self.segment_start, self.segment_stop))
        return pairs[self.rank_segments[1:]] - pairs[self.rank_segments[:-1]]

    def padded(self, multiple: int, most_rows: int) -> "Layout":
        """Pads every rank to the same number of rows: a multiple of `multiple`, but at most `most_rows`."""
        fullest = int(self.rank_tokens.max(initial=0))
        rows = max(min(ceil_div(fullest, multiple) * multiple, most_rows), fullest, 1)
        return replace(self, rank_rows=np.full(self.num_ranks, rows, dtype=np.int64))

    def with_extra_ranks(self, count: int) -> "Layout":
        """Returns the same layout followed by this many ranks without segments and rows.

        Stripes stay: their ranks keep their numbers.
        """
        nothing = np.zeros(count, dtype=np.int64)
        return replace(
            self,
            rank_segments=np.concatenate([self.rank_segments, nothing + self.rank_segments[-1]]),
            rank_rows=np.concatenate([self.rank_rows, nothing]),
        )

    def segments_of(self, rank: int) -> slice:
        """Returns the slice of the segment arrays that `rank` holds."""
        return slice(int(self.rank_segments[rank]), int(self.rank_segments[rank + 1]))

    def held_by(self, rank: int) -> list[tuple[int, int, int]]:
        """Lists (document, start, stop) of the segments that `rank` holds, in row order."""
        held = self.segments_of(rank)
        columns = (self.segment_document, self.segment_start, self.segment_stop)
        return list(zip(*(column[held].tolist() for column in columns), strict=True))

    def validate(self) -> None:
        """Checks that every document is covered exactly once and every rank has room for its segments. Raises
        PackingError, which names the first document or rank that is wrong."""
        # 1. Every rank has a slice of the segments, and every segment a document with positions that fit a sort key.
        borders, num_segments = self.rank_segments, len(self.segment_document)
        if (
            len(borders) != self.num_ranks + 1
            or borders[0] != 0
            or borders[-1] != num_segments
            or np.any(np.diff(borders) < 0)
        ):
            raise PackingError(
                f"rank_segments {borders.tolist()} do not divide {num_segments} segments among {self.num_ranks} ranks"
            )
        unknown = first_outside(self.segment_document, self.num_documents)
        if unknown is not None:
            number = self.segment_document[unknown]
            raise PackingError(f"segment {unknown} belongs to document {number}; there are {self.num_documents}")
        too_long = np.flatnonzero(self.document_tokens > MAX_DOCUMENT_TOKENS)
        if len(too_long):
            at = too_long[0]
            raise PackingError(
                f"document {at} has {self.document_tokens[at]} tokens{and_more(len(too_long) - 1)}; a document has at "
                f"most {MAX_DOCUMENT_TOKENS}"
            )

        # 2. Segments of a document follow each other without a gap, and the last ends with it.
        order = np.lexsort((self.segment_start, self.segment_document))
        document, start, stop = self.segment_document[order], self.segment_start[order], self.segment_stop[order]
        own = self.first_own[document]
        gap = first_gap(start - own, stop - own, run_starts(document))
        if gap is not None:
            at, expected = gap[0], gap[1] + own[gap[0]]
            raise PackingError(
                f"document {document[at]}: segment [{start[at]}, {stop[at]}) where [{expected}, ...) is next; "
                "segments must cover a document without gap or overlap"
            )
        covered = np.zeros(self.num_documents, dtype=np.int64)
        np.maximum.at(covered, document, stop)
        short = np.flatnonzero(covered != self.document_tokens)
        if len(short):
            at = short[0]
            raise PackingError(
                f"document {at} has {self.document_tokens[at]} tokens, its segments cover {covered[at]}"
            )

        # 3. Ranks have enough rows, and stripes are on their ranks.
        full = np.flatnonzero(self.rank_rows < self.rank_tokens)
        if len(full):
            at = full[0]
            raise PackingError(f"rank {at} has {self.rank_rows[at]} rows for {self.rank_tokens[at]} tokens")
        for stripe in self.stripes:
            self._check_stripe(stripe)

    def _check_stripe(self, stripe: Stripe) -> None:
        """Checks that only its ranks hold its tokens, in segments that begin and end with it."""
        if not 0 <= stripe.first_rank < stripe.stop_rank <= self.num_ranks:
            raise PackingError(f"{stripe} is on ranks that do not exist; there are {self.num_ranks}")
        if not 0 <= stripe.document < self.num_documents:
            raise PackingError(f"{stripe} is of a document that does not exist; there are {self.num_documents}")
        of_stripe = (
            (self.segment_document == stripe.document)
            & (self.segment_start < stripe.stop)
            & (self.segment_stop > stripe.start)
        )
        rank = self.segment_rank[of_stripe]
        outside = (rank < stripe.first_rank) | (rank >= stripe.stop_rank)
        if outside.any():
            raise PackingError(f"{stripe}: rank {rank[outside][0]} holds tokens of it")
        start, stop = self.segment_start[of_stripe], self.segment_stop[of_stripe]
        if len(start) == 0 or start.min() != stripe.start or stop.max() != stripe.stop:
            raise PackingError(f"{stripe}: its borders are not borders of segments")
