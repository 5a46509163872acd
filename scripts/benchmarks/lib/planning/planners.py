"""Planners as benchmarks call them, bytes of the busiest rank, and tables that are printed row by row."""

import statistics
from functools import cache
from heapq import heapreplace

import numpy as np

from distca_hf.analysis.epoch import largest_rank_bytes
from distca_hf.analysis.models import SimulatedModel, llama_shape, preset
from distca_hf.arrays import IntArray
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, causal_pairs
from distca_hf.layout import MAX_DOCUMENT_TOKENS, Topology
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.plan import Plan
from distca_hf.planning.rebalance import plan_by_moving
from lib.tables import head, row


K = 1024
LLAMA = preset("llama3-8b").token_bytes
HEAD_GROUPS = preset("llama3-8b").heads.groups
RANKS_PER_NODE = 8


def llama_part(layers: int, words: int | None = None) -> SimulatedModel:
    """Returns some layers of Llama-3-8B, and another vocabulary if one is given."""
    model = SimulatedModel.of(preset("llama3-8b"))
    heads, whole = model.heads, model.size
    sizes = layers, whole.hidden_size, round(whole.mlp_size(heads)), words or whole.vocabulary
    return SimulatedModel.of(llama_shape(model.name, (heads.query, heads.key_value, heads.dim), sizes))


@cache
def placed_planner(topology: Topology, layer_masks: LayerMasks = CAUSAL_LAYERS) -> PlacedPlanner:
    """Returns the planner of training; ranks hold as many tokens as a batch brings."""
    config = DistCAConfig(tokens_per_rank=MAX_DOCUMENT_TOKENS, ranks_per_node=topology.ranks_per_node)
    return PlacedPlanner(config, topology.num_ranks, HEAD_GROUPS, layer_masks=layer_masks)


def plan_placed(documents: IntArray, topology: Topology) -> Plan:
    """Returns a plan as the loader makes it, for documents of so many tokens."""
    return placed_planner(topology).plan(documents)


def plan_fixed(documents: IntArray, topology: Topology) -> Plan:
    """Returns a plan as for packs of others: documents of so many tokens stay in order, and tasks move."""
    return plan_by_moving(
        fill_in_order(documents, topology.num_ranks), HEAD_GROUPS, topology=topology, token_bytes=LLAMA
    )


def whole_documents(document_tokens: IntArray, num_ranks: int) -> list[IntArray]:
    """Returns the numbers of the documents of each rank: the longest first, each to the rank with least work (Graham
    1969); documents of one length stay in order."""
    least = [(0, rank) for rank in range(num_ranks)]  # a heap: the least loaded rank is first
    numbers: list[list[int]] = [[] for _ in range(num_ranks)]
    for number in np.argsort(-document_tokens, kind="stable").tolist():
        work, rank = least[0]
        heapreplace(least, (work + causal_pairs(0, int(document_tokens[number])), rank))
        numbers[rank].append(number)
    return [np.array(held, dtype=np.int64) for held in numbers]


def between_nodes(sent: IntArray, topology: Topology) -> int:
    """Returns the most bytes that a rank sends to other nodes, or receives from them, of `[source, destination]`
    bytes."""
    crosses = topology.node_of[:, None] != topology.node_of[None, :]
    return largest_rank_bytes(sent * crosses)


def gigabytes(number: float) -> str:
    """Returns bytes in GB, with three digits."""
    return f"{number / 1e9:.3f}"


def mean_over(values: list[float]) -> str:
    """Returns the mean, with two digits; "-" of nothing."""
    return f"{statistics.mean(values):.2f}" if values else "-"


def table(title: str, *columns: str) -> None:
    """Prints the title and the head of a table, whose rows follow as they are measured."""
    print(f"\n## {title}\n\n{head(columns, len(columns))}", flush=True)


def print_row(*cells: object) -> None:
    """Prints a row of a table."""
    print(row(cells), flush=True)
