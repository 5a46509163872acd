"""Read documents: reads what ranks must know about a batch before they plan it, such as the lengths of its documents.

    collator ──reading──▶ entry of the batch ──▶ step of Trainer ──mark──▶ tensors ──▶ pass    no wait for the device
    any other batch ───────────────── one copy to the host ──────────────read────────▶ pass    one wait

The collator adds a `Reading` to the batch. Before a model or a loss sees the batch, we take this entry out and mark
the storages of the tensors to read, as in `known_batch`. A pass uses the mark only if all these tensors are still the
same, and unchanged.

The tokens of a padded batch become one pack, and their places in its rows are remembered:

    mask  0 0 1 1 1         tokens     a a a b b b b
          1 1 1 1 0    ──▶  positions  0 1 2 0 1 2 3

A pack has no padding: it is planned like any other, and linear layers compute only tokens. A rank without tokens runs
on a row of padding, to take part in everything that other ranks do.
"""

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import get_worker_info

from distca_hf.arrays import NO_INTEGERS, IntArray
from distca_hf.batches.batch_documents import (
    KINDS_OF_TOKENS,
    POSITIONS_WITH_TEXT,
    Batch,
    check_mask_numbers,
    check_positions_fit,
    check_runs,
    document_lengths,
    documents_at,
    ids_checked,
    media_of,
    padded_rows,
    tokens_of,
)
from distca_hf.batches.beginnings import NO_BEGINNINGS, Placeholders, beginnings_of, row_sums_of
from distca_hf.batches.images import BatchImages, image_tokens, images_of, runs_of
from distca_hf.batches.square_masks import check_shapes, numbered_rows
from distca_hf.batches.written_batches import (
    HAS_MEDIA,
    LABELS,
    Checksums,
    State,
    checksums_of,
    read_of,
    sampled,
    state_of,
)
from distca_hf.data.documents import IGNORED_LABEL
from distca_hf.data.rows import MEDIA
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Names of the reading: as an entry of the batch between collator and Trainer's step, then as an attribute of a
# storage.
ENTRY, MARK = "distca_documents", "_distca_documents"


@dataclass
class PaddedRows:
    """Places and documents of the tokens of a padded batch.

    Attributes:
        shape: shape of the batch, `(B, L)`.
        token_places: `[T]` places of the tokens among all B · L, row by row.
        offsets: `[documents + 1]` int32, where documents begin among the tokens.
        has_own_positions: whether the batch had positions.
        is_left_padded: whether some row begins with padding.
    """

    shape: tuple[int, int]
    token_places: torch.Tensor
    offsets: torch.Tensor
    has_own_positions: bool
    is_left_padded: bool

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Picks the values of tokens, `[1, T, ...]`, from values of all places, `[B, L, ...]`."""
        return values.flatten(0, 1)[self.token_places][None]


def padded_rows_of(batch: Batch, with_images: bool = False) -> PaddedRows | None:
    """Returns the rows of a padded batch; waits for the device.

    Args:
        with_images: whether it may have images; their features are among the tokens by the time these are packed.

    Returns:
        None if the batch has no padding, or must keep it: it has offsets, a mask with several numbers per token,
        labels to learn that padding has or predicts, images, or positions with several numbers per token.

    Raises:
        PackingError: a row has no token, or padding between tokens; or positions do not fit the mask.
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    tokens = tokens_of(batch)
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape != tokens.shape or bool(mask.all()):
        return None
    if batch.get("cu_seq_lens_q") is not None or (media_of(batch) and not with_images):
        return None
    if positions is not None and positions.ndim == 3 and with_images:
        positions = positions[0] if len(positions) == POSITIONS_WITH_TEXT else None
    if positions is not None and positions.ndim != 2:
        return None
    check_positions_fit(positions, tokens)
    check_mask_numbers(batch)
    is_token = mask.bool()
    check_runs(is_token)
    if _learns_from_padding(batch.get("labels"), batch.get("shift_labels"), is_token):
        return None
    if positions is None:
        documents = padded_rows(is_token, is_token)
    else:
        documents = documents_at(positions.expand(mask.shape), is_token)
    assert documents.query_rows is not None
    return PaddedRows(
        shape=(mask.shape[0], mask.shape[1]),
        token_places=documents.query_rows,
        offsets=documents.cu_seqlens_q,
        has_own_positions=batch.get("position_ids") is not None,
        is_left_padded=not bool(is_token[:, 0].all()),
    )


