"""A linear program that is written down constraint by constraint."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distca_hf.errors import PlanError


Terms = Sequence[tuple[int, float]]  # (variable, coefficient)


class LinearProgram:
    """Variables are numbers, at least 0. Solved by HiGHS, which comes with scipy."""

    def __init__(self) -> None:
        self._highest: list[float] = []
        self._bounds: list[float] = []
        self._equalities = 0
        self._terms: dict[str, tuple[list[int], list[int], list[float]]] = {
            "at_most": ([], [], []),
            "equal": ([], [], []),
        }

    def variables(self, count: int, highest: NDArray[np.float64] | None = None) -> list[int]:
        """New variables, `[count]` of them with a highest value."""
        first = len(self._highest)
        self._highest += [np.inf] * count if highest is None else highest.tolist()
        return list(range(first, first + count))

    def at_most(self, terms: Terms, bound: float) -> None:
        """Constraint: the sum of the terms is at most `bound`."""
        self._add("at_most", len(self._bounds), terms)
        self._bounds.append(bound)

    def equal(self, terms: Terms) -> None:
        """Constraint: the sum of the terms is 0."""
        self._add("equal", self._equalities, terms)
        self._equalities += 1

    def _add(self, kind: str, row: int, terms: Terms) -> None:
        rows, columns, coefficients = self._terms[kind]
        rows += [row] * len(terms)
        columns += [variable for variable, _ in terms]
        coefficients += [coefficient for _, coefficient in terms]

    def minimise(self, objective: Terms) -> float:
        """The smallest value of the sum of the objective's terms.

        Raises:
            PlanError: there is none.
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
