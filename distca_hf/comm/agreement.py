"""Agreement: before anything is sent for a micro-batch, all ranks show each other that they are about to do the same.

All-to-alls whose two sides disagree corrupt data silently (gloo) or hang (NCCL). A few integers per micro-batch,
gathered while the batch is still being prepared, turn that into an error that names the ranks.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distca_hf.comm.transport import Gather, Traffic, Transport
from distca_hf.errors import DistCAError, PeerLostError, PlanMismatchError
from distca_hf.telemetry import get_logger


log = get_logger(__name__)


class Occasion(enum.IntEnum):
    """What a rank is about to do."""

    TAKE = 1  # hand out a micro-batch
    FORWARD = 2  # run a model on it
    PLAN = 4  # plan a batch that somebody else packed
    REPORT = 5  # log what was measured
    COMPARE = 6  # compare weights
    UNABLE = 3  # give up, because it cannot prepare the micro-batch


# Every agreement has this many integers, whatever it is about: two that meet by mistake must still be comparable.
WIDTH = 32
# The first of them: occasion, micro-batch, whether the rank wants to leave.
HEADER = 3


@dataclass
class Agreement:
    """Facts on their way to all ranks. By the way every rank tells whether it wants to leave: see `Traffic.leaving`.

    Attributes:
        facts: must be the same everywhere.
        told: numbers that may differ and are only passed on.
    """

    occasion: Occasion
    micro_batch: int
    facts: Mapping[str, int]
    told: Mapping[str, int]
    gather: Gather
    where: str
    traffic: Traffic

    @classmethod
    def start(
        cls,
        transport: Transport,
        occasion: Occasion,
        micro_batch: int,
        facts: Mapping[str, int],
        told: Mapping[str, int],
    ) -> "Agreement":
        """Starts showing `facts` and telling `told`; for one occasion both have the same names on all ranks."""
        where = f"micro-batch {micro_batch}"
        values = [occasion, micro_batch, transport.traffic.wants_to_leave, *facts.values(), *told.values()]
        padded = values + [0] * (WIDTH - len(values))
        gather = transport.gather(padded, where)
        return cls(occasion, micro_batch, facts, told, gather, f"rank {transport.rank}, {where}", transport.traffic)

    @classmethod
    def announce_unable(cls, transport: Transport, micro_batch: int) -> None:
        """Tells the other ranks, which go on to this micro-batch, that this one cannot. If they cannot be told, that
        is logged: the error that brought this about is the one to raise."""
        try:
            cls.start(transport, Occasion.UNABLE, micro_batch, {}, {}).gather.wait()
        except DistCAError as error:
            log.warning("the other ranks could not be told: %s", error)

    def wait(self) -> dict[str, list[int]]:
        """What every rank told.

        Raises:
            PeerLostError: a rank could not prepare its part.
            PlanMismatchError: ranks are about to do different things; lists ranks by value.
        """
        rows = self.gather.wait()
        self.traffic.leaving |= {rank: row[2] for rank, row in enumerate(rows) if row[2]}
        unable = [rank for rank, row in enumerate(rows) if row[0] == Occasion.UNABLE]
        if unable:
            ranks = ", ".join(map(str, unable))
            raise PeerLostError(f"{self.where}: rank {ranks} could not prepare its part; see the error there")
        doing = [f"{Occasion(row[0]).name.lower()} micro-batch {row[1]}" for row in rows]
        shown = {"what they do": doing}
        if len(set(doing)) == 1:
            shown = {name: [str(row[HEADER + at]) for row in rows] for at, name in enumerate(self.facts)}
        different = [f"{name} is {by_value(values)}" for name, values in shown.items() if len(set(values)) > 1]
        if different:
            raise PlanMismatchError(
                f"{self.where}: ranks disagree, nothing was sent: {'; '.join(different)}. All ranks need the same "
                "dataset, seed, settings and version of distca_hf, and must run the same micro-batches in one order."
            )
        first = HEADER + len(self.facts)
        return {name: [row[first + at] for row in rows] for at, name in enumerate(self.told)}


def by_value(values: Sequence[str]) -> str:
    """Which ranks have which value: "5 on rank 0, 2, 7 on rank 1"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items())
