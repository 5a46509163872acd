"""Plan answer: reads the JSON of `distca plan` into figures of the micro-steps of its first optimizer step."""

from collections.abc import Mapping, Sequence
from typing import Any

from distca_hf.analysis.memory import SHARDING_NAMES
from distca_hf.analysis.report.figures import MemoryBar, Report, Seconds, StepFigures, Table
from distca_hf.analysis.report.small_enough import in_nodes
from distca_hf.analysis.report.straggler import balance_in_words, most_telling
from distca_hf.analysis.tables import PART_NAMES


# Fields by which this JSON is known among others.
FIELDS = ("tokens_per_rank", "layout", "fingerprint", "whole_epoch", "imbalance_before")


def claims(content: Mapping[str, Any]) -> bool:
    """Returns whether an object is an answer of `distca plan`."""
    return all(name in content for name in FIELDS)


def read(content: Mapping[str, Any], source: str) -> Report:
    """Returns the report of an answer.

    Args:
        content: the object.
        source: its path.

    Raises:
        LookupError, TypeError, ValueError: a field is missing, or of another kind.
    """
    estimates = content["estimates"]
    steps = [_figures(content, number, estimates) for number in range(len(content["micro_batches"]))]
    return Report(
        title=f"Plan for {content['source']}",
        source=source,
        steps=steps,
        summary=_summary(content, estimates),
        notes=["Nothing is measured: work and bytes are those of the plan, seconds and memory are estimates."],
        tables=list(_tables(content)),
        begin_with=most_telling(steps),
    )


def _figures(content: Mapping[str, Any], number: int, estimates: Mapping[str, Any] | None) -> StepFigures:
    """Returns the figures of one micro-step."""
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
    after = "placed" if content["layout"] == "placed" else "tasks moved"
    finding = balance_in_words("documents in order", after, before, work)
    return StepFigures(
        label=f"micro-step {number} of {content['micro_steps']}",
        before="documents in the order of the data",
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
        seconds=None if estimates is None else _seconds(estimates, number),
        memory=[] if estimates is None else _memory(estimates),
    )


def _most_sent(sent: Sequence[tuple[int, int, float]], nodes_sent: int) -> str:
    """Returns a sentence about bytes."""
    if not sent:
        return "Nothing is sent between ranks: no document is cut."
    one = "node" if nodes_sent else "rank"
    source, destination, size = max(sent, key=lambda each: each[2])
    total = sum(each[2] for each in sent)
    return (
        f"{total / 1e6:,.1f} MB are sent in one layer's forward pass; most of it from {one} {source} to {one} "
        f"{destination}, {size / 1e6:,.1f} MB."
    )


def _seconds(estimates: Mapping[str, Any], number: int) -> Seconds:
    """Returns predicted seconds of every rank in a micro-step."""
    profile, seconds = estimates["profile"], estimates["rank_seconds"][number]
    return Seconds(
        rates=str(profile["source"]),
        source=f"the measured profile {profile['source']} of {profile['device']}",
        predicted_attention=[float(one) for one in seconds["attention"]],
        predicted_rest=[float(one) for one in seconds["rest"]],
    )


def _memory(estimates: Mapping[str, Any]) -> list[MemoryBar]:
    """Returns the memory of a rank in each way to shard."""
    return [
        MemoryBar(
            SHARDING_NAMES.get(name, name),
            [(words, float(parts[field])) for field, words in PART_NAMES.items()],
            float(estimates["room_bytes"]),
        )
        for name, parts in estimates["memory_bytes"].items()
    ]


def _summary(content: Mapping[str, Any], estimates: Mapping[str, Any] | None) -> list[str]:
    """Returns sentences about the whole epoch."""
    epoch = content["whole_epoch"]
    sentences = [
        f"{content['model']} on {content['ranks']:,} ranks x {content['tokens_per_rank']:,} tokens: attention work of "
        f"the busiest rank {epoch['imbalance_before']['mean']:.2f} → {epoch['imbalance']['mean']:.2f} times the mean "
        f"over an epoch of {epoch['micro_batches']:,} micro-batches."
    ]
    if estimates is not None:
        sentences.append(
            f"Steps should be {estimates['over_plain']:.2f} times as fast as with plain packing; attention is "
            f"{estimates['attention_share']:.0%} of a step."
        )
    return sentences


def _tables(content: Mapping[str, Any]) -> list[Table]:
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
                    [way["label"], way["times_as_fast"], way["memory_bytes"] / 2**30, way["received_bytes"] / 1e6]
                    for way in content["estimates"]["ways"]
                ],
            )
        )
    return tables
