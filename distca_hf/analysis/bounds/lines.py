"""Lines above a curve: what pairs a server can compute, at most, for the queries and keys that it is sent.

A server that computes x queries of [start, stop), the last of them at position start + k, needs the k keys before it
that lie in the range, and attends

    pairs = x (start + k) - x^2 / 2                       (the last x queries before that position)

That is neither linear nor concave. But for every slope a there is a smallest number c(a) such that

    pairs <= a x + c(a) k        for all 0 <= x <= k <= stop - start

and these lines pass through the origin: they may be summed over servers, heads and documents, and the sums keep their
meaning however a plan divides the work.
"""

import numpy as np
from numpy.typing import NDArray


# Positions at which the line above a server's greatest work is evaluated; between two it is rounded up.
POSITIONS = 400


def keys_worth(slope: float, start: int, stop: int, most_pairs: float) -> float:
    """c(slope): pairs that one key is worth if a query is worth `slope`.

    Args:
        slope: pairs per query.
        start, stop: range of the queries, all of one head of one document.
        most_pairs: no server computes more of one head.
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
    """The same where a server has no time for all that the keys would allow: then fewer queries come with them."""
    first = np.sqrt(2 * most_pairs + slope * slope)
    if first >= stop + 0.5:
        return otherwise
    last = np.geomspace(first, stop + 0.5, POSITIONS)
    queries = last - np.sqrt(np.maximum(last * last - 2 * most_pairs, 0))
    return float(np.max((most_pairs - slope * queries)[1:] / np.maximum(last[:-1] - 0.5, 0.5)))


def slopes(stop: int, count: int) -> NDArray[np.float64]:
    """`[count]` slopes for documents of `stop` tokens, from queries that are worth nothing to those worth all."""
    return np.linspace(0, stop, count) + 0.5
