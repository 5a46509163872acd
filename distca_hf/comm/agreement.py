"""Agreement: before anything is sent for a micro-batch, all ranks show each other that they are about to do the same.

All-to-alls whose two sides disagree corrupt data silently (gloo) or hang (NCCL). A few integers per micro-batch,
gathered while the batch is still being prepared, turn that into an error that names the ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from distca_hf.comm.transport import Gather, Transport
from distca_hf.errors import PeerLostError, PlanMismatchError


READY = "ready"


@dataclass
class Agreement:
    """Facts on their way to all ranks.

    Attributes:
        facts: must be the same everywhere; `ready` 0 says that a rank could not prepare its part.
        told: numbers that may differ and are only passed on.
    """

    facts: Mapping[str, int]
    told: Mapping[str, int]
    gather: Gather
    where: str

    @classmethod
    def start(cls, transport: Transport, facts: Mapping[str, int], told: Mapping[str, int], where: str) -> "Agreement":
        """Starts showing `facts` and telling `told` to all ranks; both have the same names in the same order
        everywhere."""
        return cls(facts, told, transport.gather([*facts.values(), *told.values()], where), where)

    def wait(self) -> dict[str, list[int]]:
        """What every rank told.

        Raises:
            PeerLostError: a rank could not prepare its part.
            PlanMismatchError: the facts differ; lists ranks by value.
        """
        rows = self.gather.wait()
        shown = [dict(zip(self.facts, row, strict=False)) for row in rows]
        failed = [rank for rank, facts in enumerate(shown) if facts.get(READY) == 0]
        if failed:
            ranks = ", ".join(str(rank) for rank in failed)
            raise PeerLostError(f"{self.where}: rank {ranks} could not prepare its part; see the error there")
        different = [name for name in self.facts if len({facts[name] for facts in shown}) > 1]
        if different:
            described = "; ".join(f"{name} is {_by_value(name, shown)}" for name in different)
            raise PlanMismatchError(
                f"{self.where}: ranks disagree, nothing was sent: {described}. All ranks need the same dataset, "
                "seed, settings and version of distca_hf, and must take the same micro-batches in the same order."
            )
        first = len(self.facts)
        return {name: [row[first + at] for row in rows] for at, name in enumerate(self.told)}


def _by_value(name: str, shown: list[dict[str, int]]) -> str:
    groups: dict[int, list[int]] = {}
    for rank, facts in enumerate(shown):
        groups.setdefault(facts[name], []).append(rank)
    return ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in groups.items())
