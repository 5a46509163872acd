"""Request: ranks, tokens, model and layout of `distca plan`, and plans for them.

The planners are those of training: `PlacedPlanner` for documents that are placed, `plan_by_moving` for packs of
others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np

from distca_hf.analysis.models import ModelShape
from distca_hf.arrays import IntArray
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig, OverlongPolicy
from distca_hf.data.epochs import Epoch
from distca_hf.errors import ConfigError
from distca_hf.layout import MAX_DOCUMENT_TOKENS
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.plan import Plan
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.topology import Topology


# Documents are placed, or documents in order stand for packs of others, whose tasks move.
LAYOUTS = ("placed", "fixed")
OVERLONG = get_args(OverlongPolicy)
# Maximum number of ranks: the table of bytes between each two of them has 64M entries.
MAX_RANKS = 8192
# Maximum number of micro-steps of an optimizer step, all of which are planned; far more than trainings use.
MAX_MICRO_STEPS = 1024


@dataclass(frozen=True)
class PlanRequest:
    """Ranks, model and layout of a training.

    Attributes:
        num_ranks, tokens_per_rank: number of ranks, and most tokens that each of them holds in a micro-step.
        ranks_per_node: ranks that share a node.
        micro_steps: micro-steps of an optimizer step, planned together.
        model: shape and size of the model.
        layout: "placed" (distca chooses the owner rank of every token) or "fixed" (documents in order, tasks move).
        overlong: policy for documents longer than all ranks hold: "error", "split" or "truncate".
        bytes_limit: most bytes that a rank may send, and receive, in one layer's forward pass.

    Raises:
        ConfigError: a number is out of range, the layout or policy is unknown, or a variable of the environment has an
            invalid value.
        PackingError: the environment names a table of kernel times that cannot be read.
    """

    num_ranks: int
    tokens_per_rank: int
    ranks_per_node: int
    micro_steps: int
    model: ModelShape
    layout: str = "placed"
    overlong: OverlongPolicy = "error"
    bytes_limit: int | None = None

    def __post_init__(self) -> None:
        for option, value, most in (
            ("--ranks", self.num_ranks, MAX_RANKS),
            ("--tokens-per-rank", self.tokens_per_rank, MAX_DOCUMENT_TOKENS),
            ("--ranks-per-node", self.ranks_per_node, MAX_DOCUMENT_TOKENS),
            ("--micro-steps", self.micro_steps, MAX_MICRO_STEPS),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{option} {value} must be between 1 and {most}")
        if self.bytes_limit is not None and self.bytes_limit < 0:
            raise ConfigError(f"--bytes-limit {self.bytes_limit} must be at least 0")
        for option, name, names in (("--layout", self.layout, LAYOUTS), ("--overlong", self.overlong, OVERLONG)):
            if name not in names:
                raise ConfigError(f"{option} {name} must be one of {', '.join(names)}")
        self.planner  # noqa: B018  raises if a variable of the environment has an invalid value

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all ranks together hold in a micro-step."""
        return self.planner.capacity_tokens

    @property
    def topology(self) -> Topology:
        """Nodes of the ranks."""
        return self.planner.config.topology(self.num_ranks)

    @cached_property
    def planner(self) -> PlacedPlanner:
        """Planner of a training with these numbers. All other settings come from the environment, as in training."""
        config = DistCAConfig(
            tokens_per_rank=self.tokens_per_rank, overlong=self.overlong, ranks_per_node=self.ranks_per_node
        )
        planner = PlacedPlanner(config, self.num_ranks, self.model.heads.groups)
        planner.kernel_times  # noqa: B018  read before anything is timed
        return planner


def plan_micro_steps(request: PlanRequest, micro_batches: Sequence[IntArray]) -> list[Plan]:
    """Plans every micro-step.

    Args:
        request: ranks, model and layout.
        micro_batches: for each `[documents]` lengths in the order of packing; at most as many tokens as all ranks
            hold.

    Raises:
        PackingError: lengths are out of range.
        PlanError: the layout is fixed, and no plan meets the limit of bytes.
    """
    if request.layout == "fixed":
        return [_plan_fixed(request, batch) for batch in micro_batches]
    planner = request.planner
    lengths = np.concatenate(micro_batches)
    as_packed = Epoch(np.arange(len(lengths)), np.cumsum([0] + [len(batch) for batch in micro_batches]))
    step = planner.regroup(as_packed, lengths, len(micro_batches))
    numbers = range(step.num_micro_batches)
    return [planner.plan(lengths[step.micro_batch(number)], step.layout(number)) for number in numbers]


def _plan_fixed(request: PlanRequest, document_tokens: IntArray) -> Plan:
    """Plans documents in order, and moves tasks.

    In training another packer decides which documents each rank holds, and each of its packs holds whole documents.
    """
    return plan_by_moving(
        fill_in_order(document_tokens, request.num_ranks),
        request.model.heads.groups,
        topology=request.topology,
        token_bytes=request.model.token_bytes,
        bytes_limit=request.bytes_limit,
    )
