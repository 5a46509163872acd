"""Figures: balance and bytes of a window of micro-steps, counted alike for plans and baselines."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline
from distca_hf.topology import Topology


@dataclass(frozen=True)
class Figures:
    """What ranks hold, compute and send, all micro-steps of an optimizer step together.

    Attributes:
        tokens_min, tokens_max: tokens of the emptiest and the fullest rank in any micro-step.
        imbalance: max/mean work, 1.0 is perfect; of several micro-steps, the sum of the heaviest ranks over the sum of
            the means.
        bytes_total: bytes between ranks, forward, of one layer.
        bytes_max_rank: what the busiest rank sends or receives, whichever is more; summed over micro-steps.
        bytes_internode_max: the same, of what goes from one node to another.
    """

    tokens_min: int
    tokens_max: int
    imbalance: float
    bytes_total: int
    bytes_max_rank: int
    bytes_internode_max: int


def figures_of(micro_steps: Sequence[Baseline], topology: Topology) -> Figures:
    """Figures of the micro-steps of one optimizer step."""
    total_work = sum(int(step.work.sum()) for step in micro_steps)
    heaviest_work = sum(int(step.work.max()) for step in micro_steps)
    crosses = topology.node_of[:, None] != topology.node_of[None, :]
    return Figures(
        tokens_min=min(int(step.tokens.min()) for step in micro_steps),
        tokens_max=max(int(step.tokens.max()) for step in micro_steps),
        imbalance=heaviest_work * topology.num_ranks / total_work if total_work else 1.0,
        bytes_total=sum(int(step.bytes_between.sum()) for step in micro_steps),
        bytes_max_rank=sum(_busiest(step.bytes_between) for step in micro_steps),
        bytes_internode_max=sum(_busiest(step.bytes_between * crosses) for step in micro_steps),
    )


def _busiest(bytes_between: np.ndarray) -> int:
    """Most bytes that any rank sends or receives."""
    return int(max(bytes_between.sum(axis=1).max(), bytes_between.sum(axis=0).max()))
