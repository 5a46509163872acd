"""Bounds: bytes that every plan, or every layout, as balanced as a given one has to move.

**A fixed layout** (`bytes_bound`): a lower bound of the bytes of all plans. A linear program, for tests and reports.

Every plan gives a feasible point of the program, and the objective at that point is at most the bytes of the plan. So
the optimum is a lower bound. Units are *rows* (one token of one group of heads) and work (pairs x groups). Variables
are, for every holding (see `relaxation`), the work, queries and keys that leave it. For every rank they are the work,
queries and keys that arrive. Constraints:

    local work of a rank - work that leaves + work that arrives <= its limit
    sum over holdings that leaves = sum over ranks that arrives           for work, queries, keys
    work <= slope x queries + keys_worth(slope) x keys                    see `relaxation`
    keys of a segment >= keys that later segments of its document need, if another rank computes these
    bytes that a rank sends <= largest, bytes that it receives <= largest

Either `largest` or the sum of sent bytes is minimised.

**Placed layouts** (`key_tokens_bound`): a lower bound of the keys and values of layouts as balanced as a given one.

Keys are counted for one document at a time. Let b1 = length >= b2 >= b3 ... be the last positions that ranks hold of
it. A rank that holds position b - 1 needs the keys of all b tokens before, of which it has its own. So the ranks
together receive at least b2 + b3 + ... tokens. All tokens after b(j+1) are on j ranks. These hold no more than j
ranks' tokens and compute no more than j ranks' work. The other tokens that they hold have at least the work of the
lightest tokens of the batch:

    work(b .. length) + lightest(j x fewest_tokens - (length - b))  <=  j x most_work
    length - b                                                      <=  j x most_tokens

The smallest b that satisfies both bounds b(j+1) from below. It is valid for all layouts whose ranks compute the
queries they hold, in any number of segments. Layouts that divide heads (stripes) may need less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray
from distca_hf.cost import TokenBytes, causal_pairs_of
from distca_hf.errors import PlanError
from distca_hf.layout import Layout, check_document_tokens
from lib.planning.relaxation import Holdings, LinearProgram, keys_worth, slopes


# Number of lines above each curve; more make the bound tighter and slower.
NUM_SLOPES = 13
# Share of the optimum that is subtracted, so that rounding inside the solver never makes the bound too large.
ROUNDING = 1e-6
# Number of parts of the range in each step of the search for the smallest position; two steps find 1/65,536 of it.
PARTS = 256


@dataclass(frozen=True)
class BytesBound:
    """Lower bounds of the forward bytes of one layer: of the rank that sends or receives most, and of all ranks."""

    largest_rank: int
    total: int


def bytes_bound(
    layout: Layout,
    work_limits: IntArray | NDArray[np.float64],
    head_groups: int = 1,
    token_bytes: TokenBytes | None = None,
) -> BytesBound:
    """Returns lower bounds of the bytes of all plans whose ranks stay within limits of work.

    Args:
        layout: the ranks' tokens.
        work_limits: `[ranks]` most attended pairs x groups of heads that each rank computes.
        head_groups: groups in which plans may divide heads.
        token_bytes: bytes of a token; None: the default of `TokenBytes`.

    Raises:
        PlanError: the limits add up to less than the work of the layout.
        ImportError: scipy is not installed.
    """
    limits = np.asarray(work_limits, dtype=np.float64)
    total_work = int(layout.rank_work.sum()) * head_groups
    if limits.sum() < total_work * (1 - ROUNDING):
        raise PlanError(f"work limits add up to {int(limits.sum())}, but there is work of {total_work}")
    if total_work == 0:
        return BytesBound(0, 0)
    bound = _Bound(layout, limits, head_groups, token_bytes or TokenBytes())
    largest, total = bound.solve()
    return BytesBound(int(largest * (1 - ROUNDING)), int(total * (1 - ROUNDING)))


class _Bound:
    """The linear program of one layout.

    Rows are in units of the longest document, work in units of a rank's mean: solvers are most exact with numbers near
    one.
    """

    def __init__(self, layout: Layout, limits: NDArray[np.float64], head_groups: int, token_bytes: TokenBytes) -> None:
        self.holdings = held = Holdings.of(layout)
        self.ranks = range(layout.num_ranks)
        self.groups = head_groups
        self.longest = layout.longest_document_tokens
        self.row_unit = float(self.longest)
        self.work_unit = float(held.pairs.sum()) * head_groups / layout.num_ranks
        self.limits = limits
        self.most_pairs = float(limits.max())
        query, output, keys = token_bytes.query, token_bytes.output, token_bytes.key_value
        self.byte_unit = max(query, output, keys, 1)
        self.query, self.output, self.keys = (size / self.byte_unit for size in (query, output, keys))

        self.program = program = LinearProgram()
        count, ranks = len(held), layout.num_ranks
        self.work_out = program.variables(count, held.pairs * head_groups / self.work_unit)
        self.queries_out = program.variables(count, held.tokens * head_groups / self.row_unit)
        self.keys_out = program.variables(count)
        if_cut = np.where(held.document < 0, 0, np.inf)
        self.work_to_earlier, self.work_to_later = program.variables(count, if_cut), program.variables(count, if_cut)
        self.work_in, self.queries_in, self.keys_in = (program.variables(ranks) for _ in range(3))
        self.earlier_work, self.earlier_queries, self.earlier_keys = (program.variables(ranks) for _ in range(3))
        self.later_work, self.later_queries = (program.variables(ranks) for _ in range(2))
        self.largest = program.variables(1)[0]
        self.own_keys_in: list[list[int]] = [[] for _ in self.ranks]
        self._holdings_of: list[list[int]] = [[] for _ in self.ranks]
        for holding, rank in enumerate(held.rank.tolist()):
            self._holdings_of[rank].append(holding)

    def solve(self) -> tuple[float, float]:
        """Returns the bytes of the largest rank and of all ranks."""
        self._leave()
        self._span_ranks()
        self._arrive()
        self._balance()
        sent = self._count_bytes()
        scale = self.row_unit * self.byte_unit / self.groups
        largest = self.program.minimise([(self.largest, 1.0)])
        return largest * scale, self.program.minimise(sent) * scale

    def _line(self, slope: float, start: int, stop: int) -> tuple[float, float]:
        """Returns the work that one row of queries and one row of keys allow."""
        unit = self.row_unit / self.work_unit
        return slope * unit, keys_worth(slope, start, stop, self.most_pairs) * unit

    def _leave(self) -> None:
        """Adds constraints: work that leaves a holding needs queries and keys that leave it, too."""
        held = self.holdings
        for holding, (start, stop) in enumerate(zip(held.start.tolist(), held.stop.tolist(), strict=True)):
            for slope in slopes(stop, NUM_SLOPES).tolist():
                query, key = self._line(slope, start, stop)
                self.program.at_most(
                    [(self.work_out[holding], 1), (self.queries_out[holding], -query), (self.keys_out[holding], -key)],
                    0,
                )

    def _span_ranks(self) -> None:
        """Adds constraints for documents that span ranks: their other owner ranks may have keys already.

        *Earlier* owners of a segment hold only tokens before it, and need the keys of the segment itself. *Later*
        owners may need no keys. The keys of a segment are sent to every rank that computes later segments.
        """
        held = self.holdings
        to_earlier: list[list[int]] = [[] for _ in self.ranks]
        to_later: list[list[int]] = [[] for _ in self.ranks]
        for parts in held.of_document.values():
            last_of = {int(held.rank[part]): place for place, part in enumerate(parts)}
            for place, holding in enumerate(parts):
                leaves = [(self.work_to_earlier[holding], 1.0), (self.work_to_later[holding], 1.0)]
                self.program.at_most([*leaves, (self.work_out[holding], -1)], 0)
                for other, last in sorted(last_of.items()):
                    if other != held.rank[holding]:
                        (to_earlier if last < place else to_later)[other].append(holding)
                for part in parts[:place]:
                    self._keys_sent_for(part, holding)
            self._keys_received(parts)
        for rank in self.ranks:
            for work, holdings, source in (
                (self.earlier_work, to_earlier[rank], self.work_to_earlier),
                (self.later_work, to_later[rank], self.work_to_later),
            ):
                sources = [(source[holding], -1.0) for holding in holdings]
                self.program.at_most([(work[rank], 1), *sources], 0)
            self._arrive_at_earlier(rank, to_earlier[rank])

    def _keys_received(self, parts: list[int]) -> None:
        """Adds constraints: a rank that computes local queries receives the keys before them."""
        held, received = self.holdings, dict[int, int]()
        for place, holding in enumerate(parts):
            rank = int(held.rank[holding])
            lacks = sum(int(held.tokens[part]) for part in parts[:place] if held.rank[part] != rank) / self.row_unit
            if lacks == 0:
                continue
            if rank not in received:
                received[rank] = self.program.variables(1)[0]
                self.own_keys_in[rank].append(received[rank])
            share = lacks * self.work_unit / float(held.pairs[holding])
            self.program.at_most([(received[rank], -1), (self.work_out[holding], -share)], -lacks * self.groups)

    def _arrive_at_earlier(self, rank: int, holdings: list[int]) -> None:
        """Adds constraints: work of later segments arrives at an earlier owner with their queries and keys."""
        for slope in slopes(self.longest, NUM_SLOPES).tolist():
            lines = [
                self._line(slope, int(self.holdings.start[holding]), int(self.holdings.stop[holding]))
                for holding in holdings
            ]
            if lines:
                query, key = max(lines)
                terms = [
                    (self.earlier_work[rank], 1),
                    (self.earlier_queries[rank], -query),
                    (self.earlier_keys[rank], -key),
                ]
                self.program.at_most(terms, 0)

    def _keys_sent_for(self, part: int, later: int) -> None:
        """Adds constraints: all keys of a segment are sent to every rank that computes queries of a later segment.

        The owner rank of the later segment is one of these ranks, as far as work of that segment stays.
        """
        held = self.holdings
        tokens, pairs = int(held.tokens[part]) / self.row_unit, float(held.pairs[later])
        stays = 0.0 if held.rank[part] == held.rank[later] else 1.0
        by_owner = stays * tokens * self.work_unit / pairs
        by_others = tokens * self.work_unit / min(pairs, self.most_pairs)
        self.program.at_most(
            [
                (self.keys_out[part], -1),
                (self.work_out[later], by_others - by_owner),
                (self.work_to_earlier[later], -by_others),
                (self.work_to_later[later], -by_others),
            ],
            -stays * tokens * self.groups,
        )

    def _arrive(self) -> None:
        """Adds constraints: work arrives with its queries, and at ranks without the document with all keys before."""
        lines = [self._line(slope, 0, self.longest) for slope in slopes(self.longest, NUM_SLOPES).tolist()]
        most = (self.longest + 0.5) * self.row_unit / self.work_unit
        for rank in self.ranks:
            known = [
                (self.earlier_work[rank], self.earlier_queries[rank]),
                (self.later_work[rank], self.later_queries[rank]),
            ]
            for query, key in lines:
                others = [(self.work_in[rank], 1.0), (self.queries_in[rank], -query), (self.keys_in[rank], -key)]
                for work, queries in known:
                    others += [(work, -1.0), (queries, query)]
                self.program.at_most(others, 0)
            self.program.at_most([(self.later_work[rank], 1), (self.later_queries[rank], -most)], 0)
            for place, whole in ((0, self.work_in[rank]), (1, self.queries_in[rank])):
                self.program.at_most([*((pair[place], 1.0) for pair in known), (whole, -1)], 0)

    def _balance(self) -> None:
        """Adds constraints: ranks stay within their limits, and all that leaves also arrives."""
        held = self.holdings
        own = np.zeros(len(self.ranks))
        np.add.at(own, held.rank, held.pairs.astype(np.float64) * self.groups)
        for rank in self.ranks:
            out = [(self.work_out[holding], -1.0) for holding in self._holdings_of[rank]]
            room = max(self.limits[rank], 0) - own[rank] + ROUNDING * self.work_unit
            self.program.at_most([(self.work_in[rank], 1), *out], room / self.work_unit)
        own_keys = [variable for variables in self.own_keys_in for variable in variables]
        for arrives, leaves in (
            (self.work_in, self.work_out),
            (self.queries_in, self.queries_out),
            (self.earlier_work, self.work_to_earlier),
            (self.later_work, self.work_to_later),
            ([*self.keys_in, *self.earlier_keys, *own_keys], self.keys_out),
        ):
            self.program.equal([(variable, 1.0) for variable in arrives] + [(variable, -1.0) for variable in leaves])

    def _count_bytes(self) -> list[tuple[int, float]]:
        """Adds constraints: no rank sends or receives more than `largest`. Returns the bytes that all ranks send."""
        total = []
        for rank in self.ranks:
            holdings = self._holdings_of[rank]
            sent = [(self.queries_out[holding], self.query) for holding in holdings]
            sent += [(self.keys_out[holding], self.keys) for holding in holdings]
            sent.append((self.queries_in[rank], self.output))
            received = [(self.queries_out[holding], self.output) for holding in holdings]
            keys = [self.keys_in[rank], self.earlier_keys[rank], *self.own_keys_in[rank]]
            received += [(variable, self.keys) for variable in keys]
            received.append((self.queries_in[rank], self.query))
            for moved in (sent, received):
                self.program.at_most([*moved, (self.largest, -1)], 0)
            total += sent
        return total


def key_value_bytes_bound(layout: Layout, token_bytes: TokenBytes | None = None) -> int:
    """Returns the fewest forward bytes of one layer of any layout as balanced as this one.

    These layouts have the same documents. Their ranks have at most the largest work of this one, and tokens in its
    range.
    """
    token_bytes = token_bytes or TokenBytes()
    return token_bytes.key_value * key_tokens_bound(
        layout.document_tokens,
        layout.num_ranks,
        most_work=int(layout.rank_work.max()),
        fewest_tokens=int(layout.rank_tokens.min()),
        most_tokens=int(layout.rank_tokens.max()),
    )


def key_tokens_bound(
    document_tokens: Sequence[int] | IntArray, num_ranks: int, most_work: int, fewest_tokens: int, most_tokens: int
) -> int:
    """Returns the tokens whose keys and values have to move, of all ranks together.

    Args:
        document_tokens: lengths, in tokens.
        num_ranks: ranks.
        most_work: most attended pairs of a rank.
        fewest_tokens, most_tokens: range of the tokens of a rank.

    Raises:
        PackingError: a length is out of range.
    """
    lengths = check_document_tokens(document_tokens)
    light = _LightestTokens(lengths)
    moved = 0
    for length, documents in zip(*np.unique(lengths, return_counts=True), strict=True):
        for ranks in range(1, num_ranks):
            tail = _longest_tail(int(length), light, ranks * most_work, ranks * fewest_tokens, ranks * most_tokens)
            if tail >= length:
                break
            moved += int(documents) * (int(length) - tail)
    return moved


class _LightestTokens:
    """Work of the lightest tokens of a batch: the tokens at position 0 of all documents, then at 1, and so on."""

    def __init__(self, lengths: IntArray) -> None:
        lengths = np.sort(lengths)
        self._reach = np.concatenate([[0], np.unique(lengths)])  # positions at which documents end
        self._documents = len(lengths) - np.searchsorted(lengths, self._reach, side="right")  # that are longer
        steps = np.diff(self._reach)
        self._tokens = np.concatenate([[0], np.cumsum(steps * self._documents[:-1])])
        self._work = np.concatenate(
            [[0], np.cumsum(causal_pairs_of(self._reach[:-1], self._reach[1:]) * self._documents[:-1])]
        )

    def work(self, tokens: IntArray) -> IntArray:
        """Returns the attended pairs of a number of lightest tokens; of all tokens if there are fewer."""
        tokens = np.clip(tokens, 0, self._tokens[-1])
        at = np.minimum(np.searchsorted(self._tokens, tokens, side="right") - 1, len(self._tokens) - 2)
        if at.size and len(self._reach) == 1:
            return np.zeros_like(tokens)
        # Positions before `position` are full in all longer documents; `more` tokens are at that position.
        full, more = np.divmod(tokens - self._tokens[at], np.maximum(1, self._documents[at]))
        position = self._reach[at] + full
        pairs = causal_pairs_of(self._reach[at], position) * self._documents[at]
        return self._work[at] + pairs + more * (position + 1)


def _longest_tail(length: int, light: _LightestTokens, most_work: int, fewest_tokens: int, most_tokens: int) -> int:
    """Returns the most tokens at the end of a document that may fit some ranks together, or a few more.

    Args:
        length: tokens of the document.
        light: the lightest tokens of the batch.
        most_work, fewest_tokens, most_tokens: limits of these ranks together.
    """

    def may_fit(fewest: IntArray, most: IntArray) -> np.ndarray:
        """Checks whether a tail of `fewest` to `most` tokens may fit: work of the fewest, beside the most of them."""
        tail_work = causal_pairs_of(length - fewest, np.full_like(fewest, length))
        return (fewest <= most_tokens) & (tail_work + light.work(fewest_tokens - most) <= most_work)

    low, high = 0, length
    if may_fit(np.array([high]), np.array([high])).all():
        return length
    while high - low > 1:
        borders = np.unique(np.linspace(low, high, PARTS + 1).astype(np.int64))
        fitting = np.flatnonzero(may_fit(borders[:-1], borders[1:]))
        if len(fitting) == 0:
            return low
        finer = int(borders[fitting[-1]]), int(borders[fitting[-1] + 1])
        if finer == (low, high):
            break
        low, high = finer
    return high
