"""Extra ranks: ranks without tokens that compute attention for those that train, and are numbered after them."""

from abc import ABC, abstractmethod

from distca_hf.cost import TokenBytes
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan
from distca_hf.topology import Topology


class ExtraRanks(ABC):
    """Ranks without tokens, as planning sees them."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of them."""

    @abstractmethod
    def rank_speeds(self, num_trainers: int) -> tuple[float, ...]:
        """Returns `[trainers + extra ranks]` relative speeds, 0 for a rank that computes no attention."""

    @abstractmethod
    def topology(self, trainers: Topology) -> Topology:
        """Returns the topology of the ranks that train, and of these."""

    @abstractmethod
    def plan(
        self,
        layout: Layout,
        head_groups: int = 1,
        *,
        topology: Topology | None = None,
        token_bytes: TokenBytes = TokenBytes(),  # noqa: B008 (immutable)
    ) -> Plan:
        """Plans a layout of the ranks that train, so that these compute a part of its attention.

        Args:
            layout: the ranks that train, and the tokens that each of them holds.
            head_groups: groups that heads may be divided into; 1 keeps heads together.
            topology: ranks of the layout that share a node; all of them, if it is not given.
            token_bytes: bytes of one token in one layer.

        Raises:
            ConfigError: head groups below 1, a topology of other ranks, or extra ranks on unknown nodes.
        """
