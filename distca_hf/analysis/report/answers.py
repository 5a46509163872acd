"""Answers: reads the JSON that other commands print into reports.

distca plan                 figures of the micro-steps of its first optimizer step
distca plan --batch-size    imbalances of given batches, and a table of ways to train
distca simulate             a table of ways to train for every number of GPUs
"""

from collections.abc import Mapping, Sequence
from typing import Any

from distca_hf.analysis.memory import SHARDING_NAMES
from distca_hf.analysis.report.figures import MemoryBar, Report, Seconds, StepFigures, Table, in_nodes
from distca_hf.analysis.report.straggler import balance_in_words, most_telling
from distca_hf.analysis.tables import PART_NAMES


# Fields by which the JSON of `distca plan` is known, without and with --batch-size.
PLAN_FIELDS = ("tokens_per_rank", "layout", "fingerprint", "whole_epoch", "imbalance_before")
GIVEN_FIELDS = ("batch_size", "step_imbalance", "moved_share", "ways")
# Field `kind` of the JSON of `distca simulate`.
SIMULATION = "distca_hf simulation"
# Names of imbalances, with their fields before and after.
IMBALANCES = (
    ("tokens", "token_imbalance_before", "token_imbalance"),
    ("attention", "imbalance_before", "imbalance"),
    ("work of a step, results return", "step_imbalance_before", "step_imbalance"),
    ("work of a step, placed loss", "step_imbalance_before", "step_imbalance_placed_loss"),
    ("worst micro-batch, results return", "worst_step_imbalance_before", "worst_step_imbalance"),
    ("worst micro-batch, placed loss", "worst_step_imbalance_before", "worst_step_imbalance_placed_loss"),
)


def read_plan(content: Mapping[str, Any], source: str) -> Report:
    """Returns the report of an answer of `distca plan`."""
    estimates, epoch = content["estimates"], content["whole_epoch"]
    summary = [
        f"{content['model']} on {content['ranks']:,} ranks x {content['tokens_per_rank']:,} tokens: attention work of "
        f"the busiest rank {epoch['imbalance_before']['mean']:.2f} → {epoch['imbalance']['mean']:.2f} times the mean "
        f"over an epoch of {epoch['micro_batches']:,} micro-batches."
    ]
    if estimates is not None:
        summary.append(
            f"Steps should be {estimates['over_plain']:.2f} times as fast as with plain packing; attention is "
            f"{estimates['attention_share']:.0%} of a step."
        )
    steps = [_plan_figures(content, number, estimates) for number in range(len(content["micro_batches"]))]
    return Report(
        title=f"Plan for {content['source']}",
        source=source,
        steps=steps,
        summary=summary,
        notes=["Nothing is measured: work and bytes come from the plan, seconds and memory are estimates."],
        tables=list(_plan_tables(content)),
        begin_with=most_telling(steps),
    )


def _plan_figures(content: Mapping[str, Any], number: int, estimates: Mapping[str, Any] | None) -> StepFigures:
    of = content["micro_batches"][number]
    work, before, tokens = (
        [float(one) for one in of[name]] for name in ("rank_work", "rank_work_before", "rank_tokens")
    )
    nodes_sent, sent = in_nodes(
        [(int(source), int(destination), float(size)) for source, destination, size in of["bytes_between"]],
        num_ranks=len(work),
        num_servers=0,
        ranks_per_node=int(content["ranks_per_node"]),
    )
    after = "placed" if content["layout"] == "placed" else "attention moved"
    seconds, memory = None, []
    if estimates is not None:
        profile, of_step = estimates["profile"], estimates["rank_seconds"][number]
        seconds = Seconds(
            rates=str(profile["source"]),
            source=f"the measured profile {profile['source']} of {profile['device']}",
            predicted_attention=[float(one) for one in of_step["attention"]],
            predicted_rest=[float(one) for one in of_step["rest"]],
        )
        memory = [
            MemoryBar(
                SHARDING_NAMES.get(name, name),
                [(words, float(parts[field])) for field, words in PART_NAMES.items()],
                float(estimates["room_bytes"]),
            )
            for name, parts in estimates["memory_bytes"].items()
        ]
    finding = balance_in_words("documents in order", after, before, work)
    return StepFigures(
        label=f"micro-step {number} of {content['micro_steps']}",
        before="documents packed in order",
        after=after,
        work_before=before,
        work=work,
        tokens=tokens,
        num_ranks=len(work),
        sent=sent,
        nodes_sent=nodes_sent,
        facts=[
            ("documents", f"{of['documents']:,}"),
            ("tokens", f"{round(sum(tokens)):,}"),
            ("longest document", f"{of['longest_document_tokens']:,} tokens"),
            ("model", str(content["model"])),
        ],
        findings=[finding, _most_sent(sent, nodes_sent)],
        seconds=seconds,
        memory=memory,
    )


