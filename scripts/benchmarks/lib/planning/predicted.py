"""Steps that were measured, and the same steps as `distca simulate` predicts them.

Rows are in `docs/benchmarks/measured-steps.json`, each with the page that has its command and versions. Times of one
row were measured beside each other, so ratios of its columns are compared.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distca_hf.analysis.find_model import read_model
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.request import preset
from distca_hf.analysis.simulate import peers
from distca_hf.analysis.simulate.costs import Costs
from distca_hf.analysis.simulate.load import Load
from distca_hf.analysis.simulate.model import SimulatedModel
from distca_hf.analysis.simulate.planned import ours
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.step import Training
from distca_hf.analysis.simulate.wires import Cluster
from distca_hf.arrays import IntArray
from distca_hf.layout import Layout
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.served import Servers, plan_served
from distca_hf.topology import Topology
from lib.documents import parse_documents
from lib.model import PRESETS


LAYERS, SLOW_CHUNKS = 4, 4
# Ratios that have to be right: name, numerator, denominators of which the first measured one is taken.
RATIOS = (
    ("local / ours", "local", ("recomputed",)),
    ("ours / ideal", "recomputed", ("ideal",)),
    ("packs kept / ideal", "fixed", ("ideal",)),
    ("local / packs kept", "local", ("fixed",)),
    ("Ulysses / ideal", "ulysses", ("ideal", "recomputed")),
    ("ring / ours", "ring", ("recomputed",)),
    ("gathered / ideal", "context", ("ideal",)),
    ("saved / recomputed", "saved", ("recomputed",)),
)


@dataclass(frozen=True)
class MeasuredRow:
    """Steps of the same documents, measured beside each other.

    Attributes:
        page: page of `docs/benchmarks` that has the command.
        gpus: data ranks.
        gpu: their kind.
        links: NVLink, or the speed of slower ones, as between nodes.
        documents: their lengths, as the programs that measure take them.
        model: shape of the layers, as these programs name it; none is four layers of an 8B Llama.
        words: of the head; 0 without a head and without an optimizer.
        reduce_bytes: of a number in sums of gradients.
        refetches: whether keys were sent for recomputation and for backward once more.
        milliseconds: of each way.
    """

    page: str
    gpus: int
    gpu: str
    links: str
    documents: str
    model: str
    words: int
    reduce_bytes: int
    refetches: bool
    milliseconds: Mapping[str, float]

    @property
    def slow(self) -> bool:
        """Whether all links were those between nodes."""
        return self.links != "NVLink"

    @property
    def document_tokens(self) -> IntArray:
        return np.array(parse_documents(self.documents))


def read_measured(path: Path) -> list[MeasuredRow]:
    """Reads measured rows."""
    return [
        MeasuredRow(
            row["page"],
            row["gpus"],
            row.get("gpu", "H200"),
            row["links"],
            row["documents"],
            row.get("model", ""),
            row.get("words", 0),
            row.get("reduce_bytes", 2),
            row.get("refetches", False),
            row["ms"],
        )
        for row in json.loads(path.read_text())["rows"]
    ]


def simulate_row(row: MeasuredRow, profile: ClusterProfile, notes: Notes | None = None) -> dict[str, float]:
    """Returns simulated milliseconds of every way that was measured."""
    notes = Notes() if notes is None else notes
    model = _model_of(row)
    costs = Costs(profile, model, False, notes)
    cluster = Cluster(profile, row.gpus, 1 if row.slow else row.gpus, notes)
    has_head = row.words > 0
    # Without a head the embedding alone is outside of layers.
    root_share = 1.0 if has_head else 0.5
    training = Training(costs, cluster, True, has_head, has_head, row.reduce_bytes, root_share)
    lengths, ranks = row.document_tokens, row.gpus
    topology = Topology(ranks, ranks)
    chunks, keeps = SLOW_CHUNKS if row.slow else 1, not row.refetches

    def placed(saves: bool) -> Load:
        request = SimulationRequest(model, ranks, int(lengths.sum()) // ranks, int(lengths.max()))
        return ours(costs, cluster, request.planner.plan(lengths), chunks, saves, keeps=keeps)

    def fixed(saves: bool) -> Load:
        packed = Layout.from_packs(peers.best_fit(lengths, ranks))
        plan = plan_by_moving(packed, model.heads.groups, topology=topology)
        return ours(costs, cluster, plan, chunks, saves, in_step=True, keeps=keeps)

    ways: dict[str, Callable[[], Load]] = {
        "local": lambda: peers.plain_packing(costs, lengths, ranks),
        "ideal": lambda: peers.even(costs, lengths, ranks),
        "ulysses": lambda: peers.ulysses(costs, cluster, lengths, ranks),
        "ring": lambda: peers.ring(costs, cluster, lengths, ranks),
        "context": lambda: peers.gathered(costs, cluster, [lengths], ranks),
        "recomputed": lambda: placed(False),
        "saved": lambda: placed(True),
        "fixed": lambda: fixed(False),
        "fixed_saved": lambda: fixed(True),
    }
    after = training.optimizer_seconds()
    return {name: 1e3 * (training.micro_batch_seconds(ways[name]()) + after) for name in row.milliseconds}


def _model_of(row: MeasuredRow) -> SimulatedModel:
    """Returns the layers that a row was measured with."""
    if not row.model:
        return SimulatedModel.of(preset("llama3-8b")).with_layers(LAYERS, row.words or None)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({**PRESETS[row.model], "dtype": "bfloat16"}))
        return SimulatedModel.of(read_model(config))


@dataclass(frozen=True)
class Compared:
    """One ratio, measured and simulated.

    Attributes:
        ratio: its name.
        row: of the measurement.
        measured, simulated: the ratio.
    """

    ratio: str
    row: MeasuredRow
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative error of the simulated ratio."""
        return self.simulated / self.measured - 1


def compare(row: MeasuredRow, simulated: Mapping[str, float]) -> list[Compared]:
    """Returns the ratios that a row has."""
    compared = []
    for name, above, below in RATIOS:
        base = next((way for way in below if way in row.milliseconds), None)
        if above in row.milliseconds and base is not None:
            ratios = (times[above] / times[base] for times in (row.milliseconds, simulated))
            compared.append(Compared(name, row, *ratios))
    return compared


def compare_servers(path: Path, profile: ClusterProfile) -> list[Compared]:
    """Returns the attention of a trainer and a server over that of the trainer alone, forward and backward, measured
    and simulated."""
    compared = []
    for row in json.loads(path.read_text())["servers"]["rows"]:
        measured = MeasuredRow("one layer", 2, "H200", row["links"], row["documents"], "", 0, 2, False, {})
        slow, notes = measured.slow, Notes()
        costs = Costs(profile, SimulatedModel.of(preset("llama3-8b")).with_layers(1), False, notes)
        layout = Layout.from_packs([parse_documents(row["documents"])])
        nodes = (1,) if slow else (0,)
        plan = plan_served(layout, Servers((1.0,), nodes=nodes), 8, topology=Topology(1, 1))
        cluster = Cluster(profile, 2, 1 if slow else 2, notes)
        served = ours(costs, cluster, plan, SLOW_CHUNKS if slow else 1, True).attention[0]
        alone = ours(costs, Cluster(profile, 1, 1, notes), plan_in_place(layout), 1, True).attention[0]
        for number, name in enumerate(("forward", "backward")):
            ratios = (
                row["served"][number] / row["alone"][number],
                float(getattr(served, name).max() / getattr(alone, name).max()),
            )
            compared.append(Compared(f"trainer and server / alone, {name}", measured, *ratios))
    return compared