def _learns_from_padding(labels: object, shift_labels: object, is_token: torch.Tensor) -> bool:
    """Returns whether padding has a label to learn, as losses of single tokens read it, or predicts one, as for the
    first token of a row that is padded on its left: in a pack, padding has no hidden states."""
    if isinstance(shift_labels, torch.Tensor) and shift_labels.shape == is_token.shape:
        if bool(((shift_labels != IGNORED_LABEL) & ~is_token).any()):
            return True
    if not isinstance(labels, torch.Tensor) or labels.shape != is_token.shape:
        return False
    may_learn = is_token.clone()
    may_learn[:, 1:] &= is_token[:, :-1]
    return bool(((labels != IGNORED_LABEL) & ~may_learn).any())  # asks a device once


def fill_empty(batch: Batch) -> dict[str, torch.Tensor | int | None]:
    """Returns inputs for a rank without tokens: one row of padding without a label, of loss 0. Empty for other
    ranks."""
    if tokens_of(batch).numel():
        return {}
    filled: dict[str, torch.Tensor | int | None] = (
        {"num_items_in_batch": 1} if batch.get("num_items_in_batch") is None else {}
    )
    for name, values in batch.items():
        if not isinstance(values, torch.Tensor):
            continue
        if name.startswith("cu_seq_lens"):
            filled[name] = values.new_tensor([0, 1])
        elif name == "position_ids" and values.ndim == 3:  # several positions per token, as of images
            filled[name] = values.new_zeros((len(values), 1, 1))
        elif MEDIA.search(name) and not values.numel():
            filled[name] = None
        elif 0 in values.shape[:2]:
            is_mask = name == "attention_mask"  # 1: a mean over no token is NaN
            number = IGNORED_LABEL if name.endswith("labels") else int(is_mask)
            filled[name] = values.new_full((1, 1, *values.shape[2:]), number)
    return filled


@dataclass(frozen=True, eq=False)
class ReadDocuments:
    """What was read from a batch.

    Attributes:
        lengths: `[documents]` tokens of each document; None if the batch keeps its padding.
        padded: places of the tokens in padded rows, on the host, if the rows become a pack; otherwise None.
        learns_nothing: whether the batch has labels, and all of them are ignored.
        checksum: checksum of tokens, labels and lengths; None if not requested.
        hashes, unlearnt, unshared: see `Beginnings`.
        checksums: `checksums_of` the batch; None without hashes.
        images: sizes of images and videos; None if they must stay.
        image_runs: where tokens of images begin and end, in turn, among all tokens; empty if not requested.
        num_image_tokens: number of these tokens, and of those in padding.
    """

    lengths: IntArray | None
    padded: PaddedRows | None
    learns_nothing: bool
    checksum: int | None
    hashes: IntArray | None = None
    unlearnt: IntArray | None = None
    unshared: str = ""
    checksums: Checksums | None = None
    images: BatchImages | None = None
    image_runs: IntArray = field(default_factory=lambda: NO_INTEGERS)
    num_image_tokens: int = 0

    @property
    def known_lengths(self) -> IntArray:
        """`[documents]` tokens of each document of a batch that does not keep its padding."""
        assert self.lengths is not None
        return self.lengths

    @property
    def image_numbers(self) -> IntArray:
        """Numbers of images that ranks gather; empty if they stay, or there are none."""
        return NO_INTEGERS if self.images is None else self.images.numbers


