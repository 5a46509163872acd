"""Results of whole training steps, as a Markdown table."""

from collections.abc import Mapping
from typing import Any

from lib.tables import markdown, number


COLUMNS = (
    "mode",
    "step ms",
    "tokens/s/GPU",
    "MFU %",
    "peak GiB",
    "loss",
    "planned max/mean",
    "longest document",
)


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a Markdown table with a row for each mode, of its `figures` in seconds, bytes and ratios."""
    rows = [
        (
            name,
            number(figure["step_seconds"], 1e3, 1),
            number(figure["tokens_per_second"], 1, 0),
            number(figure["utilisation"], 100, 1),
            number(figure["peak_bytes"] or None, 2**-30, 1),
            number(figure["loss"], 1, 4),
            number(figure["imbalance"], 1, 4),
            str(figure["longest_document_tokens"]),
        )
        for name, figure in figures.items()
    ]
    return markdown(COLUMNS, rows)
