"""Given answer: reads the JSON of `distca plan --batch-size` into tables."""

from collections.abc import Mapping
from typing import Any

from distca_hf.analysis.report.figures import Report, Table
from distca_hf.analysis.report.simulate_answer import table_of_ways


# Fields by which this JSON is known among others.
FIELDS = ("batch_size", "step_imbalance", "moved_share", "ways")
# Names of imbalances, with their fields before and after.
IMBALANCES = (
    ("tokens", "token_imbalance_before", "token_imbalance"),
    ("attention", "imbalance_before", "imbalance"),
    ("work of a step, results return", "step_imbalance_before", "step_imbalance"),
    ("work of a step, placed loss", "step_imbalance_before", "step_imbalance_placed_loss"),
    ("worst micro-batch, results return", "worst_step_imbalance_before", "worst_step_imbalance"),
    ("worst micro-batch, placed loss", "worst_step_imbalance_before", "worst_step_imbalance_placed_loss"),
)


def claims(content: Mapping[str, Any]) -> bool:
    """Returns whether an object is such an answer."""
    return all(name in content for name in FIELDS)


def read(content: Mapping[str, Any], source: str) -> Report:
    """Returns the report of an answer.

    Args:
        content: the object.
        source: its path.

    Raises:
        LookupError, TypeError, ValueError: a field is missing, or of another kind.
    """
    places_rows = content["step_imbalance_placed_loss"] is not None
    rows: list[list[str | float | None]] = [
        [name if places_rows else name.partition(", results")[0], float(content[before]), float(content[after])]
        for name, before, after in IMBALANCES
        if content[after] is not None
    ]
    way = "rows placed inside the model" if places_rows else "tasks moved"
    world = f"{content['ranks']:,} ranks x {content['batch_size']:,} rows"
    return Report(
        title=f"Plan for batches of {content['source']}",
        source=source,
        steps=[],
        summary=[str(content["in_short"])],
        notes=["Nothing is measured: work is that of the plan, seconds and memory are estimates."],
        tables=[
            Table(f"{world}: busiest rank over the mean", ["", "as given", way], rows),
            table_of_ways(world, content["ways"], "As distca simulate has it."),
        ],
    )
