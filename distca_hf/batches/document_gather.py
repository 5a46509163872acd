"""Document gather: tells all ranks the lengths of the documents that each of them holds, and which begin alike.

    every gather            | documents of each batch | lengths | hashes of their beginnings |    filled up with zeros
      and, if any has       | numbers of images of each batch | these numbers |
      and, if any has       | borders of image tokens of each batch | where runs of these tokens begin and end |
    if any begin alike      | all hashes of these documents |

`beginnings` says what is hashed. A document that must not share its prefix has no hashes; a hash of 0 stands for a
prefix that must not be shared.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from distca_hf.arrays import IntArray, as_int_array, offsets, ranges
from distca_hf.batches.read_documents import ReadDocuments
from distca_hf.comm.agreement import labels_of
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import Transport
from distca_hf.errors import DistCAError, PeerLostError
from distca_hf.prefixes import BLOCK_TOKENS, SharedPrefixes, num_hashes
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# First integer of a rank that cannot show its documents.
UNABLE = -1


class BatchDocuments(NamedTuple):
    """The documents of a batch on all ranks.

    Attributes:
        lengths: of each rank, the tokens of its documents.
        hashes: of each document of all ranks, its hashes, none of them if no other one begins alike; empty if no two
            documents do.
        images: `BatchImages.numbers` of each rank; empty if images stay, or no rank has any.
        image_runs: of each rank, where tokens of images begin and end, in turn, among its tokens; empty if layers get
            no features of images, or no rank has any.
    """

    lengths: list[IntArray]
    hashes: list[IntArray]
    images: Sequence[IntArray] = ()
    image_runs: Sequence[IntArray] = ()


class DocumentGather:
    """Gathers the documents of one or several batches. A collective call, and so is `wait`.

    Args:
        num_batches: number of batches.
        show: returns what this rank read from them. If it fails, `wait` raises its error, and tells the other ranks.
        most_documents: documents of the rank that has most in all these batches.
        least_tokens: shortest prefix that documents share; 0: none is shared.
        where: what is gathered, for errors.
        most_of_images: most numbers in `image_numbers`, and in `image_runs`, of a rank in all these batches.
    """

    def __init__(
        self,
        transport: Transport,
        num_batches: int,
        show: Callable[[], Sequence[ReadDocuments]],
        most_documents: int,
        least_tokens: int,
        where: str,
        most_of_images: tuple[int, int] = (0, 0),
    ) -> None:
        self._transport, self._where = transport, where
        self._most, self._least_tokens, self._most_of_images = most_documents, least_tokens, most_of_images
        self._batches: Sequence[ReadDocuments] = ()
        self._failure: Exception | None = None
        try:
            self._batches = show()
            values = self._values(self._batches)
        except Exception as error:  # raised by `wait`: the others may exchange rows until they wait
            self._failure = error
            size = num_batches + most_documents * (1 + (least_tokens > 0))
            size += sum(num_batches + most for most in most_of_images if most)
            values = [UNABLE, *[0] * (size - 1)]
        self._gather = transport.gather(values, where)

    def _values(self, batches: Sequence[ReadDocuments]) -> list[int]:
        lengths = [read.known_lengths for read in batches]
        values = [*map(len, lengths), *_filled_up(lengths, self._most)]
        if least_tokens := self._least_tokens:
            values += _filled_up([_beginnings(read, least_tokens) for read in batches], self._most)
        of_images = [read.image_numbers for read in batches], [read.image_runs for read in batches]
        for column, most in zip(of_images, self._most_of_images, strict=True):
            if most:
                values += [*map(len, column), *_filled_up(column, most)]
        return values

    def wait(self) -> list[BatchDocuments]:
        """Returns the documents of each batch.

        Raises:
            PeerLostError: a rank was lost in the meantime, or could not show its documents.
        """
        if self._failure is not None:
            with suppress(DistCAError):  # a rank that was lost
                self._gather.wait()
            raise self._failure
        number, hashes = len(self._batches), None
        rows = [as_int_array(row, self._where) for row in self._gather.wait()]
        labels = labels_of(self._transport, Scope.ROWS)
        if unable := [label for row, label in zip(rows, labels, strict=True) if row[0] == UNABLE]:
            told = f"rank {', '.join(unable)} could not do its part; see the error there"
            raise PeerLostError(f"{self._transport.grid.name}, {self._where}: {told}")

        def of_column(counted: int, first: int, most: int) -> list[list[IntArray]]:
            """Returns a column of each batch and rank, which begins at `first` and has its counts at `counted`."""
            of_ranks = (
                np.split(row[first : first + most], row[counted : counted + number].cumsum())[:-1] for row in rows
            )
            return [list(of_batch) for of_batch in zip(*of_ranks, strict=True)]

        lengths, stop = of_column(0, number, self._most), number + self._most
        if self._least_tokens:
            alike = [_repeated(of_batch) for of_batch in of_column(0, stop, self._most)]
            hashes = self._hashes(lengths, alike) if any(chosen.any() for of in alike for chosen in of) else None
            stop += self._most
        of_images = list[list[list[IntArray]]]()
        for most in self._most_of_images:
            of_images.append(of_column(stop, stop + number, most) if most else [[]] * number)
            stop += number + most if most else 0
        each = enumerate(zip(lengths, *of_images, strict=True))
        return [BatchDocuments(of, [] if hashes is None else hashes[at], *more) for at, (of, *more) in each]

    def _hashes(self, lengths: list[list[IntArray]], alike: list[list[np.ndarray]]) -> list[list[IntArray]]:
        """Gathers all hashes of documents that begin alike; returns the hashes of each batch and document."""
        counts = [
            [num_hashes(tokens, self._least_tokens) * chosen for tokens, chosen in zip(*of_batch, strict=True)]
            for of_batch in zip(lengths, alike, strict=True)
        ]
        totals = [sum(int(of_batch[rank].sum()) for of_batch in counts) for rank in range(len(lengths[0]))]
        rank, mine = self._transport.rank, list[int]()
        for read, of_batch in zip(self._batches, alike, strict=True):
            if of_batch[rank].any():
                all_counts = num_hashes(read.known_lengths, self._least_tokens)
                assert read.hashes is not None  # or its beginnings would be 0
                mine += read.hashes[np.repeat(of_batch[rank], all_counts)].tolist()
        where = f"{self._where}, documents that begin alike"
        rows = self._transport.gather([*mine, *[0] * (max(totals) - len(mine))], where).wait()
        values, first = [as_int_array(row, where) for row in rows], [0] * len(rows)
        hashes: list[list[IntArray]] = []
        for of_batch in counts:
            hashes.append([])
            for at, of_rank in enumerate(of_batch):
                borders = first[at] + offsets(of_rank)
                hashes[-1] += [values[at][start:stop] for start, stop in pairwise(borders.tolist())]
                first[at] = int(borders[-1])
        return hashes


def _filled_up(columns: Sequence[IntArray], most: int) -> list[int]:
    """Returns the values of all columns, filled up with zeros."""
    values = [value for column in columns for value in column.tolist()]
    return values + [0] * (most - len(values))


def to_share(read: ReadDocuments, shares: bool, has_one_label: bool, least_tokens: int) -> ReadDocuments:
    """Returns what was read of a batch, with hashes only of what its documents may share.

    Args:
        shares: whether they may share prefixes.
        has_one_label: whether the loss gets one label for each computed token. Then only tokens that predict no label
            to learn may be shared.
    """
    if read.hashes is None or not shares or read.unshared:
        return replace(read, hashes=None)
    if not has_one_label:
        return read
    counts = num_hashes(read.known_lengths, least_tokens)
    unlearnt = np.zeros_like(counts) if read.unlearnt is None else read.unlearnt
    hashed = least_tokens + BLOCK_TOKENS * ranges(0, counts)
    return replace(read, hashes=np.where(hashed <= np.repeat(unlearnt, counts), read.hashes, 0))


def begin_alike(read: ReadDocuments, least_tokens: int) -> bool:
    """Returns whether any documents of a batch begin alike."""
    return bool(_repeated([_beginnings(read, least_tokens)])[0].any())


def say_unshared(read: ReadDocuments, shown_as: ReadDocuments | None, why: str, least_tokens: int) -> bool:
    """Logs why documents of a batch that begin alike do not share their prefix; returns whether it logged.

    Args:
        shown_as: the batch with hashes only of what its documents may share; None if they may share nothing.
    """
    if read.hashes is None or not begin_alike(read, least_tokens):
        return False
    if shown_as is not None and begin_alike(shown_as, least_tokens):
        return False
    log.info("documents begin alike, but layers compute the prefix again for each: %s", why)
    return True


def saved_share(read: ReadDocuments, least_tokens: int) -> float:
    """Returns the share of the tokens of a batch with hashes that its documents share with others of it."""
    lengths = read.known_lengths
    assert read.hashes is not None  # or no documents begin alike
    hashes = np.split(read.hashes, np.cumsum(num_hashes(lengths, least_tokens))[:-1])
    shared = SharedPrefixes.find(lengths, hashes, least_tokens)
    return 0.0 if shared is None else float(shared.first_own.sum() / lengths.sum())


def _beginnings(read: ReadDocuments, least_tokens: int) -> IntArray:
    """Returns `[documents]` the first hash of each document; 0 if it has none."""
    lengths = read.known_lengths
    beginnings = np.zeros_like(lengths)
    if read.hashes is not None:
        counts = num_hashes(lengths, least_tokens)
        beginnings[counts > 0] = read.hashes[offsets(counts)[:-1][counts > 0]]
    return beginnings


def _repeated(beginnings: Sequence[IntArray]) -> list[np.ndarray]:
    """Returns for each rank which of its documents begin like another one on any rank; 0 is like no other."""
    joined = np.concatenate(beginnings)
    _, number, counts = np.unique(joined, return_inverse=True, return_counts=True)
    is_repeated = (counts[number] > 1) & (joined != 0)
    return np.split(is_repeated, np.cumsum([len(of_rank) for of_rank in beginnings])[:-1])