@dataclass(frozen=True)
class DocumentReader:
    """Reads the batches of one model. It can be pickled for worker processes.

    Attributes:
        lengths_of: returns the `[documents]` lengths of a batch without padding; None if it is padded.
        packs_rows: whether padded rows become a pack.
        with_images: see `padded_rows_of`.
        vocabulary_tokens: number of tokens for which the model has embeddings; None if not known.
        with_checksum: whether several ranks hold the same batch, and compare checksums of it.
        window_tokens: shortest window of the model's layers; None if they have none.
        shared_tokens: shortest prefix that documents share; 0: none is shared.
        placeholders: tokens that features of images replace.
        moves_images: whether images may be computed on other ranks.
        finds_image_tokens: whether layers get features of images at their tokens, which move with these.
    """

    lengths_of: Callable[[Batch], IntArray | None] = document_lengths
    packs_rows: bool = False
    with_images: bool = False
    vocabulary_tokens: int | None = None
    with_checksum: bool = False
    window_tokens: int | None = None
    shared_tokens: int = 0
    placeholders: Placeholders = Placeholders()  # noqa: RUF009 (immutable)
    moves_images: bool = False
    finds_image_tokens: bool = False

    def read(self, batch: Batch) -> ReadDocuments:
        """Reads a batch. A batch on a device is first copied to the host, which waits for the device once.

        Raises:
            PackingError: as for `check_shapes`, `padded_rows_of`, `document_lengths`, `ids_checked` and `images_of`.
        """
        check_shapes(batch)
        numbered = numbered_rows(batch, self.window_tokens)
        host, sums = _on_host(numbered, row_sums_of(batch) if self.shared_tokens else {})
        with ids_checked(host, self.vocabulary_tokens, waits=True):
            padded = padded_rows_of(host, self.with_images) if self.packs_rows else None
            pack = host
            if padded is not None:
                pack = {"input_ids": padded.pack(tokens_of(host)), "cu_seq_lens_q": padded.offsets}
            lengths = self.lengths_of(pack)
        labels, beginnings, checksums = host.get("labels"), NO_BEGINNINGS, None
        if self.shared_tokens and lengths is not None and "input_ids" in host:
            pack_column = torch.Tensor.flatten if padded is None else padded.pack
            beginnings = beginnings_of(host, sums, pack_column, lengths, self.shared_tokens, self.placeholders)
            as_given = {name: column for name, column in host.items() if numbered[name] is batch.get(name)}
            found = checksums_of(as_given, {name: sampled(of_rows) for name, of_rows in sums.items()})
            checksums = {name: int(checksum) for name, checksum in found.items()}
        runs, num_image_tokens = NO_INTEGERS, 0
        if self.finds_image_tokens:
            is_image = image_tokens(host, self.placeholders.known)
            num_image_tokens = int(is_image.sum())
            runs = runs_of(is_image if padded is None else padded.pack(is_image))
        return ReadDocuments(
            lengths,
            padded,
            labels is not None and labels.numel() > 0 and bool((labels == IGNORED_LABEL).all()),
            checksum_of(host, lengths) if self.with_checksum else None,
            *beginnings,
            checksums,
            images_of(host, self.placeholders.has_sizes, self.placeholders.known) if self.moves_images else None,
            runs,
            num_image_tokens,
        )


class Reading:
    """A batch whose documents are read when first needed.

    It has no method `to`, so Accelerate leaves it and its tensors on the host.
    """

    def __init__(self, reader: DocumentReader, batch: Batch) -> None:
        needed = read_of(batch) | {name: batch[name] for name in media_of(batch)}  # all else may be large
        self._unread: tuple[DocumentReader, Batch] | None = reader, needed
        self._collated = state_of(batch)

    @cached_property
    def documents(self) -> ReadDocuments | None:
        """What was read; None if the batch cannot be read, or was written to since it was collated (collators may
        reuse their memory). Its pass then reads its own arguments, and raises what is wrong."""
        assert self._unread is not None
        (reader, batch), self._unread = self._unread, None
        if state_of(batch) != self._collated:
            return None
        try:
            return reader.read(batch)
        except Exception as error:
            log.debug("documents of a batch are read in its pass, because they could not be read before: %s", error)
            return None


