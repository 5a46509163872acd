"""Steps that were measured, and the same steps as `distca simulate` predicts them.

Rows are in `docs/benchmarks/measured-steps.json`, each with the page that has its command and versions. Times of one
row were measured in one run, so ratios of its columns are compared.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distca_hf.analysis.decoder_size import HALF_BYTES
from distca_hf.analysis.find_model import read_model
from distca_hf.analysis.models import SimulatedModel
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, find_profile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.simulate import ways
from distca_hf.analysis.simulate.costs import Costs
from distca_hf.analysis.simulate.load import Load, ours, rows_placed
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.step import Training
from distca_hf.analysis.simulate.wires import Cluster
from distca_hf.arrays import IntArray
from distca_hf.batches.placed import GivenPlans
from distca_hf.config import DistCAConfig
from distca_hf.layout import Layout, Topology
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from lib.documents import parse_documents
from lib.model import PRESETS
from lib.planning.bench_ways import even, gathered
from lib.planning.planners import llama_part
from lib.tables import figure, table_of


LAYERS, SLOW_CHUNKS = 4, 4
# Seconds in which tasks of these steps were planned at the first layer: of any number of ranks, and of each rank
# (docs/benchmarks/planning.md).
PLANNING_SECONDS, PLANNING_SECONDS_PER_RANK = 3e-3, 0.5e-3
# Ratios that have to be right: name, numerator, denominators of which the first measured one is taken.
RATIOS = (
    ("local / ours", "local", ("recomputed",)),
    ("ours / ideal", "recomputed", ("ideal",)),
    ("tasks moved / ideal", "fixed", ("ideal",)),
    ("local / tasks moved", "local", ("fixed",)),
    ("given / ideal", "given", ("ideal",)),
    ("Ulysses / ideal", "ulysses", ("ideal", "recomputed")),
    ("ring / ours", "ring", ("recomputed",)),
    ("gathered / ideal", "context", ("ideal",)),
    ("saved / recomputed", "saved", ("recomputed",)),
    ("with servers / even", "served", ("served_ideal",)),
    ("alone / with servers", "saved", ("served",)),
)
# Modes of attention_step.py and their names in the simulation, and ratios of these.
SIMULATED_NAMES = {"placed": "recomputed"} | {name: name for name in ("local", "ideal", "ulysses", "context")}
MODE_RATIOS = (("local", "placed"), ("placed", "ideal"), ("ulysses", "ideal"), ("context", "ideal"))
Ratios = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class MeasuredRow:
    """Steps of the same documents, measured in one run."""

    page: str  # page of `docs/benchmarks` that has the command
    gpus: int  # data ranks
    gpu: str  # kind of the GPUs
    links: str  # NVLink, or the speed of slower ones, as between nodes
    documents: str  # their lengths, as the programs that measure take them
    ms: Mapping[str, float]  # milliseconds of each way
    model: str = ""  # shape of the layers, as these programs name it; none is four layers of an 8B Llama
    words: int = 0  # vocabulary of the head; 0 without a head and without an optimizer
    reduce_bytes: int = 2  # bytes of a number in sums of gradients
    refetches: bool = False  # whether keys were sent for recomputation and for backward once more
    servers: int = 0  # attention servers in addition to the data ranks
    # Whether long prefixes were called as they are now (`distca_hf/kernels/flash4.py`), forward and backward
    heads_apart: bool = False

    @property
    def slow(self) -> bool:
        """Returns whether all links were those between nodes."""
        return self.links != "NVLink"


@dataclass(frozen=True)
class Setting:
    """A benchmark step, as far as its simulation depends on it."""

    model: SimulatedModel  # layers of the step
    document_tokens: IntArray  # lengths of all documents of a micro-step
    data_ranks: int  # GPUs, or groups of tensor ranks, that hold other documents; all on one host
    slow: bool  # whether all links are as between nodes
    reduce_bytes: int = 2  # bytes of a number in sums of gradients
    has_head: bool = False  # whether the benchmark has head, loss and optimizer
    root_share: float = 0.5  # part of the weights outside of layers that the benchmark has
    tensor_ranks: int = 1  # GPUs that divide every layer
    replicas: int = 1  # groups of data ranks that shard the weights alike (HSDP)
    liger: bool = False  # whether layers are Liger's
    checkpointing: str = "full"  # as programs that measure take it
    keeps: bool = True  # whether keys are kept until backward, and not sent once more
    chunks: int = 1  # parts that rows of other ranks come in
    servers: int = 0  # attention servers in addition to the data ranks


@dataclass(frozen=True)
class ReplicatedTraining(Training):
    """Training whose weights are gathered inside of a replica, and whose gradients are summed over all of them."""

    replicas: int = 1
    has_head: bool = True  # whether the benchmark has head, loss and optimizer
    reduce_bytes: int = HALF_BYTES  # bytes of a number in sums of gradients over ranks
    root_share: float = 1.0  # part of the weights outside of layers that the benchmark has

    @property
    def root_bytes(self) -> float:
        """Bytes of the weights outside of layers that the benchmark has."""
        return super().root_bytes * self.root_share

    def head_seconds(self, load: Load) -> float:
        """Returns the seconds of head and loss, if they are there."""
        return super().head_seconds(load) if self.has_head else 0.0

    def optimizer_seconds(self) -> float:
        """Returns the seconds of the optimizer, if it is there."""
        return super().optimizer_seconds() if self.has_head else 0.0

    @property
    def shards(self) -> int:
        """Returns the ranks that a replica is divided between."""
        return self.cluster.num_ranks // self.replicas

    def gather_seconds(self, weight_bytes: float) -> float:
        """Returns the seconds of gathering so many bytes of weights."""
        return self._some(self.shards).all_gather(weight_bytes)

    def reduce_seconds(self, weight_bytes: float) -> float:
        """Returns the seconds of summing gradients of so many bytes of weights."""
        num_bytes = weight_bytes * self.reduce_bytes / HALF_BYTES
        replicas, shard_bytes = self._some(self.replicas), num_bytes / self.shards
        over_replicas = replicas.reduce_scatter(shard_bytes) + replicas.all_gather(shard_bytes)
        return self._some(self.shards).reduce_scatter(num_bytes) + over_replicas

    def _some(self, ranks: int) -> Cluster:
        """Returns so many of the ranks. All of them are on one host, or each on another one."""
        return replace(self.cluster, num_ranks=ranks, ranks_per_node=min(ranks, self.cluster.ranks_per_node))


def simulate_row(row: MeasuredRow, profile: ClusterProfile, notes: Notes | None = None) -> dict[str, float]:
    """Returns simulated milliseconds of every way that was measured."""
    setting = Setting(
        model_of(PRESETS[row.model]) if row.model else llama_part(LAYERS, row.words or None),
        *(np.array(parse_documents(row.documents)), row.gpus, row.slow, row.reduce_bytes),
        has_head=row.words > 0,
        root_share=1.0 if row.words else 0.5,  # without a head only the embedding is outside of layers
        keeps=not row.refetches,
        chunks=SLOW_CHUNKS if row.slow else 1,
        servers=row.servers,
    )
    return simulate(setting, row.ms, profile, notes or Notes())


def simulate(setting: Setting, names: Iterable[str], profile: ClusterProfile, notes: Notes) -> dict[str, float]:
    """Returns simulated milliseconds of ways by their names in rows. Attention outputs are saved in all of them if
    the setting says so."""
    model, ranks, lengths = setting.model, setting.data_ranks, setting.document_tokens
    if setting.slow:
        profile = replace(profile, within_node=profile.between_nodes)
    costs = Costs(profile, model, setting.liger, notes, setting.tensor_ranks)
    cluster = Cluster(profile, ranks, 1 if setting.slow else ranks, notes)
    training = ReplicatedTraining(
        *(costs, cluster, setting.checkpointing != "none"),
        replicas=setting.replicas,
        has_head=setting.has_head,
        reduce_bytes=setting.reduce_bytes,
        root_share=setting.root_share,
    )
    topology, chunks, gpus, total = Topology(ranks, ranks), setting.chunks, ranks + setting.servers, int(lengths.sum())
    gather_seconds = training.gather_seconds(costs.layer_weight_bytes)
    load_of = partial(ours, costs, keeps=setting.keeps, gather_seconds=gather_seconds)

    def placed(saves: bool) -> Load:
        size, sizes = setting.tensor_ranks, (total // ranks, int(lengths.max()))
        request = SimulationRequest(model, ranks * size, *sizes, tensor_ranks=size)
        return load_of(cluster, request.planner.plan(lengths), chunks, saves)

    def fixed(saves: bool) -> Load:
        packed = Layout.from_packs(ways.best_fit(lengths, ranks))
        plan = plan_by_moving(packed, costs.head_groups, topology=topology)
        planning = PLANNING_SECONDS + PLANNING_SECONDS_PER_RANK * ranks
        return load_of(cluster, plan, chunks, saves, planning_seconds=planning)

    def given() -> Load:
        home = Layout.from_packs(ways.best_fit(lengths, ranks))
        plans = GivenPlans(topology, costs.head_groups, cost=model.pass_costs.both)
        layout = plans.layout(home)
        load = load_of(cluster, plans.plan(layout), chunks, False)
        return rows_placed(costs, cluster, home, load, layout, loss_is_placed=False)

    def served() -> Load:
        planner = SimulationRequest(model, gpus, total // gpus, int(lengths.max())).planner_with_servers(
            setting.servers
        )
        with_servers = replace(cluster, num_ranks=gpus, ranks_per_node=1 if setting.slow else gpus)
        return load_of(with_servers, planner.plan(lengths), chunks, True)

    def served_ideal() -> Load:
        # All GPUs attend, and the data ranks do all else.
        tokens = np.array([total // ranks] * ranks + [0] * setting.servers)
        return replace(even(costs, lengths, gpus), tokens=tokens, saves_attention=True)

    loads: dict[str, Callable[[], Load]] = {
        "local": lambda: ways.plain_packing(costs, lengths, ranks),
        "ideal": lambda: even(costs, lengths, ranks),
        "ulysses": lambda: ways.ulysses(costs, cluster, lengths, ranks),
        "ring": lambda: ways.ring(costs, cluster, lengths, ranks),
        "context": lambda: gathered(costs, cluster, [lengths], ranks),
        "recomputed": lambda: placed(False),
        "saved": lambda: placed(True),
        "fixed": lambda: fixed(False),
        "fixed_saved": lambda: fixed(True),
        "given": given,
        "served": served,
        "served_ideal": served_ideal,
    }

    def milliseconds(name: str) -> float:
        load = loads[name]()
        if setting.checkpointing == "saved":
            load = replace(load, saves_attention=True)
        return 1e3 * (training.micro_batch_seconds(load) + training.optimizer_seconds())

    return {name: milliseconds(name) for name in names}


def model_of(config: Mapping[str, Any]) -> SimulatedModel:
    """Returns the model of a configuration, by the names of its config.json."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps({**config, "dtype": "bfloat16"}))
        return SimulatedModel.of(read_model(file, tries=False))


