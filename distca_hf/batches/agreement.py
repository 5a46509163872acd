"""Agreement: what ranks show each other about a micro-batch before they take it.

Ranks compare versions and settings for placed and for given batches. For placed ones they also compare documents,
plan, and what is around each cut. For given ones they show how many documents each rank holds, because all ranks send
equally many numbers when they gather document lengths.
"""

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.metadata import version
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch

from distca_hf.batches.batch_documents import Batch, media_of
from distca_hf.batches.image_plans import are_even
from distca_hf.batches.images import check_all_hold, may_move
from distca_hf.batches.prepare import Prepared
from distca_hf.batches.read_documents import ReadDocuments, checksum_of
from distca_hf.comm.agreement import NO_FACTS, Agreement, Announced, Facts, Occasion, by_value, labels_of
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.cost import imbalance
from distca_hf.data.collate import MODULUS, sum_of
from distca_hf.data.documents import IGNORED_LABEL
from distca_hf.errors import PackingError, PlanMismatchError, and_more
from distca_hf.telemetry import get_logger
from distca_hf.version import __version__


log = get_logger(__name__)

# Packages whose versions decide the numbers of a rank, or the order of its collective calls.
PACKAGES = ("torch", "transformers", "accelerate")
# Name of the number by which tensor ranks compare their batches.
CHECKSUM = "checksum of tokens, labels and lengths"
# Dtypes of pixels and of their features by their numbers in gathers; 0: a rank that has none.
MEDIA_DTYPES = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)


def shared_facts(config: DistCAConfig) -> dict[str, object]:
    """Returns versions of packages, and settings, by name."""
    return {**_versions(), **config.shared_settings()}


@cache
def _versions() -> dict[str, str]:
    """Returns versions without the part that names a build ("+cu130"): builds for several GPUs may train together."""
    return {"distca_hf": __version__} | {name: version(name).partition("+")[0] for name in PACKAGES}


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


