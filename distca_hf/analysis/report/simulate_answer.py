"""Simulate answer: reads the JSON of `distca simulate` into bars of every number of GPUs, without steps; and that of
`distca plan --batch-size`, which has the same table of ways to train.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from distca_hf.analysis.report.figures import Report, Table


# By which this JSON is known among others.
KIND = "distca_hf simulation"


def claims(content: Mapping[str, Any]) -> bool:
    """Returns whether an object is an answer of `distca simulate`."""
    return content.get("kind") == KIND


def read(content: Mapping[str, Any], source: str) -> Report:
    """Returns the report of an answer.

    Args:
        content: the object.
        source: its path.

    Raises:
        LookupError, TypeError, ValueError: a field is missing, or of another kind.
    """
    profile = content["profile"]
    return Report(
        title=f"Simulation of {content['model']} on {content['lengths']}",
        source=source,
        steps=[],
        summary=[f"{_world(one)}: {one['in_short']}" for one in content["simulations"]],
        notes=[
            f"Nothing is measured here: costs are those of the profile {profile['source']} ({profile['device']}, "
            f"{profile['date']}). Assumptions are listed below."
        ],
        tables=[
            *(_table(one) for one in content["simulations"]),
            Table("Assumptions", ["assumed"], [[str(assumption)] for assumption in content["assumptions"]]),
        ],
    )


def _world(simulation: Mapping[str, Any]) -> str:
    """Returns the GPUs of a simulation, in words."""
    accumulation = f", {simulation['accumulation']} micro-steps" if simulation["accumulation"] > 1 else ""
    stages = f", also as {simulation['num_stages']} stages" if simulation["num_stages"] > 1 else ""
    size = simulation["batch_size"]
    of_rank = f"{simulation['tokens_per_rank']:,} tokens" if size is None else f"{size:,} rows"
    return f"{simulation['gpus']:,} GPUs x {of_rank}{accumulation}{stages}"


def _table(simulation: Mapping[str, Any]) -> Table:
    """Returns the ways of a simulation."""
    missing = "; ".join(str(one) for one in simulation["missing"])
    note = f"{simulation['in_short']}{f' Left out: {missing}.' if missing else ''}"
    return table_of_ways(_world(simulation), simulation["ways"], note)


def table_of_ways(world: str, ways: Sequence[Mapping[str, Any]], note: str) -> Table:
    """Returns figures of ways to train, with bars of their seconds."""
    return Table(
        title=f"{world}: seconds of an optimizer step",
        columns=["way", "seconds", "tokens per second", "utilisation", "GiB", "fits", "GPU-hours", "times as fast"],
        rows=[
            [
                str(way["label"]),
                float(way["step_seconds"]),
                float(way["tokens_per_second"]),
                None if way["utilisation"] is None else float(way["utilisation"]),
                float(way["memory_bytes"]) / 2**30,
                "yes" if way["fits"] else "no",
                float(way["gpu_hours"]),
                float(way["times_as_fast"]),
            ]
            for way in ways
        ],
        note=note,
        bars=1,
        marked=[number for number, way in enumerate(ways) if way["is_ours"]],
    )


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


def claims_given(content: Mapping[str, Any]) -> bool:
    """Returns whether an object is such an answer."""
    return all(name in content for name in FIELDS)


def read_given(content: Mapping[str, Any], source: str) -> Report:
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
