"""Plan request: the world, the model and the way of planning that `distca plan` is asked about."""

from dataclasses import dataclass
from typing import get_args

from distca_hf.config import OverlongPolicy
from distca_hf.errors import ConfigError
from distca_hf.insight.models import ModelShape
from distca_hf.layout import MAX_DOCUMENT_TOKENS
from distca_hf.topology import Topology


LAYOUTS = ("placed", "fixed")
OVERLONG = get_args(OverlongPolicy)
# More ranks than that have no table of bytes between each two of them.
MAX_RANKS = 8192
MAX_MICRO_STEPS = 1024


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for.

    Attributes:
        num_ranks, tokens_per_rank: the world: every rank holds up to so many tokens in a micro-step.
        ranks_per_node: ranks that share a node.
        micro_steps: micro-steps of an optimizer step, planned together.
        model: shape of its attention.
        layout: "placed" (distca chooses who holds which tokens) or "fixed" (documents in order, tasks move).
        overlong: what to do with a document longer than all ranks hold: "error", "split" or "truncate".
        bytes_limit: most bytes that a rank may send, and receive, in one layer's forward pass.

    Raises:
        ConfigError: a number is out of range, or there is no such layout or policy.
    """

    num_ranks: int
    tokens_per_rank: int
    ranks_per_node: int
    micro_steps: int
    model: ModelShape
    layout: str = "placed"
    overlong: str = "error"
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

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all ranks together hold in a micro-step."""
        return self.num_ranks * self.tokens_per_rank

    @property
    def topology(self) -> Topology:
        """Which ranks share a node."""
        return Topology(self.num_ranks, self.ranks_per_node)