def check_cuts(transport: Transport, prepared: Prepared, number: int, numbers: Mapping[str, Sequence[int]]) -> None:
    """Checks that the ranks on both sides of every cut hold the same document there.

    Args:
        numbers: numbers of all data ranks, as the agreement returned them.

    Raises:
        PlanMismatchError: some ranks do not; names the first document, token and ranks.
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


class Returning(enum.IntEnum):
    """What a pass returns to the ranks that hold its batches."""

    LOSS = 0  # head and loss run on placed rows, and only the loss returns
    TOKEN_VALUES = 1  # the head runs on placed rows, and numbers of single tokens return
    STATES = 2  # hidden states of the decoder return; head and loss run on the rows of the batch


class ShownNumbers(NamedTuple):
    """What ranks showed each other of their given batches.

    Attributes:
        stays_padded: whether any rank's batch keeps its padding; then every rank attends to its own batch.
        num_documents: `[ranks]` documents of each rank.
        longest_document_tokens: tokens of the longest document on any rank.
        forms: `[ranks]` numbers of the forms of their batches, see `form_of`.
        returning: what the passes of all ranks return.
        needing: names of the ranks that need hidden states, as text.
        is_planned: whether all ranks planned this micro-batch ahead, under the same number.
        most_borders: borders of runs of image tokens of the rank that has most; see `ReadDocuments`.
        most_images: images and videos of the rank that has most; 0 if some rank's must stay.
        image_dtype: dtype of their pixels; None without any, or of one that is not moved.
        images_wait: whether on some rank a tower waits for the towers of all ranks.
        images_train: whether towers, or what follows them, need gradients on some rank.
        images_even: largest over mean work of the ranks' images; None unless it is small, all ranks have some, and
            their pixels have one form.
    """

    stays_padded: bool
    num_documents: list[int]
    longest_document_tokens: int
    forms: tuple[int, ...]
    returning: Returning
    needing: str
    is_planned: bool
    most_borders: int
    most_images: int = 0
    image_dtype: torch.dtype | None = None
    images_wait: bool = False
    images_train: bool = False
    images_even: float | None = None


class GivenAgreement:
    """Lets all ranks agree on their given batches, once for each micro-batch."""

    def __init__(self, config: DistCAConfig, transport: Transport) -> None:
        self._shared, self._transport = shared_facts(config), transport
        self._facts = cache(self._facts_of)
        self._warned_of_padding = False

    def reach(
        self,
        batch: Batch,
        read: ReadDocuments,
        number: int,
        images_wait: bool,
        gradients_of: Sequence[bool] = (),
        returning: Returning = Returning.STATES,
        ahead: int = 0,
        step_batches: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
        towers: Facts = NO_FACTS,
        image_work: int = 0,
    ) -> ShownNumbers:
        """Shows all ranks this rank's batch, and returns what they showed. A collective call.

        Args:
            images_wait: whether a rank with an image waits for the others: for weights or gradients of towers.
            gradients_of: whether parts of the model before its decoder need gradients: embeddings, then towers.
            returning: what this rank needs its pass to return.
            ahead: number of the micro-batch among those planned ahead, counted from 1; 0 if it was not planned ahead.
            step_batches: number of micro-batches in the step, if this is the first one; otherwise 0.
            meanwhile: runs while this rank waits for the others.
            towers: arguments of towers, by name; the same on all ranks if images may move.
            image_work: work of the images of this rank.

        Raises:
            PackingError: only some ranks hold images, which must stay, and would wait for the others.
            PlanMismatchError, PeerLostError: other ranks are doing something else, could not do their part, or hold
                another batch although they share the data.
        """
        try:
            lengths, names = read.lengths, media_of(batch)
            dtypes = [None, *(getattr(batch[name], "dtype", None) for name in names)] if names else []
            mine = {
                "documents": 0 if lengths is None else len(lengths),
                "longest document": 0 if lengths is None else int(lengths.max(initial=0)),
                "padded": int(lengths is None),
                "form": form_of(batch, [*gradients_of, bool(returning)]),
                "returning": returning,
                "planned ahead": ahead,
                "borders of images": len(read.image_runs),
                "arguments of towers": towers.digest,
                "work of towers": image_work,
                "form of pixels": 0 if read.images is None else _number_of(read.images.form),
                "learns nothing": int(number == 0 and read.learns_nothing),
                # One bit for each of `MEDIA_DTYPES`; bit 0 (None): the rank has images at all.
                "dtypes of images": sum(1 << bit for bit, dtype in enumerate(MEDIA_DTYPES) if dtype in dtypes)
                if names
                else 0,
                "images that may move": -1 if read.images is None or not may_move(batch) else len(read.images.sizes),
                # Bit 0: whether towers wait for each other; bit 1: whether they need gradients.
                "towers": images_wait + 2 * any(gradients_of[1:]),
            }
            if self._transport.grid.shape[2] > 1:
                mine[CHECKSUM] = checksum_of(batch, lengths) if read.checksum is None else read.checksum
            facts = self._facts(step_batches, torch.is_grad_enabled())
        except Exception as error:
            Announced(self._transport, number, Occasion.PLAN).tell(error)
            raise
        agreement = Agreement.start(self._transport, Occasion.PLAN, number, facts, mine)
        meanwhile()
        numbers = agreement.wait(Scope.ROWS)
        if CHECKSUM in mine:
            self._check_same_batch(agreement, number)
        of_all = returning if len({*numbers["returning"]}) == 1 else Returning.STATES
        needing = ""
        if Returning.STATES in numbers["returning"]:
            needing = self._labels([int(value == Returning.STATES) for value in numbers["returning"]])
        self._warn(numbers, number)
        shown = ShownNumbers(
            any(numbers["padded"]),
            numbers["documents"],
            max(numbers["longest document"]),
            tuple(numbers["form"]),
            of_all,
            needing,
            set(numbers["planned ahead"]) == {ahead} != {0},
            max(numbers["borders of images"]),
        )
        has_images = any((*numbers["dtypes of images"], *numbers["towers"]))
        return self._with_images(shown, numbers, number, towers) if has_images else shown

    def _with_images(
        self, shown: ShownNumbers, numbers: Mapping[str, Sequence[int]], number: int, towers: Facts
    ) -> ShownNumbers:
        """Adds what ranks showed of their images and towers."""
        num_images, dtypes_of_ranks = numbers["images that may move"], numbers["dtypes of images"]
        wait, train = (any(of & bit for of in numbers["towers"]) for bit in (1, 2))
        bits = max(dtypes_of_ranks) >> 1
        # Bit 0 by itself: this rank's images have a dtype that does not move.
        dtype = None if 1 in dtypes_of_ranks else MEDIA_DTYPES[bits.bit_length()]
        if wait and (min(num_images) < 0 or dtype is None):
            check_all_hold(self._transport, [int(of > 0) for of in dtypes_of_ranks], number)
        if any(dtypes_of_ranks):
            self._check_dtypes(dtypes_of_ranks, number)
        most_images = max(num_images) if min(num_images) >= 0 and dtype is not None else 0
        if most_images and len({*numbers["arguments of towers"]}) > 1:
            compared = Agreement.start(self._transport, Occasion.PLAN, number, towers, {}, Scope.ROWS)
            compared.wait()  # names what differs
        work = numbers["work of towers"]
        is_even = all(work) and are_even(np.array(work)) and len({*numbers["form of pixels"]}) == 1
        return shown._replace(
            most_images=most_images,
            image_dtype=dtype,
            images_wait=wait,
            images_train=train,
            images_even=imbalance(work) if is_even else None,
        )

    def _warn(self, numbers: Mapping[str, Sequence[int]], number: int) -> None:
        """Warns of ranks whose first batch has no label to learn: most likely none of their batches has any. Warns
        once of a batch that keeps its padding."""
        if any(numbers["learns nothing"]):
            log.warning(
                "the first batch holds no label to learn on rank %s (all labels are %d): its loss is 0 or NaN. "
                "Look at the dataset's labels and masks",
                self._labels(numbers["learns nothing"]),
                IGNORED_LABEL,
            )
        if any(numbers["padded"]) and not self._warned_of_padding:
            self._warned_of_padding = True
            log.warning(
                "micro-batch %d is padded on rank %s, and its padding cannot be taken out (it has or predicts a "
                "label, or layers carry a state that cannot travel): every rank attends to this batch by itself, and "
                "nothing is balanced. Pad on the right with labels of -100, or pack documents "
                "(DataCollatorWithFlattening, packing=True)",
                number,
                self._labels(numbers["padded"]),
            )

    def _facts_of(self, step_batches: int, has_gradients: bool) -> Facts:
        """Returns what must be the same on all ranks."""
        of_step = {"number of micro-batches in this step": step_batches}
        return Facts({**of_step, **self._shared, "a pass with gradients": has_gradients})

    def _check_same_batch(self, agreement: Agreement, number: int) -> None:
        """Checks that all tensor ranks of one data rank hold the same batch."""
        grid, checksums = self._transport.grid, agreement.wait()[CHECKSUM]
        for places in grid.same_tokens(grid.members(agreement.scope)):
            seen = [f"{checksums[place]:08x}" for place in places]
            if len(set(seen)) > 1:
                shown = by_value(seen, [agreement.labels[place] for place in places])
                raise PlanMismatchError(
                    f"{grid.name}, micro-batch {number}: tensor ranks of one data rank hold different batches, "
                    f"nothing was sent: the {CHECKSUM} is {shown}. Give them the same "
                    f"rows, with a sampler that counts the {grid.shape[1]} data ranks and not all ranks"
                )

    def _check_dtypes(self, dtypes: Sequence[int], number: int) -> None:
        """Checks that ranks with images hold them in the same dtypes."""
        holding = [place for place, bits in enumerate(dtypes) if bits > 1]
        if len({dtypes[place] for place in holding}) > 1:
            labels = labels_of(self._transport, Scope.ROWS)
            names = [
                ", ".join(str(dtype) for bit, dtype in enumerate(MEDIA_DTYPES) if bit and dtypes[place] >> bit & 1)
                for place in holding
            ]
            raise PackingError(
                f"{self._transport.grid.name}, micro-batch {number}: images, videos or sound are "
                f"{by_value(names, [labels[place] for place in holding])}. Give them in one dtype on all ranks"
            )

    def _labels(self, flags: Sequence[int]) -> str:
        """Returns the ranks whose flag is 1, as text."""
        if not any(flags):
            return ""
        labels = labels_of(self._transport, Scope.ROWS)
        return ", ".join(label for label, flag in zip(labels, flags, strict=True) if flag)


def form_of(batch: Batch, gradients_of: Sequence[bool] = ()) -> int:
    """Returns a number for a batch's form: its tensors, its flags, and what needs gradients.

    Args:
        gradients_of: whether parts of the model before its decoder need gradients.
    """
    facts: list[object] = [torch.is_grad_enabled(), *gradients_of]
    for name, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor):
            facts.append((name, value.dtype, value.ndim, value.numel() > 0, value.requires_grad))
        elif value is not None:
            facts.append((name, value if isinstance(value, bool | str) else type(value).__name__))
    return _number_of(tuple(facts))


@lru_cache(maxsize=64)
def _number_of(form: Hashable) -> int:
    return crc32(str(form).encode())