def _most_sent(sent: Sequence[tuple[int, int, float]], nodes_sent: int) -> str:
    if not sent:
        return "Nothing is sent between ranks: no document is cut."
    one = "node" if nodes_sent else "rank"
    source, destination, size = max(sent, key=lambda each: each[2])
    total = sum(each[2] for each in sent)
    return (
        f"{total / 1e6:,.1f} MB are sent in one layer's forward pass; most of it from {one} {source} to {one} "
        f"{destination}, {size / 1e6:,.1f} MB."
    )


def _plan_tables(content: Mapping[str, Any]) -> list[Table]:
    """Returns the epoch, other numbers of tokens per rank, and baselines."""
    epoch = content["whole_epoch"]
    rows = [("mean", "mean"), ("95 % are below", "p95"), ("worst", "worst")]
    tables = [
        Table(
            "Work of the busiest rank over the mean, in an epoch",
            ["micro-batches", "in order", "planned"],
            [[words, epoch["imbalance_before"][name], epoch["imbalance"][name]] for words, name in rows],
        )
    ]
    if content["choices"]:
        tables.append(
            Table(
                "Other numbers of tokens per rank",
                ["tokens per rank", "GiB", "times as fast as plain packing", "longest document", "too long"],
                [
                    [
                        choice["tokens_per_rank"],
                        None if choice["memory_bytes"] is None else choice["memory_bytes"] / 2**30,
                        choice["over_plain"],
                        choice["longest_document_tokens"],
                        choice["too_long_documents"],
                    ]
                    for choice in content["choices"]
                ],
                "GiB with FSDP2. Longest: document that all ranks together hold. Too long: documents that are longer.",
            )
        )
    if content["estimates"] is not None:
        tables.append(
            Table(
                "Ways to train, simulated",
                ["way", "x plain", "GiB", "MB of the largest rank in a layer"],
                [
                    [way["label"], way["times_as_fast"], way["memory_bytes"] / 2**30, max(sizes) / 1e6]
                    for way in content["estimates"]["ways"]
                    for sizes in [(way["received_bytes"], way.get("state_bytes", 0))]
                ],
            )
        )
    return tables


def read_simulation(content: Mapping[str, Any], source: str) -> Report:
    """Returns the report of an answer of `distca simulate`."""
    profile = content["profile"]
    return Report(
        title=f"Simulation of {content['model']} on {content['lengths']}",
        source=source,
        steps=[],
        summary=[f"{_world(one)}: {one['in_short']}" for one in content["simulations"]],
        notes=[
            f"Nothing is measured here: costs come from the profile {profile['source']} ({profile['device']}, "
            f"{profile['date']}). Assumptions are listed below."
        ],
        tables=[
            *(
                table_of_ways(
                    _world(one),
                    one["ways"],
                    one["in_short"] + (f" Left out: {'; '.join(map(str, one['missing']))}." if one["missing"] else ""),
                )
                for one in content["simulations"]
            ),
            Table("Assumptions", ["assumed"], [[str(assumption)] for assumption in content["assumptions"]]),
        ],
    )


def _world(simulation: Mapping[str, Any]) -> str:
    accumulation = f", {simulation['accumulation']} micro-steps" if simulation["accumulation"] > 1 else ""
    stages = f", also as {simulation['num_stages']} stages" if simulation["num_stages"] > 1 else ""
    size = simulation["batch_size"]
    of_rank = f"{simulation['tokens_per_rank']:,} tokens" if size is None else f"{size:,} rows"
    return f"{simulation['gpus']:,} GPUs x {of_rank}{accumulation}{stages}"


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


def read_given(content: Mapping[str, Any], source: str) -> Report:
    """Returns the report of an answer of `distca plan --batch-size`."""
    places_rows = content["step_imbalance_placed_loss"] is not None
    rows: list[list[str | float | None]] = [
        [name if places_rows else name.partition(", results")[0], float(content[before]), float(content[after])]
        for name, before, after in IMBALANCES
        if content[after] is not None
    ]
    way = "rows placed inside the model" if places_rows else "attention moved"
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