@dataclass(frozen=True)
class Compared:
    """One ratio, measured and simulated."""

    ratio: str  # name of the ratio
    row: MeasuredRow
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Returns the error of the simulated ratio, as a part of the measured one."""
        return self.simulated / self.measured - 1


def compare(row: MeasuredRow, simulated: Mapping[str, float]) -> list[Compared]:
    """Returns the ratios that a row has."""
    bases = {name: next((way for way in below if way in row.ms), None) for name, _, below in RATIOS}
    return [
        Compared(name, row, row.ms[above] / row.ms[base], simulated[above] / simulated[base])
        for name, above, _ in RATIOS
        if above in row.ms and (base := bases[name])
    ]


def compare_servers(path: Path, profile: ClusterProfile) -> list[Compared]:
    """Returns the attention of a trainer and a server over that of only the trainer, forward and backward, measured
    and simulated."""
    compared = []
    for row in json.loads(path.read_text())["servers"]["rows"]:
        measured = MeasuredRow("one layer", 2, "H200", row["links"], row["documents"], {})
        slow, notes = measured.slow, Notes()
        costs = Costs(profile, llama_part(1), False, notes)
        # The server was a rank without tokens, and the plan that of packs whose tasks move.
        documents = parse_documents(row["documents"])
        layout, alone_layout = Layout.from_packs([documents, []]), Layout.from_packs([documents])
        plan = plan_by_moving(layout, costs.head_groups, topology=Topology(2, 2))
        cluster = Cluster(profile, 2, 1 if slow else 2, notes)
        served = ours(costs, cluster, plan, SLOW_CHUNKS if slow else 1, True, gather_seconds=0.0).attention[0]
        alone = ours(costs, Cluster(profile, 1, 1, notes), plan_in_place(alone_layout), 1, True).attention[0]
        for number, name in enumerate(("forward", "backward")):
            simulated = float(getattr(served, name).max() / getattr(alone, name).max())
            ratio = f"trainer and server / alone, {name}"
            compared.append(Compared(ratio, measured, row["served"][number] / row["alone"][number], simulated))
    return compared


def why_not_simulated(options: argparse.Namespace) -> str | None:
    """Returns why a measured step is not simulated; None if it is. With divided experts a layer's time depends on how
    many tokens each of them gets, and profiles have no all-to-all in the midst of a layer."""
    reasons = {
        f"experts that {options.ep_size} ranks divide are not simulated": options.ep_size > 1,
        "the part of one rank is not simulated": options.share_tokens,
        "attention outputs that wait on the host are not simulated": options.checkpointing == "offloaded",
        "steps are simulated under FSDP2: leave --no-fsdp out": not options.fsdp,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def ratios_of(options: argparse.Namespace, config: Any, seconds: Mapping[str, float], data_ranks: int) -> Ratios:
    """Returns each ratio of two modes, measured and simulated from the profile of `--cluster`.

    Args:
        seconds: measured steps of the modes, by name.
        data_ranks: that share the documents.
    """
    notes, text = Notes(), config.get_text_config()
    setting = Setting(
        model_of(config.to_dict()),
        np.array(options.lengths),
        data_ranks,
        slow=os.environ.get("NCCL_P2P_DISABLE") == "1",
        reduce_bytes=options.reduce_dtype.itemsize,
        root_share=1.0 if text.tie_word_embeddings else 0.5,
        tensor_ranks=options.tp_size,
        replicas=options.dp_replicate_size,
        liger=options.liger,
        checkpointing=options.checkpointing,
        keeps=DistCAConfig().kv_residency != "refetch",
        chunks=DistCAConfig().num_chunks(Topology(data_ranks, data_ranks)),
    )
    known = [name for name in seconds if name in SIMULATED_NAMES]
    simulated = simulate(setting, [SIMULATED_NAMES[name] for name in known], find_profile(options.cluster), notes)
    return {
        f"{above} ÷ {below}": (
            seconds[above] / seconds[below],
            simulated[SIMULATED_NAMES[above]] / simulated[SIMULATED_NAMES[below]],
        )
        for above, below in MODE_RATIOS
        if above in known and below in known
    }


def table_of_ratios(ratios: Ratios) -> str:
    """Returns a Markdown table with a row for each ratio."""
    figures = {name: dict(zip(("measured", "simulated"), both, strict=True)) for name, both in ratios.items()}
    return table_of(
        {
            "measured": figure("measured", 1, 3),
            "simulated": figure("simulated", 1, 3),
            "simulated ÷ measured": lambda of: f"{of['simulated'] / of['measured'] - 1:+.1%}",
        },
        figures,
        "ratio",
    )
