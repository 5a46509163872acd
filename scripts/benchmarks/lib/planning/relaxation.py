"""Relaxation: the parts that make the bound for fixed layouts a linear program.

1. Lines above a curve (`keys_worth`, `slopes`): the most pairs that a server can compute for the rows that it
   receives. A server that computes x queries of [start, stop), the last of them at position start + k, needs the k
   keys before it in that range, and attends

       pairs = x (start + k) - x^2 / 2                    (the last x queries before that position)

   That is neither linear nor concave. But for every slope a there is a smallest number c(a) such that

       pairs <= a x + c(a) k        for all 0 <= x <= k <= stop - start

   These lines pass through the origin. So they hold for sums over servers, heads and documents, too, however a plan
   divides the work.
2. Holdings: the documents of the ranks, in few enough parts for a solver.
3. LinearProgram: variables and constraints, added one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray, run_starts
from distca_hf.cost import causal_pairs_of
from distca_hf.errors import PlanError
from distca_hf.layout import Layout


# Number of positions at which the line above a server's greatest work is evaluated; between two it is rounded up.
POSITIONS = 400
# Largest ratio of lengths of whole documents on one rank that are one holding: a closer ratio costs the solver time.
LENGTH_RATIO = 1.1

Terms = Sequence[tuple[int, float]]  # (variable, coefficient)


def keys_worth(slope: float, start: int, stop: int, most_pairs: float) -> float:
    """Returns c(slope): the pairs that one key allows if a query allows `slope`.

    Args:
        slope: pairs per query.
        start, stop: range of the queries, all of one head of one document.
        most_pairs: most pairs of one head that a server computes.
    """
    length, offset = stop - start, start + 0.5 - slope
    if offset >= 0:
        worth = offset + length / 2  # all queries of the range
    elif length + offset <= 0:
        worth = 0.0
    else:
        worth = (length + offset) ** 2 / (2 * length)  # its last queries, down to position `slope`
    if start == 0 and most_pairs < (stop + 0.5) ** 2 / 2:
        worth = min(worth, _worth_to_a_busy_server(slope, stop, most_pairs, worth))
    return worth


def _worth_to_a_busy_server(slope: float, stop: int, most_pairs: float, otherwise: float) -> float:
    """Returns c(slope) if the limit of a server is below the pairs that its keys allow: fewer queries come with
    them."""
    first = np.sqrt(2 * most_pairs + slope * slope)
    if first >= stop + 0.5:
        return otherwise
    last = np.geomspace(first, stop + 0.5, POSITIONS)
    queries = last - np.sqrt(np.maximum(last * last - 2 * most_pairs, 0))
    return float(np.max((most_pairs - slope * queries)[1:] / np.maximum(last[:-1] - 0.5, 0.5)))


def slopes(stop: int, count: int) -> NDArray[np.float64]:
    """Returns `[count]` evenly spaced slopes for documents of `stop` tokens, from the first query to the last."""
    return np.linspace(0, stop, count) + 0.5


@dataclass(frozen=True, eq=False)
class Holdings:
    """Parts of a layout, as `[holdings]` arrays.

    A holding is one segment of a document that spans ranks. Or it is several whole documents of about the same length
    on one rank, with the length of the longest.

    Attributes:
        rank: its owner rank.
        document: number of a document that spans ranks, or -1.
        start, stop: the segment; of whole documents 0 and the greatest length.
        pairs: attended pairs of its queries.
        tokens: number of its tokens.
    """

    rank: IntArray
    document: IntArray
    start: IntArray
    stop: IntArray
    pairs: IntArray
    tokens: IntArray

    @classmethod
    def of(cls, layout: Layout) -> "Holdings":
        """Returns the holdings of a layout; segments of one document follow each other in order."""
        document, start, stop, rank = (
            layout.segment_document,
            layout.segment_start,
            layout.segment_stop,
            layout.segment_rank,
        )
        # 1. Segments of documents that span ranks: one holding each.
        pairs = causal_pairs_of(start, stop)
        whole = stop - start == layout.document_tokens[document]
        cut = np.flatnonzero(~whole)
        cut = cut[np.lexsort((start[cut], document[cut]))]
        # 2. Whole documents: one holding for each rank and class of lengths.
        kept = np.flatnonzero(whole)
        size = np.floor(np.log(stop[kept]) / np.log(LENGTH_RATIO)).astype(np.int64)
        order = np.lexsort((size, rank[kept]))
        kept, size = kept[order], size[order]
        first = np.flatnonzero(run_starts(rank[kept], size))
        if len(first) == 0:
            return cls(rank[cut], document[cut], start[cut], stop[cut], pairs[cut], (stop - start)[cut])
        # 3. Both, whole documents first.
        none = np.zeros(len(first), dtype=np.int64)
        return cls(
            rank=np.concatenate([rank[kept][first], rank[cut]]),
            document=np.concatenate([none - 1, document[cut]]),
            start=np.concatenate([none, start[cut]]),
            stop=np.concatenate([np.maximum.reduceat(stop[kept], first), stop[cut]]),
            pairs=np.concatenate([np.add.reduceat(pairs[kept], first), pairs[cut]]),
            tokens=np.concatenate([np.add.reduceat(stop[kept], first), (stop - start)[cut]]),
        )

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def of_document(self) -> dict[int, list[int]]:
        """Holdings of every document that spans ranks, in order."""
        parts: dict[int, list[int]] = {}
        for holding in np.flatnonzero(self.document >= 0).tolist():
            parts.setdefault(int(self.document[holding]), []).append(holding)
        return parts


class LinearProgram:
    """A linear program over variables that are at least 0, solved by HiGHS, which comes with scipy."""

    def __init__(self) -> None:
        self._highest: list[float] = []
        self._bounds: list[float] = []
        self._equalities = 0
        self._terms: dict[str, tuple[list[int], list[int], list[float]]] = {
            "at_most": ([], [], []),
            "equal": ([], [], []),
        }

    def variables(self, count: int, highest: NDArray[np.float64] | None = None) -> list[int]:
        """Adds variables; `highest` has the largest value of each, `[count]`. Returns their numbers."""
        first = len(self._highest)
        self._highest += [np.inf] * count if highest is None else highest.tolist()
        return list(range(first, first + count))

    def at_most(self, terms: Terms, bound: float) -> None:
        """Adds the constraint that the sum of the terms is at most `bound`."""
        self._add("at_most", len(self._bounds), terms)
        self._bounds.append(bound)

    def equal(self, terms: Terms) -> None:
        """Adds the constraint that the sum of the terms is 0."""
        self._add("equal", self._equalities, terms)
        self._equalities += 1

    def _add(self, kind: str, row: int, terms: Terms) -> None:
        """Adds the terms of one constraint."""
        rows, columns, coefficients = self._terms[kind]
        rows += [row] * len(terms)
        columns += [variable for variable, _ in terms]
        coefficients += [coefficient for _, coefficient in terms]

    def minimise(self, objective: Terms) -> float:
        """Returns the smallest value of the sum of the objective's terms.

        Raises:
            PlanError: the program has no optimum.
            ImportError: scipy is not installed.
        """
        from scipy.optimize import linprog  # type: ignore[import-untyped]
        from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

        costs = np.zeros(len(self._highest))
        for variable, coefficient in objective:
            costs[variable] += coefficient
        matrices = []
        for kind, count in (("at_most", len(self._bounds)), ("equal", self._equalities)):
            rows, columns, coefficients = self._terms[kind]
            matrices.append(csr_matrix((coefficients, (rows, columns)), shape=(count, len(self._highest))))
        bounds = np.column_stack((np.zeros(len(self._highest)), self._highest))
        found = linprog(
            costs, matrices[0], self._bounds, matrices[1], np.zeros(self._equalities), bounds, method="highs"
        )
        if found.status != 0:
            raise PlanError(f"the linear program of the bound has no optimum: {found.message}")
        return float(found.fun)
