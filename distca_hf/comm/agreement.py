"""Agreement: ranks check that they are about to do the same before they send anything for a micro-batch.

If the two sides of an all-to-all disagree, it corrupts data silently (gloo) or hangs (NCCL). Ranks therefore gather a
few integers per micro-batch while the batch is still being prepared, and raise an error that names the ranks instead.

Facts travel as a digest of 63 bits. Their names and values follow only if digests differ, so there may be many.

A process group delivers exchanges in the order in which each rank starts them. If two ranks start them in different
orders, rows of one place arrive in another. That gives wrong numbers (gloo, equal sizes), an abort or a hang. This
package keeps one order. For debugging, `CheckedTransport` finds code that does not, at one more message per exchange.
"""

import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

from distca_hf.arrays import ceil_div
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import AllToAll, Exchange, Gather, Transport
from distca_hf.errors import DistCAError, PeerLostError, PlanMismatchError, StepTimeoutError, first_line, printable
from distca_hf.telemetry import OF_THIS_RANK, get_logger


log = get_logger(__name__)
# Longest name of a place, in bytes.
PLACE_BYTES = 96


class Occasion(enum.IntEnum):
    """The next step that a rank is about to take."""

    TAKE = 1  # hand out a micro-batch
    PLAN = 2  # plan a batch that brought no plan
    ATTEND = 3  # exchange rows for a model's first attention call
    DIFFERENTIATE = 4  # exchange rows again, for backward
    REPORT = 5  # log measurements
    COMPARE = 6  # compare weights
    UNABLE = 7  # give up, because it cannot do its part
    SCHEDULE = 8  # run an optimizer step of a pipeline
    EVALUATE = 9  # go on with an evaluation
    MOVE = 10  # move rows to where a model's layers compute them
    READ = 11  # read on in a stream, and send its tokens
    BEGIN = 12  # begin a pass through a stream


# Ranks that take a step together. A rank that is unable tells the ranks of the step that it should have taken.
SCOPE_OF = {
    Occasion.TAKE: Scope.GROUP,
    Occasion.PLAN: Scope.LAYERS,
    Occasion.ATTEND: Scope.LAYERS,
    Occasion.DIFFERENTIATE: Scope.LAYERS,
    Occasion.REPORT: Scope.GROUP,
    Occasion.COMPARE: Scope.LAYERS,
    Occasion.SCHEDULE: Scope.GROUP,
    Occasion.EVALUATE: Scope.GROUP,
    Occasion.MOVE: Scope.LAYERS,
    Occasion.READ: Scope.ROWS,
    Occasion.BEGIN: Scope.GROUP,
}

# For messages of every agreement: asking an enum takes longer.
NAME_OF = {occasion: occasion.name.lower() for occasion in Occasion}

# Bytes of text in one integer: gathers carry signed integers of 64 bits and nothing else.
BYTES_PER_INTEGER = 4
# Integers in every agreement, whatever its occasion: two that meet by mistake must still be comparable.
WIDTH = 20
# Of these, the header: occasion, micro-batch, signal on which the rank leaves, digest and bytes of the facts.
HEADER = 5
# Differing facts that an error shows: the first ones, because later facts follow from earlier ones.
FACTS_SHOWN = 2
# What to do about a difference, by the step that some rank takes; TAKE's for all other steps.
REMEDIES = {
    Occasion.DIFFERENTIATE: (
        "All ranks must run backward of the same forward passes, in the same order and equally often: a loss that one "
        "rank leaves out (an outlier, NaN) must be left out on all of them"
    ),
    Occasion.COMPARE: (
        "All ranks must start from the same weights and buffers (all files of the same checkpoint if they resume), "
        "average gradients over all of them (DDP, FSDP, DeepSpeed, or the training loop), and take every optimizer "
        "step"
    ),
    Occasion.MOVE: (
        "Ranks need equal models, and must give the decoder the same inputs: names, dtypes and widths of tensors with "
        "a value per token, and flags such as output_hidden_states"
    ),
    Occasion.PLAN: (
        "Ranks need equal models, settings and versions, and must run the same passes in the same order. Evaluation "
        'that only some ranks run needs evaluate="local"'
    ),
    Occasion.TAKE: "Ranks need equal data, seeds, models, settings, versions and order of micro-batches",
}
# Bytes in which a rank that is unable says why.
CAUSE_BYTES = 400
# Most ranks that an error names for a value. If there are more, it gives the number of the others.
RANKS_SHOWN = 4


