"""Estimates: figures of a report that were not measured: predicted seconds of a run, and JSON of other commands.

    tasks of a rank, by kind of layers ── kernel times of the profile ── attention
    tokens of a rank                   ── layer times of the profile  ── everything else

These are the costs of `distca simulate`, without exchanges and collectives. If a GPU has no profile, rates
of an H200 make an estimate, and the report says so.

distca plan                 figures of the micro-steps of its first optimizer step
distca plan --batch-size    imbalances of given batches, and a table of ways to train
distca simulate             a table of ways to train for every number of GPUs
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from distca_hf.analysis.memory import SHARDING_NAMES
from distca_hf.analysis.models import ModelSize, SimulatedModel
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, profile_of_device
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.report.figures import MemoryBar, OfRanks, Report, Seconds, StepFigures, Table, in_nodes
from distca_hf.analysis.report.straggler import balance_in_words, most_telling
from distca_hf.analysis.simulate.costs import Costs, Tiles
from distca_hf.analysis.tables import PART_NAMES
from distca_hf.analysis.training_setup import GIB
from distca_hf.cost import CAUSAL_MASK, Heads, Mask
from distca_hf.errors import first_line
from distca_hf.traces import HeadSizes, ModelSizes, RankTrace


@dataclass
class Predictor:
    """Predicts the micro-batches of a run.

    Attributes:
        named: profile for all ranks; None: the profile in the setting `kernel_times`, if it is in the run's folder
            and was measured on a rank's GPU; else the shipped one of that GPU.
        folder: of the run. A trace may name any file; files outside the folder are not opened.
        notes: everything that was extrapolated beyond measured sizes, or taken from other heads.
        unread: why files of the setting cannot be read.
    """

    named: ClusterProfile | None = None
    folder: Path = Path()
    notes: Notes = field(default_factory=Notes)
    unread: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shipped, self._loaded = cache(profile_of_device), cache(self._load)
        self._made: dict[tuple[str, ModelSizes, HeadSizes], Costs] = {}

    def predict(self, of_ranks: Mapping[int, RankTrace], num_ranks: int) -> Seconds:
        """Returns predicted seconds of one micro-batch; empty if there is nothing to predict from. Commas separate the
        names of several profiles. `of_ranks`: traces by rank, attention servers after the others; some may be missing.
        """
        by_gpu: dict[tuple[str, str], list[RankTrace]] = {}
        for trace in of_ranks.values():
            by_gpu.setdefault((trace.device, trace.profile), []).append(trace)
        attention: list[float | None] = [None] * num_ranks
        rest = list(attention)
        names, sources = dict[str, None](), dict[str, None]()
        for traces in by_gpu.values():
            part = self._part(traces)
            if part is None:
                continue
            names[part.rates] = sources[part.source] = None
            for trace, *seconds in zip(traces, part.predicted_attention, part.predicted_rest, strict=True):
                attention[trace.rank], rest[trace.rank] = seconds
        return Seconds(", ".join(names), "; ".join(sources), attention, rest) if names else Seconds()

    def lines(self) -> list[str]:
        return [*self.unread, *(f"Predicted seconds: {line}." for line in self.notes.lines())]

    def _part(self, traces: Sequence[RankTrace]) -> Seconds | None:
        """Returns predicted seconds of ranks with one kind of GPU."""
        model, costs, device, profile = traces[0].model, traces[0].costs, traces[0].device, self.named
        if profile is None:
            set_in_run = self._loaded(traces[0].profile) if traces[0].profile else None
            is_of_device = set_in_run is not None and set_in_run.made.device == device
            profile = set_in_run if is_of_device else self._shipped(device)
        if profile is not None and model is not None and model.heads:
            tokens = np.array([trace.tokens for trace in traces])
            of_layers = self._costs(profile, model, model.heads[0])
            return Seconds(
                profile.source,
                f"the measured profile {profile.source} of {profile.made.device}",
                self._attention(profile, model, traces),
                of_layers.rest_seconds(tokens, model.recomputes_layers, model.backward_share).tolist(),
            )
        if costs is None:
            return None
        pair_seconds = costs.pair_forward_seconds + costs.pair_backward_seconds
        known = "sizes of the model are not known" if profile is not None else f"no profile was measured on {device}"
        return Seconds(
            costs.rates,
            f"the rates of an {costs.rates}, an estimate: {known}",
            [trace.work[trace.rank] * pair_seconds for trace in traces],
            [trace.tokens * costs.token_seconds for trace in traces],
        )

    def _load(self, path: str) -> ClusterProfile | None:
        """Returns the profile in a file; None, with a note, if it cannot be read here."""
        try:
            file = Path(path).resolve()
            if file.is_relative_to(self.folder.resolve()) and file.is_file():
                return ClusterProfile.load(file)
            reason = f"{path} is not a file in the folder of the run; give it with --cluster"
        except (OSError, ValueError) as error:
            reason = first_line(error)
        self.unread[f"The file of the setting kernel_times is not a profile to predict from: {reason}."] = None
        return None

    def _attention(self, profile: ClusterProfile, model: ModelSizes, traces: Sequence[RankTrace]) -> OfRanks:
        """Returns `[traces]` seconds of attention in all layers; None if tasks are not known."""
        total = np.zeros(len(traces))
        for kinds in zip(*(trace.kinds for trace in traces), strict=False):
            window = kinds[0].window_tokens
            heads = next((heads for heads in model.heads if heads.window_tokens == window), model.heads[0])
            is_full = not window or window >= traces[0].longest_document_tokens
            mask = CAUSAL_MASK if is_full else Mask(window, kinds[0].chunked)
            rows = [(place, *task) for place, kind in enumerate(kinds) for task in kind.tasks or ()]
            place, queries, before, one_group = np.array(rows, dtype=np.int64).reshape(-1, 4).T
            remote = np.zeros(len(rows), dtype=bool)  # who holds them makes no difference to kernels
            tiles = Tiles.of_tasks(mask, place, queries, before, one_group.astype(bool), remote)
            passes = self._costs(profile, model, heads).seconds(tiles)
            seconds = passes.forward * (1 + model.recomputes_attention) + passes.backward
            unknown = np.array([np.nan if kind.tasks is None else 0.0 for kind in kinds])
            total += kinds[0].layers * (unknown + np.bincount(tiles.rank, seconds, len(kinds)))
        return [None if np.isnan(one) else float(one) for one in total]

    def _costs(self, profile: ClusterProfile, model: ModelSizes, heads: HeadSizes) -> Costs:
        key = profile.source, model, heads
        if key in self._made:
            return self._made[key]
        size = ModelSize(
            layers=model.layers,
            hidden_size=model.hidden_size,
            vocabulary=round(model.head_weights / model.hidden_size),
            parameters=model.layer_weights + model.head_weights,
            layer_parameters=model.layer_weights,
            embedding_parameters=model.head_weights,
        )
        of_layer = Heads(heads.query, heads.key_value, heads.dim, heads.value_dim, heads.groups)
        simulated = SimulatedModel("", of_layer, size=size)
        self._made[key] = costs = Costs(profile, simulated, model.liger, self.notes, model.tensor_ranks)
        return costs


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
                [(label, float(parts[field])) for field, label in PART_NAMES.items()],
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
            [[label, epoch["imbalance_before"][name], epoch["imbalance"][name]] for label, name in rows],
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
                        None if choice["memory_bytes"] is None else choice["memory_bytes"] / GIB,
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
                    [way["label"], way["times_as_fast"], way["memory_bytes"] / GIB, max(sizes) / 1e6]
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
                float(way["memory_bytes"]) / GIB,
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
        notes=["Nothing is measured: work comes from the plan, seconds and memory are estimates."],
        tables=[
            Table(f"{world}: busiest rank over the mean", ["", "as given", way], rows),
            table_of_ways(world, content["ways"], "As distca simulate has it."),
        ],
    )