@dataclass(frozen=True)
class ReadingCollator:
    """Wraps a collator, and adds a reading to its batches under `ENTRY`.

    Worker processes read at once. The training process reads later, when ranks show each other what they know and the
    device is busy.
    """

    collate: Callable[[Any], Any]
    reader: DocumentReader

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if isinstance(batch, MutableMapping) and isinstance(batch.get("input_ids"), torch.Tensor):
            batch[ENTRY] = reading = Reading(self.reader, batch)
            if get_worker_info() is not None:
                reading.documents  # noqa: B018 (remembered from here on)
        return batch


def take_reading(batch: object) -> Reading | None:
    """Takes the reading out of a batch, marks its tokens with it, and returns it; None if the batch has none."""
    if not isinstance(batch, MutableMapping) or (reading := batch.pop(ENTRY, None)) is None:
        return None
    found: Reading = reading
    mark(batch, found)
    return found


def mark(batch: Batch, reading: Reading) -> None:
    """Marks the tensors of a batch with its reading, which someone else must keep alive.

    A reading may hold these very tensors, and a storage that kept a tensor on itself alive would never be freed.
    """
    state = state_of(batch)
    marked = weakref.ref(reading), state
    for name in state.keys() - {HAS_MEDIA}:
        setattr(batch[name].untyped_storage(), MARK, marked)


def reading_of(batch: Batch, state: State | None = None) -> Reading | None:
    """Returns the reading of a pass's tensors. None if they have none, or if a tensor was replaced or written to
    since.

    The pass may lack labels, unless what was read depends on them.

    Args:
        state: `state_of` the batch, if known.
    """
    tokens = batch.get("input_ids")
    if type(tokens) is not torch.Tensor or tokens.is_meta:
        return None
    marked: tuple[weakref.ref[Reading], State] | None = getattr(tokens.untyped_storage(), MARK, None)
    if marked is None or (reading := marked[0]()) is None:
        return None
    then, now = marked[1], state_of(batch) if state is None else state
    if now != then and now.items() - then.items():
        return None
    for name in now:
        if name != HAS_MEDIA and getattr(batch[name].untyped_storage(), MARK, None) is not marked:
            return None  # another tensor, in freed memory
    if len(now) == len(then):
        return reading
    missing = then.keys() - now.keys()
    read = reading.documents
    # Kinds only tell more tokens apart.
    may_lack = {*LABELS, *KINDS_OF_TOKENS}
    is_enough = read is not None and read.lengths is not None and read.checksum is None and missing <= may_lack
    return reading if is_enough else None


def checksum_of(batch: Batch, lengths: IntArray | None) -> int:
    """Returns a checksum of a batch, and waits for its device. It includes only the sum of images, to avoid copying
    them, and the mask only if the batch keeps its padding: otherwise lengths say the same."""
    names = ("labels", "shift_labels", "position_ids", *(["attention_mask"] if lengths is None else []))
    named = [batch.get(name) for name in names]
    media = [x.sum(dtype=torch.float64)[None] for x in map(batch.get, media_of(batch)) if isinstance(x, torch.Tensor)]
    values = [tokens_of(batch), *(x for x in named if isinstance(x, torch.Tensor)), *media]
    parts = [x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for x in values]
    return crc32(b"".join([*parts, b"" if lengths is None else lengths.tobytes()]))


def _on_host(batch: Batch, sums: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Copies the entries that are read to the host, and row sums of media; media stay where they are."""
    given = read_of(batch)
    if "input_ids" not in given:
        given["inputs_embeds"] = batch["inputs_embeds"][..., :1].detach()
    on_gpu = next((value for value in (*given.values(), *sums.values()) if value.is_cuda), None)
    host, host_sums = (
        {name: value.to("cpu", non_blocking=value.is_cuda) for name, value in values.items()}
        for values in (given, sums)
    )
    if on_gpu is not None:
        torch.cuda.current_stream(on_gpu.device).record_event().synchronize()
    return {name: batch[name] for name in media_of(batch)} | host, host_sums
