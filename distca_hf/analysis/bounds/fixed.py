"""Bound: bytes that no plan for a fixed layout can do without. A linear program, for tests and reports.

Whatever a plan does, some numbers of it are a feasible point of the program, and the program charges it at most what
the plan pays; so its optimum is below every plan. Units: *rows*, one token of one group of heads, and work, pairs x
groups. Variables are, for every holding (see `holdings`), work, queries and keys that leave it, and for every rank
work, queries and keys that arrive. Constraints:

    a rank's own work - what leaves + what arrives <= its limit
    what leaves in all = what arrives in all                              of work, queries, keys
    work <= slope x queries + keys_worth(slope) x keys                    see `bound_lines`
    keys of a segment >= what later segments of its document need, if these are computed by anybody else
    bytes that a rank sends <= largest, bytes that it receives <= largest

and either the largest or the sum of sent bytes is minimised.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distca_hf.analysis.bounds.relaxation import Holdings, LinearProgram, keys_worth, slopes
from distca_hf.cost import IntArray, TokenBytes
from distca_hf.errors import PlanError
from distca_hf.layout import Layout


# Lines above each curve: more make the bound tighter and slower.
NUM_SLOPES = 13
# This share of the optimum is given away, so that rounding inside the solver never makes the bound too large.
ROUNDING = 1e-6


@dataclass(frozen=True)
class BytesBound:
    """Forward bytes of one layer that every plan needs: of the rank that sends or receives most, and of all ranks."""

    largest_rank: int
    total: int


def bytes_bound(
    layout: Layout,
    work_limits: IntArray | NDArray[np.float64],
    head_groups: int = 1,
    token_bytes: TokenBytes | None = None,
) -> BytesBound:
    """Bound for all plans in which rank r computes at most `work_limits[r]` attended pairs x groups of heads.

    Raises:
        PlanError: the limits add up to less than there is to compute.
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
    """The program of one layout. Rows are counted in longest documents, work in mean ranks: solvers like numbers
    around one."""

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
        of_kin = np.where(held.document < 0, 0, np.inf)
        self.work_to_elders, self.work_to_kin = program.variables(count, of_kin), program.variables(count, of_kin)
        self.work_in, self.queries_in, self.keys_in = (program.variables(ranks) for _ in range(3))
        self.elder_work, self.elder_queries, self.elder_keys = (program.variables(ranks) for _ in range(3))
        self.kin_work, self.kin_queries = (program.variables(ranks) for _ in range(2))
        self.largest = program.variables(1)[0]
        self.own_keys_in: list[list[int]] = [[] for _ in self.ranks]
        self._holdings_of: list[list[int]] = [[] for _ in self.ranks]
        for holding, rank in enumerate(held.rank.tolist()):
            self._holdings_of[rank].append(holding)

    def solve(self) -> tuple[float, float]:
        """Bytes of the largest rank and of all."""
        self._leave()
        self._span_ranks()
        self._arrive()
        self._balance()
        sent = self._count_bytes()
        scale = self.row_unit * self.byte_unit / self.groups
        largest = self.program.minimise([(self.largest, 1.0)])
        return largest * scale, self.program.minimise(sent) * scale

    def _line(self, slope: float, start: int, stop: int) -> tuple[float, float]:
        """What a row of queries and a row of keys are worth."""
        unit = self.row_unit / self.work_unit
        return slope * unit, keys_worth(slope, start, stop, self.most_pairs) * unit

    def _leave(self) -> None:
        """Work that leaves a holding takes queries and keys along."""
        held = self.holdings
        for holding, (start, stop) in enumerate(zip(held.start.tolist(), held.stop.tolist(), strict=True)):
            for slope in slopes(stop, NUM_SLOPES).tolist():
                query, key = self._line(slope, start, stop)
                self.program.at_most(
                    [(self.work_out[holding], 1), (self.queries_out[holding], -query), (self.keys_out[holding], -key)],
                    0,
                )

    def _span_ranks(self) -> None:
        """Documents that span ranks. Their other holders may have keys already: *elders* of a segment hold only what
        is before it, and need the segment's own keys; *kin* may need none. A segment's keys go wherever later segments
        are computed, at home or not."""
        held = self.holdings
        to_elders: list[list[int]] = [[] for _ in self.ranks]
        to_kin: list[list[int]] = [[] for _ in self.ranks]
        for parts in held.of_document.values():
            last_of = {int(held.rank[part]): place for place, part in enumerate(parts)}
            for place, holding in enumerate(parts):
                leaves = [(self.work_to_elders[holding], 1.0), (self.work_to_kin[holding], 1.0)]
                self.program.at_most([*leaves, (self.work_out[holding], -1)], 0)
                for other, last in sorted(last_of.items()):
                    if other != held.rank[holding]:
                        (to_elders if last < place else to_kin)[other].append(holding)
                for part in parts[:place]:
                    self._keys_sent_for(part, holding)
            self._keys_received(parts)
        for rank in self.ranks:
            for work, holdings, source in (
                (self.elder_work, to_elders[rank], self.work_to_elders),
                (self.kin_work, to_kin[rank], self.work_to_kin),
            ):
                sources = [(source[holding], -1.0) for holding in holdings]
                self.program.at_most([(work[rank], 1), *sources], 0)
            self._arrive_at_elder(rank, to_elders[rank])

    def _keys_received(self, parts: list[int]) -> None:
        """A rank that computes its own queries receives the keys before them, for the share of work that stays."""
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

    def _arrive_at_elder(self, rank: int, holdings: list[int]) -> None:
        """Work of later segments takes along their queries and keys."""
        for slope in slopes(self.longest, NUM_SLOPES).tolist():
            lines = [
                self._line(slope, int(self.holdings.start[holding]), int(self.holdings.stop[holding]))
                for holding in holdings
            ]
            if lines:
                query, key = max(lines)
                terms = [(self.elder_work[rank], 1), (self.elder_queries[rank], -query), (self.elder_keys[rank], -key)]
                self.program.at_most(terms, 0)

    def _keys_sent_for(self, part: int, later: int) -> None:
        """All keys of a segment go to the home of a later one if that computes any query of its own, once for each
        head, and to every stranger that does."""
        held = self.holdings
        tokens, pairs = int(held.tokens[part]) / self.row_unit, float(held.pairs[later])
        stays = 0.0 if held.rank[part] == held.rank[later] else 1.0
        by_home = stays * tokens * self.work_unit / pairs
        by_strangers = tokens * self.work_unit / min(pairs, self.most_pairs)
        self.program.at_most(
            [
                (self.keys_out[part], -1),
                (self.work_out[later], by_strangers - by_home),
                (self.work_to_elders[later], -by_strangers),
                (self.work_to_kin[later], -by_strangers),
            ],
            -stays * tokens * self.groups,
        )

    def _arrive(self) -> None:
        """Work that arrives takes queries along, and to strangers all keys up to them."""
        lines = [self._line(slope, 0, self.longest) for slope in slopes(self.longest, NUM_SLOPES).tolist()]
        most = (self.longest + 0.5) * self.row_unit / self.work_unit
        for rank in self.ranks:
            known = [(self.elder_work[rank], self.elder_queries[rank]), (self.kin_work[rank], self.kin_queries[rank])]
            for query, key in lines:
                strange = [(self.work_in[rank], 1.0), (self.queries_in[rank], -query), (self.keys_in[rank], -key)]
                for work, queries in known:
                    strange += [(work, -1.0), (queries, query)]
                self.program.at_most(strange, 0)
            self.program.at_most([(self.kin_work[rank], 1), (self.kin_queries[rank], -most)], 0)
            for place, whole in ((0, self.work_in[rank]), (1, self.queries_in[rank])):
                self.program.at_most([*((pair[place], 1.0) for pair in known), (whole, -1)], 0)

    def _balance(self) -> None:
        """Ranks stay within their limits, and what leaves arrives."""
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
            (self.elder_work, self.work_to_elders),
            (self.kin_work, self.work_to_kin),
            ([*self.keys_in, *self.elder_keys, *own_keys], self.keys_out),
        ):
            self.program.equal([(variable, 1.0) for variable in arrives] + [(variable, -1.0) for variable in leaves])

    def _count_bytes(self) -> list[tuple[int, float]]:
        """Largest is at least what any rank sends or receives; returns the sum of what all send."""
        total = []
        for rank in self.ranks:
            holdings = self._holdings_of[rank]
            sent = [(self.queries_out[holding], self.query) for holding in holdings]
            sent += [(self.keys_out[holding], self.keys) for holding in holdings]
            sent.append((self.queries_in[rank], self.output))
            received = [(self.queries_out[holding], self.output) for holding in holdings]
            keys = [self.keys_in[rank], self.elder_keys[rank], *self.own_keys_in[rank]]
            received += [(variable, self.keys) for variable in keys]
            received.append((self.queries_in[rank], self.query))
            for moved in (sent, received):
                self.program.at_most([*moved, (self.largest, -1)], 0)
            total += sent
        return total
