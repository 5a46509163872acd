"""Curves of the attention kernel from a profile, and the table of the setting `kernel_times` from these.

The table has seconds of the last queries of a document, both passes.
"""

from typing import Any

import numpy as np

from distca_hf.analysis.profiles.cluster_profile import AttentionTimes
from distca_hf.analysis.profiles.curves import Curve, FloatArray, Notes, Surface


def square_curve(times: AttentionTimes, seconds: tuple[float, ...]) -> Curve:
    """Returns seconds of squares by their queries."""
    power = 1.0 if times.window_tokens else 2.0
    name = f"queries of a square{f', window {times.window_tokens}' if times.window_tokens else ''}"
    return Curve.of(name, times.square_tokens, seconds, power)


def prefix_surface(times: AttentionTimes, seconds: tuple[tuple[float, ...], ...]) -> Surface:
    """Returns seconds of prefixes by their queries and keys."""
    names = "queries of a prefix", "keys of a prefix"
    rows, columns = (np.array(sizes, dtype=np.float64) for sizes in (times.prefix_queries, times.prefix_keys))
    return Surface(names, rows, columns, np.array(seconds, dtype=np.float64))


def kernel_times_of(times: AttentionTimes) -> dict[str, Any]:
    """Returns the table of `placement.by_kernel_time.KernelTimes`, of a full table with prefixes."""
    queries = np.array(times.square_tokens)
    keys = np.array(sorted({*times.square_tokens, *times.prefix_keys} - set(queries[queries > times.prefix_keys[-1]])))
    keys = keys[keys >= queries[0]]
    rows = [_row(times, number, keys) for number in queries[queries <= keys[-1]]]
    return {
        "query_tokens": [int(x) for x in queries[queries <= keys[-1]]],
        "key_tokens": [int(x) for x in keys],
        "seconds": [
            [float(x) if key >= number else None for x, key in zip(row, keys, strict=True)]
            for number, row in zip(queries, rows, strict=False)
        ],
    }


def _row(times: AttentionTimes, queries: float, keys: FloatArray) -> FloatArray:
    """Returns `[keys]` seconds of the last queries of documents of so many tokens; beyond measured prefixes, rates are
    those of the border."""
    notes, total = Notes(), np.zeros(len(keys))
    before = np.maximum(0.0, keys - queries)
    for square, prefix in (
        (times.square_forward, times.prefix_forward),
        (times.square_backward, times.prefix_backward),
    ):
        total += square_curve(times, square).at(queries, notes)
        total += prefix_surface(times, prefix).at(np.full(len(keys), queries), before, notes)
    return total
