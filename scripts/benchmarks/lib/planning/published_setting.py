"""The published evaluation of DistCA, as far as it can be simulated: its models, GPUs, batches and baseline.

From arXiv 2510.18121, section 6 (3D parallelism: tensor and data parallelism here, without stages): 8 GPUs of a node
divide layers, nothing is checkpointed, a batch has so many documents' worth of tokens. The baseline is a packing by
work (WLB-LLM) whose best degree of context parallelism is taken at every point.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca_hf.analysis.decoder_size import HALF_BYTES
from distca_hf.analysis.models import SimulatedModel, llama_shape, preset
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.analysis.simulate import ways
from distca_hf.analysis.simulate.costs import Costs
from distca_hf.analysis.simulate.load import Attention, Load, RowBytes, exchange_seconds, kernel_seconds, nothing_sent
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.simulation import Simulation
from distca_hf.analysis.simulate.wires import Cluster
from distca_hf.arrays import IntArray
from lib.planning.bench_ways import gathered
from lib.planning.published_greedy import PAPER_TOLERANCE, plan_published_greedy


TENSOR_RANKS = 8
GPUS = (64, 128, 256)
K = 1024
# Bytes a second that a GPU there sends to other nodes.
PUBLISHED_LINK_RATE = 50e9
# Batch sizes by context, for 64, 128 and 256 GPUs (table 3).
MODELS = {
    "8B": (
        SimulatedModel.of(preset("llama3-8b")),
        {128 * K: (8, 16, 32), 256 * K: (4, 8, 16), 512 * K: (2, 4, 8)},
    ),
    "34B": (
        SimulatedModel.of(llama_shape("llama-34b", (64, 16, 128), (48, 8192, 22_016, 32_000))),
        {128 * K: (4, 8, 16), 256 * K: (2, 4, 8), 512 * K: (2, 4, 8)},
    ),
}
# Speed-ups over the baseline in the paper's text, of both models.
PUBLISHED = {"pretrain": (1.07, 1.20), "prolong": (1.05, 1.12)}


@dataclass(frozen=True)
class Point:
    """One point of the evaluation, in seconds of a batch."""

    baseline: float
    published: float
    ours: float


def with_faster_links(profile: ClusterProfile) -> ClusterProfile:
    """Returns the profile with the links between nodes of the published evaluation."""
    links = profile.between_nodes
    assert links is not None
    factor = links.num_bytes[-1] / links.exchange[-1] / PUBLISHED_LINK_RATE
    names = ("exchange", "all_gather", "reduce_scatter", "one_way", "to_next")
    scaled: dict[str, Any] = {name: tuple(factor * seconds for seconds in getattr(links, name)) for name in names}
    return replace(profile, between_nodes=replace(links, **scaled))


def published(costs: Costs, cluster: Cluster, document_tokens: IntArray, tolerance: float) -> Load:
    """Returns the load of the published planner.

    Two halves of a micro-batch take turns there: while rows of one are sent, the other one is computed. So an exchange
    is hidden as long as kernels take longer, and delays them.
    """
    token_bytes = costs.model.heads.token_bytes(HALF_BYTES)
    plan = plan_published_greedy(document_tokens, cluster.num_ranks, token_bytes, tolerance)
    rows = RowBytes.of(costs, cluster, plan)
    seconds = exchange_seconds(cluster, rows.forward_bytes)
    layer = costs.layer(plan.layout.rank_tokens)
    kinds = []
    for mask, layers in costs.model.masks:
        local, remote = kernel_seconds(costs, plan, mask)
        kernels = local + remote
        if mask.window_tokens is not None:
            kinds.append(nothing_sent(kernels, layers))
            continue
        delay = cluster.attention_beside * seconds
        forward = np.maximum(kernels.forward, seconds - layer.forward) + delay
        # Queries, keys, values, outputs and their gradients: twice the bytes of forward.
        backward = np.maximum(kernels.backward, 2 * seconds - layer.backward) + 2 * delay
        kinds.append(Attention(forward, kernels.forward, backward, seconds, 2 * seconds, layers))
    return Load(plan.layout.rank_tokens, kinds, rows.most_bytes)


def simulate_point(
    name: str, document_tokens: IntArray, context: int, gpus: int, profile: ClusterProfile, batches: int
) -> Point:
    """Simulates one point: the baseline, the published system, and ours on the same batches."""
    model, sizes = MODELS[name]
    ranks = gpus // TENSOR_RANKS
    tokens = sizes[context][GPUS.index(gpus)] * context // ranks
    request = SimulationRequest(
        model, gpus, tokens, context, tensor_ranks=TENSOR_RANKS, checkpointing="none", batches=batches
    )
    simulation = Simulation(request, profile)
    training, costs, cluster = simulation.training, simulation.costs, simulation.cluster
    placed = next(way for way in simulation.ways() if way.key == "placed")
    groups = [group for group in (1, 2, 4, 8, 16, 32) if group <= ranks and group * tokens >= context]
    seconds: list[list[float]] = []
    for step in request.steps(document_tokens):
        packed = [
            gathered(costs, cluster, ways.longest_first(costs, step[0], ranks // group), group) for group in groups
        ]
        theirs = published(costs, cluster, step[0], PAPER_TOLERANCE)
        each = [training.micro_batch_seconds(load) for load in (*packed, theirs)]
        seconds.append([*each, simulation.step_seconds(placed, step)[0] - training.optimizer_seconds()])
    *baseline, of_paper, ours = np.mean(seconds, axis=0).tolist()
    return Point(min(baseline), of_paper, ours)