class Facts(dict[str, object]):
    """Facts by name. They do not change, so their text and digest are made once."""

    @cached_property
    def text(self) -> bytes:
        """Names and values."""
        return json.dumps([(name, str(value)) for name, value in self.items()]).encode()

    @cached_property
    def digest(self) -> int:
        """Digest of the text, 63 bits."""
        return int.from_bytes(hashlib.blake2b(self.text, digest_size=8).digest()) >> 1


NO_FACTS = Facts()


@dataclass
class Agreement:
    """Facts under way to all ranks of a scope. Agreements also carry signals: see `Traffic.leaving`."""

    micro_batch: int
    scope: Scope
    facts: Facts  # must be the same everywhere
    numbers: Mapping[str, int]  # integers that may differ and are only passed on
    transport: Transport
    gather: Gather
    _failure: DistCAError | None = field(default=None, init=False)

    @classmethod
    def start(
        cls,
        transport: Transport,
        occasion: Occasion,
        micro_batch: int,
        facts: Mapping[str, object],
        numbers: Mapping[str, int],
        scope: Scope | None = None,
    ) -> "Agreement":
        """Starts sending `facts` and `numbers`. For one occasion, `numbers` must have the same names on all ranks. The
        ranks of `scope` agree, by default the occasion's. Raises ValueError if there are more numbers than an
        agreement holds."""
        if len(numbers) > WIDTH - HEADER:
            raise ValueError(
                f"an agreement holds at most {WIDTH - HEADER} numbers, not {len(numbers)}: {', '.join(numbers)}"
            )
        facts = facts if isinstance(facts, Facts) else Facts(facts)
        header = [occasion, micro_batch, transport.traffic.leave_signal, facts.digest, len(facts.text)]
        values = [*header, *numbers.values()]
        scope = SCOPE_OF[occasion] if scope is None else scope
        where = f"micro-batch {micro_batch}, agreement to {NAME_OF[occasion]}"
        gather = transport.gather(values + [0] * (WIDTH - len(values)), where, scope)
        return cls(micro_batch, scope, facts, numbers, transport, gather)

    @classmethod
    def announce_unable(
        cls, transport: Transport, micro_batch: int, instead_of: Occasion, error: BaseException
    ) -> tuple[Gather, Gather]:
        """Begins to tell the other ranks that this one cannot do its part, and why."""
        cause = f"{type(error).__name__}: {first_line(error)}"
        unable = cls.start(transport, Occasion.UNABLE, micro_batch, {}, {}, SCOPE_OF[instead_of])
        return unable.gather, unable._show_cause(cause)

    def wait(self, of: Scope | None = None) -> dict[str, list[int]]:
        """Returns the numbers of every rank, by name.

        Args:
            of: ranks whose numbers are returned, some of the ranks that agree; by default all of them. Sum numbers of
                data over `Scope.ROWS`: all tensor ranks of one data rank have the same.

        Raises:
            PeerLostError: a rank could not do its part.
            PlanMismatchError: ranks are about to do different things; lists ranks by value.
        """
        if self._failure is not None:
            raise copy(self._failure)  # without the traceback of the first time
        try:
            return self._compare(self.gather.wait(), self.scope if of is None else of)
        except DistCAError as error:
            self._failure = error
            raise

    def _compare(self, rows: list[list[int]], of: Scope) -> dict[str, list[int]]:
        ranks = self.transport.grid.members(self.scope)
        columns = [*zip(*rows, strict=True)]
        each_occasion, each_micro_batch, signals, each_digest, each_bytes = columns[:HEADER]
        if any(signals):
            self.transport.traffic.leaving |= {rank: one for rank, one in zip(ranks, signals, strict=True) if one}
        occasions, micro_batches, digests = set(each_occasion), set(each_micro_batch), set(each_digest)
        if Occasion.UNABLE in occasions:
            unable = [label for label, one in zip(self.labels, each_occasion, strict=True) if one == Occasion.UNABLE]
            causes = [printable(text_of(text)) for text in self._show_cause("").wait()]
            told = "; ".join(
                f"{text} on rank {label}" for label, text in zip(self.labels, causes, strict=True) if text
            )
            raise PeerLostError(
                f"{self._where}: rank {', '.join(unable)} could not do its part; see the error there: {told}"
            )
        if len(occasions) > 1 or len(micro_batches) > 1:
            each = zip(each_occasion, each_micro_batch, strict=True)
            doing = [f"{Occasion(one).name.lower()} micro-batch {number}" for one, number in each]
            raise self._mismatch([f"their next step is {by_value(doing, self.labels)}"], rows)
        if len(digests) > 1:
            raise self._mismatch(self._differences(most_bytes=max(each_bytes)), rows)
        if of is not self.scope and (others := self.transport.grid.members(of)) != ranks:
            row_of = dict(zip(ranks, rows, strict=True))
            columns = [*zip(*(row_of[rank] for rank in others), strict=True)]
        return dict(zip(self.numbers, map(list, columns[HEADER:]), strict=False))

    @property
    def labels(self) -> list[str]:
        """The ranks that agree, in messages."""
        return labels_of(self.transport, self.scope)

    @property
    def _where(self) -> str:
        return f"{self.transport.grid.name}, micro-batch {self.micro_batch}"

    def _show_cause(self, cause: str) -> Gather:
        """Starts to gather why ranks are unable; empty if this one is able. All ranks call this if one is unable."""
        values = integers_of(cause.encode(errors="replace"), CAUSE_BYTES)
        return self.transport.gather(values, f"{self._where}, causes", self.scope)

    def _differences(self, most_bytes: int) -> list[str]:
        """Gathers the facts themselves and lists the differing ones. All ranks have seen the same digests, so all of
        them call this."""
        values = integers_of(self.facts.text, most_bytes)
        texts = self.transport.gather(values, f"{self._where}, facts", self.scope).wait()
        of_rank = [dict(json.loads(text_of(text))) for text in texts]
        names = dict.fromkeys(name for facts in of_rank for name in facts)
        shown = {name: [facts.get(name, "missing") for facts in of_rank] for name in names}
        return [f"{name} is {by_value(values, self.labels)}" for name, values in shown.items() if len(set(values)) > 1]

    def _mismatch(self, differences: Sequence[str], rows: list[list[int]]) -> PlanMismatchError:
        steps = {row[0] for row in rows}
        remedy = next((text for occasion, text in REMEDIES.items() if occasion in steps), REMEDIES[Occasion.TAKE])
        others = len(differences) - FACTS_SHOWN
        more = f" (and {others} facts more)" if others > 0 else ""
        return PlanMismatchError(
            f"{self._where}: ranks disagree, nothing was sent: {'; '.join(differences[:FACTS_SHOWN])}{more}. {remedy}"
        )


