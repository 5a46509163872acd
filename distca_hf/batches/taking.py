"""Taking: ranks compare versions, settings and the micro-batch before they take it.

Versions and settings are compared for given batches, too. Where ranks without tokens take part, plans are posted to
them, and placed batches are planned again when others come.
"""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version

from distca_hf.batches.prepare import Prepared, Preparer
from distca_hf.comm.agreement import Agreement, Occasion, labels_of
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.data.collate import MODULUS, sum_of
from distca_hf.errors import PlanMismatchError, and_more
from distca_hf.planning.plan import ExtraRanks, Plan
from distca_hf.runtime.layer_kinds import Planned, Posted
from distca_hf.runtime.live_plan import LivePlan, PlanUse
from distca_hf.telemetry import get_logger
from distca_hf.version import __version__


log = get_logger(__name__)

# Packages whose versions decide the numbers of a rank, or the order of its collective calls.
PACKAGES = ("torch", "transformers", "accelerate")
# Micro-batches in a row that may be handed out unused, to be looked at, before a warning.
UNUSED_BATCHES = 4


def shared_facts(config: DistCAConfig) -> dict[str, object]:
    """Returns versions of packages, and settings, by name."""
    return {**_versions(), **config.shared_settings()}


def agree_to_take(transport: Transport, prepared: Prepared, number: int, facts: Mapping[str, object]) -> Agreement:
    """Starts showing the other ranks which micro-batch this one takes."""
    facts = {
        **facts,
        "documents of the micro-batch": prepared.documents_checksum,
        "fingerprint of the plan": prepared.fingerprint,
    }
    numbers = {
        "label_tokens": prepared.label_tokens,
        "cuts": len(prepared.cuts),
        "around_cuts": sum_of(prepared.cuts),
    }
    return Agreement.start(transport, Occasion.TAKE, number, facts, numbers)


class PostingTransport(ABC):
    """Transport of a rank that trains, which also reaches ranks without tokens: plans are posted to them.

    Attributes:
        among_trainers: transport that reaches only the ranks that train.
        extra_ranks: ranks without tokens that take part now; None if there are none.
        roster: number that is another one whenever other ranks take part.
    """

    among_trainers: Transport
    extra_ranks: ExtraRanks | None
    roster: int

    @abstractmethod
    def post(self, plan: Plan | None, micro_batch: int, num_chunks: int) -> Posted:
        """Posts the plan of a micro-batch.

        Args:
            plan: None if no rank without tokens takes part.
            num_chunks: chunks of its exchanges.
        """


def among_trainers(transport: Transport) -> Transport:
    """Returns the transport that reaches only ranks that train."""
    return transport.among_trainers if isinstance(transport, PostingTransport) else transport


class Replanner:
    """Plans a micro-batch again when other ranks without tokens take part than before."""

    def __init__(self, transport: PostingTransport, preparer: Preparer, prepared: Prepared, micro_batch: int) -> None:
        self._transport, self._preparer, self._micro_batch = transport, preparer, micro_batch
        self._prepared, self._roster = replace(prepared, columns={}), transport.roster

    def __call__(self) -> Planned | None:
        """Returns the present plan; None if it is the one from before."""
        if self._roster == self._transport.roster:
            return None
        self._roster = self._transport.roster
        prepared = self._prepared = self._preparer.planned_for(self._transport.extra_ranks, self._prepared)
        device, num_chunks = self._preparer.device, self._preparer.planner.num_chunks
        posted = self._transport.post(prepared.plan, self._micro_batch, num_chunks)
        return prepared.kinds.planned(device, prepared.fingerprint, posted)


def check_cuts(transport: Transport, prepared: Prepared, number: int, numbers: Mapping[str, Sequence[int]]) -> None:
    """Checks that the ranks on both sides of every cut hold the same document there.

    Args:
        numbers: of all data ranks, as the agreement returned them.

    Raises:
        PlanMismatchError: some do not; names the first document, token and ranks.
    """
    if sum(numbers["around_cuts"]) % MODULUS == 0:
        return
    where = f"{transport.grid.name}, micro-batch {number}"
    mine = [value for cut in prepared.cuts for value in (cut.document, cut.position, cut.checksum)]
    rows = transport.gather(mine + [0] * (3 * max(numbers["cuts"]) - len(mine)), f"{where}, cuts").wait()
    sides: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for rank, row in enumerate(rows):
        for document, position, checksum in zip(row[::3], row[1::3], row[2::3], strict=True):
            sides[document, position][rank] += checksum  # a rank may hold both sides
    different = {cut: of_ranks for cut, of_ranks in sides.items() if sum(of_ranks.values())}
    (document, position), of_ranks = next(iter(different.items()))
    labels = labels_of(transport, Scope.ROWS)
    both = " and ".join(f"rank {labels[rank]}" for rank in of_ranks)
    raise PlanMismatchError(
        f"{where}: {both} hold other tokens or labels around token "
        f"{position} of document {document}, where it is cut between them{and_more(len(different) - 1)}; nothing was "
        "sent. All ranks must load the same dataset: shuffle it with a seed, and tokenise it once"
    )


class UnusedBatches:
    """Batches in a row that no enabled model has run on.

    Args:
        taken_ahead: micro-batches that a training loop may take before it runs on the first of them.
    """

    def __init__(self, taken_ahead: int) -> None:
        self._latest: deque[PlanUse] = deque(maxlen=UNUSED_BATCHES + taken_ahead)
        self._warned = False

    def note(self, plan: LivePlan) -> None:
        """Notes a batch that is handed out; warns, once, if none of the latest before it was used."""
        if (
            len(self._latest) == self._latest.maxlen
            and not any(use.begun for use in self._latest)
            and not self._warned
        ):
            self._warned = True
            log.warning(
                "the last %d micro-batches were handed out, and no enabled model ran on them. Another model must not "
                "train on placed batches: it would see parts of documents. Load it with attn_implementation='distca' "
                "and call distca_hf.enable(model, plugin)",
                len(self._latest),
            )
        self._latest.append(plan.use)


@cache
def _versions() -> dict[str, str]:
    """Returns versions without the part that names a build ("+cu130"): builds for several GPUs may train together."""
    return {"distca_hf": __version__} | {name: version(name).partition("+")[0] for name in PACKAGES}