def labels_of(transport: Transport, scope: Scope) -> list[str]:
    """Returns the ranks of a scope as messages name them."""
    return [transport.grid.label(rank) for rank in transport.grid.members(scope)]


def by_value(values: Sequence[str], labels: Sequence[str]) -> str:
    """Lists ranks by their value: "5 on ranks 0 and 2, 7 on rank 1"."""
    ranks_of: dict[str, list[str]] = {}
    for label, value in zip(labels, values, strict=True):
        ranks_of.setdefault(value, []).append(label)
    return ", ".join(f"{value} on {_named(ranks)}" for value, ranks in ranks_of.items())


def _named(ranks: list[str]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > RANKS_SHOWN:
        return f"ranks {', '.join(ranks[: RANKS_SHOWN - 1])} and {len(ranks) - RANKS_SHOWN + 1} more"
    return f"ranks {', '.join(ranks[:-1])} and {ranks[-1]}"


def integers_of(text: bytes, most_bytes: int) -> list[int]:
    """Encodes at most `most_bytes` bytes of a text, always as the same number of integers."""
    count = ceil_div(most_bytes, BYTES_PER_INTEGER)
    padded = text[:most_bytes].ljust(count * BYTES_PER_INTEGER)
    return [int.from_bytes(padded[at : at + BYTES_PER_INTEGER]) for at in range(0, len(padded), BYTES_PER_INTEGER)]


def text_of(integers: Sequence[int]) -> str:
    """Decodes integers of `integers_of`; spaces at the end are lost."""
    return b"".join(number.to_bytes(BYTES_PER_INTEGER) for number in integers).decode(errors="replace").rstrip()


class CheckedTransport:
    """Passes exchanges on to another transport, once it has checked that all ranks mean the same one."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.world_size, self.traffic = inner.rank, inner.world_size, inner.traffic
        self.grid = inner.grid
        self._inner = inner
        self._number = 0

    def exchange(self, asked: AllToAll) -> Exchange:
        """Starts an exchange once all ranks have shown that they mean the same one. One between tensor ranks is not
        compared: it follows an exchange of rows.
        Raises PlanMismatchError if ranks mean different exchanges, or one sends what another does not expect. Names
        both places, or both numbers of rows; nothing was sent."""
        if asked.scope is Scope.TENSOR:
            return self._inner.exchange(asked)
        number, self._number = self._number, self._number + 1
        row = [asked.rows.shape[1:].numel(), asked.rows.element_size()]
        header = [*row, *integers_of(asked.where.encode(), PLACE_BYTES), *asked.send_counts, *asked.receive_counts]
        shown = self._inner.gather(header, f"{asked.where}, check of exchange {number}").wait()
        counts_at = len(header) - 2 * self.world_size
        meant = [f"{text_of(row[2:counts_at])} (rows of {row[0]} x {row[1]} bytes)" for row in shown]
        here, labels = f"{self.grid.name}, exchange {number}", labels_of(self, Scope.ROWS)
        if len(set(meant)) > 1:
            raise PlanMismatchError(
                f"{here}: ranks exchange in different orders, nothing was sent: {by_value(meant, labels)}. Run the "
                "same forward and backward passes in the same order on all ranks, from one thread"
            )
        sent = [row[counts_at : counts_at + self.world_size] for row in shown]
        for target, row in enumerate(shown):
            for source, expected in enumerate(row[counts_at + self.world_size :]):
                if sent[source][target] != expected:
                    raise PlanMismatchError(
                        f"{here}, {asked.where}: rank {labels[source]} sends {sent[source][target]} rows to rank "
                        f"{labels[target]}, which expects {expected}; nothing was sent"
                    )
        return self._inner.exchange(asked)

    def gather(self, values: Sequence[int], where: str, scope: Scope = Scope.ROWS) -> Gather:
        """Passes integers on unchecked: agreements check themselves."""
        return self._inner.gather(values, where, scope)

    def close(self) -> None:
        self._inner.close()


class Announced:
    """Tells the other ranks, which go on to a micro-batch, if a block fails here, and why. The block makes no
    collective calls. Only logs if they cannot be told: the block's error is raised in any case.

    Args:
        instead_of: the step that the others are about to take.
    """

    def __init__(self, transport: Transport, micro_batch: int, instead_of: Occasion) -> None:
        self._instead_of = transport, micro_batch, instead_of

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.tell(error)

    def tell(self, error: BaseException | None) -> None:
        """Tells the other ranks of an error; does nothing without one. In an `except` clause it takes no time unless
        the block fails, unlike a context."""
        # A step that is over time is that of a thread, from a rank that would not hear more.
        if not isinstance(error, Exception) or isinstance(error, StepTimeoutError):
            return
        try:
            for gather in Agreement.announce_unable(*self._instead_of, error):
                gather.wait()
        except DistCAError as lost:
            log.warning("the other ranks could not be reached: %s", lost, extra=OF_THIS_RANK)
