"""Documents of a batch: where each begins, by offsets, positions or rows.

Offsets (`cu_seq_lens_q`) take precedence. Without them a document begins at every row, and wherever `position_ids`
restart. A mask that numbers documents must agree with positions. Given batches (`batches.given`) need lengths. A batch
that one rank attends to by itself also needs rows of queries and of keys.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from distca_hf.arrays import IntArray, as_int_array
from distca_hf.data.documents import IGNORED_LABEL
from distca_hf.data.rows import MEDIA
from distca_hf.errors import PackingError, and_more
from distca_hf.kernels.interface import Spans
from distca_hf.runtime.local_attention import Documents


# Rows of positions if the first one is for text: three for images follow.
POSITIONS_WITH_TEXT = 4
# Arguments that number the kinds of tokens: 0 is text.
KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
# Names of the argument that holds keys and states of earlier tokens: in Transformers 5.24 and later, and before.
CACHES = ("cache", "past_key_values", "cache_params")
# Keywords of a model's forward pass: tensors, and flags or caches of any type.
Batch = Mapping[str, Any]


def whole_rows(batch_size: int, queries: int, keys: int, device: torch.device) -> Documents:
    """Returns every row of the batch as one document."""
    offsets = [
        torch.arange(0, (batch_size + 1) * rows, rows, dtype=torch.int32, device=device) for rows in (queries, keys)
    ]
    return Documents.of(Spans(offsets[0], offsets[1], queries, keys))


def padded_rows(query_tokens: torch.Tensor, key_tokens: torch.Tensor) -> Documents:
    """Returns each row's tokens as one document.

    Args:
        query_tokens, key_tokens: bool `[B, T]` and `[B, S]`, True for tokens.
    """
    offsets, longest, rows = [], [], []
    for tokens in (query_tokens, key_tokens):
        lengths = tokens.sum(dim=1, dtype=torch.int32)
        offsets.append(torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)))
        longest.append(int(lengths.max()))
        rows.append(tokens.flatten().nonzero().flatten())
    return Documents.of(Spans(offsets[0], offsets[1], longest[0], longest[1]), rows[0], rows[1])


def documents_at(positions: torch.Tensor, tokens: torch.Tensor | None = None) -> Documents:
    """Returns documents that begin at every row of the batch, and wherever positions restart.

    Args:
        positions: `[B, T]`.
        tokens: bool `[B, S]`, True for key tokens; places after the queries are free. None if all are tokens.

    Raises:
        PackingError: a document does not begin at position 0.
    """
    if tokens is None:
        begins = _restarts(positions)
        check_beginnings(positions[begins])
        offsets, longest = offsets_of(begins)
        return Documents.of(Spans(offsets, offsets, longest, longest))
    query_tokens = tokens[:, : positions.shape[1]]
    row_of, place = query_tokens.nonzero(as_tuple=True)
    positions = positions[row_of, place]
    begins = torch.ones(positions.shape, dtype=torch.bool, device=positions.device)
    first = begins.clone()
    first[1:] = row_of[1:] != row_of[:-1]
    # Padding between two tokens may leave positions out; nothing else may.
    adjacent = place[1:] == place[:-1] + 1
    goes_on = torch.where(adjacent, positions[1:] == positions[:-1] + 1, positions[1:] > positions[:-1])
    begins[1:] = first[1:] | ~goes_on
    # In a row that is padded on its left, positions may count the padding.
    check_beginnings(positions[begins & ~(first & (place > 0))])
    offsets, longest = offsets_of(begins)
    query_rows, key_rows = (x.flatten().nonzero().flatten() for x in (query_tokens, tokens))
    return Documents.of(Spans(offsets, offsets, longest, longest), query_rows, key_rows)


def check_goes_on(positions: torch.Tensor, query_tokens: torch.Tensor | None) -> None:
    """Refuses documents that begin after others whose keys are in a cache.

    Args:
        positions: `[B, T]`.
        query_tokens: bool `[B, T]`, True for tokens; None if all are tokens.

    Raises:
        PackingError: positions restart.
    """
    restarts = positions[:, 1:] <= positions[:, :-1]
    if query_tokens is not None:
        restarts &= query_tokens[:, 1:] & query_tokens[:, :-1]
    if restarts.any():
        row, token = (int(index) + step for index, step in zip(restarts.nonzero()[0], (0, 1), strict=True))
        raise PackingError(
            f"row {row}, token {token}: a document begins (position {int(positions[row, token])}) after tokens whose "
            "keys are in the cache; give packed documents without a cache, or go on with one document per row"
        )


def check_cu_seqlens(cu_seqlens: ArrayLike, num_tokens: int) -> IntArray:
    """Returns document lengths from cumulative sequence lengths `[0, ..., num_tokens]`; empty documents are allowed.

    Raises:
        PackingError: names the first position that is wrong, and its values.
    """
    borders = as_int_array(cu_seqlens, "cu_seqlens")
    if len(borders) == 0 or borders[0] != 0:
        first = borders[0] if len(borders) else "nothing"
        raise PackingError(f"cu_seqlens must begin with 0, not {first}")
    if borders[-1] != num_tokens:
        raise PackingError(f"cu_seqlens ends at {borders[-1]}, but there are {num_tokens} tokens")
    lengths = np.diff(borders)
    falling = np.flatnonzero(lengths < 0)
    if len(falling):
        at = int(falling[0])
        raise PackingError(f"cu_seqlens decreases at index {at + 1}: {borders[at]} is followed by {borders[at + 1]}")
    return lengths


def given_documents(
    cu_seq_lens_q: torch.Tensor, cu_seq_lens_k: torch.Tensor | None, queries: int, keys: int, device: torch.device
) -> Documents:
    """Returns the documents that the offsets given to a layer describe.

    Args:
        cu_seq_lens_q, cu_seq_lens_k: offsets; if the latter are None, keys have the offsets of queries.

    Raises:
        PackingError: offsets do not fit the rows, or each other.
    """
    offsets, longest, tokens = [], [], []
    for given, rows in ((cu_seq_lens_q, queries), (cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k, keys)):
        offsets.append(given.to(device=device, dtype=torch.int32).flatten())
        lengths = check_cu_seqlens(offsets[-1].cpu().numpy(), rows)
        longest.append(int(lengths.max(initial=0)))
        tokens.append(lengths)
    if len(offsets[0]) != len(offsets[1]):
        raise PackingError(
            f"cu_seq_lens_q holds {len(offsets[0]) - 1} documents, cu_seq_lens_k {len(offsets[1]) - 1}; give the same "
            "documents for queries and keys"
        )
    short = np.flatnonzero(tokens[0] > tokens[1])
    if len(short):
        document = int(short[0])
        raise PackingError(
            f"document {document} has {tokens[0][document]} queries (cu_seq_lens_q) but {tokens[1][document]} keys "
            "(cu_seq_lens_k): its first queries could attend to nothing; give at least as many keys"
        )
    return Documents.of(Spans(offsets[0], offsets[1], longest[0], longest[1]))


def check_positions_fit(positions: torch.Tensor | None, tokens: torch.Tensor) -> None:
    """Checks that there is a position for each token of `[B, T]`, or for each token of one row.

    Raises:
        PackingError: positions have another shape.
    """
    if positions is not None and positions.shape not in (tokens.shape, (1, tokens.shape[-1])):
        several = "; with positions of images give cu_seq_lens_q, too" if positions.ndim == 3 else ""
        raise PackingError(
            f"position_ids of shape {tuple(positions.shape)} do not fit tokens of shape {tuple(tokens.shape)}; "
            f"give one per token, or leave them out{several}"
        )


def check_beginnings(positions: torch.Tensor) -> None:
    """Refuses documents that do not begin at position 0: part of them is missing.

    Raises:
        PackingError: names the position.
    """
    if positions.any():
        raise PackingError(
            f"position_ids begin a document at position {int(positions.max())} instead of 0: part of it is missing. A "
            "batch of plugin.dataloader must be passed on with its distca_plan; in other batches begin documents at "
            "0, or give the keys of earlier tokens (cache)"
        )


def offsets_of(begins: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns offsets (int32) and longest length of documents, from bools that are True at beginnings."""
    starts = begins.flatten().nonzero().flatten()
    offsets = torch.cat([starts, starts.new_tensor([begins.numel()])]).to(torch.int32)
    return offsets, int(offsets.diff().max()) if len(starts) else 0


def check_runs(is_token: torch.Tensor) -> None:
    """Checks that the tokens of every row, bool `[B, L]`, are contiguous.

    Raises:
        PackingError: a row has no token, or padding between tokens.
    """
    begins = is_token.clone()
    begins[:, 1:] &= ~is_token[:, :-1]
    runs = begins.sum(dim=1)
    wrong = (runs != 1).nonzero().flatten().tolist()
    if not wrong:
        return
    row = wrong[0]
    if int(runs[row]) == 0:
        raise PackingError(
            f"row {row} of a padded batch has no token: its attention_mask is 0 everywhere{and_more(len(wrong) - 1)}. "
            "Leave such rows out of the dataset"
        )
    hole = int((begins[row].cumsum(0) > 1).nonzero()[0])
    raise PackingError(
        f"row {row} of a padded batch has padding between tokens: its attention_mask begins again at place {hole}"
        f"{and_more(len(wrong) - 1)}. Pad rows only on the left, or only on the right"
    )


def check_mask_numbers(batch: Batch) -> None:
    """Checks that positions agree with a mask that numbers the documents of its rows (1 1 1 2 2).

    Transformers treats every number except 0 as "no padding", so documents would see each other.

    Raises:
        PackingError: the mask numbers documents, and positions are missing or restart elsewhere.
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.dtype == torch.bool or mask.numel() == 0:
        return
    if cache_of(batch) is not None or (largest := mask.max().item()) <= 1:
        return
    # mask       1 1 1 2 2 0        Numbers must change exactly where positions restart. Padding counts for neither.
    # positions  0 1 2 0 1 0
    if isinstance(positions, torch.Tensor) and positions.ndim == 2 and positions.shape[-1] == mask.shape[-1]:
        changes = (mask[:, 1:] != mask[:, :-1]) & (mask[:, 1:] > 0)
        restarts = positions[:, 1:] != positions[:, :-1] + 1
        if bool(((changes & ~restarts) | (restarts & ~changes & (mask[:, 1:] > 0))).any()):
            raise PackingError(
                f"attention_mask numbers {largest:g} documents, but position_ids restart at other tokens; leave "
                "the numbers out (ones instead), or make them agree"
            )
        return
    raise PackingError(
        f"attention_mask numbers documents (its largest value is {largest:g}), and no position_ids restart with "
        "them: documents would see each other. Give position_ids that begin at 0 in every document, as "
        "DataCollatorWithFlattening does"
    )


@contextmanager
def ids_checked(batch: Batch, vocabulary_tokens: int | None, waits: bool) -> Iterator[None]:
    """Checks, at the end of a `with` block, that a model has embeddings for the tokens of a batch. If the block waits
    for the device, the check need not wait again.

    Args:
        waits: whether the check may wait for a device.

    Raises:
        PackingError: names the first token without an embedding.
    """
    ids = batch.get("input_ids")
    if vocabulary_tokens is None or not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.numel() == 0:
        yield
        return
    if ids.device.type != "cpu" and not waits:
        yield
        return
    extremes = torch.stack(ids.aminmax()).to("cpu", non_blocking=ids.is_cuda)
    arrived = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None
    yield
    if arrived is not None:
        arrived.synchronize()
    lowest, highest = extremes.tolist()
    if lowest >= 0 and highest < vocabulary_tokens:
        return
    row, token = ((ids < 0) | (ids >= vocabulary_tokens)).nonzero()[0].tolist()
    raise PackingError(
        f"row {row} of the batch: input_ids is {int(ids[row, token])} at token {token}, and tokens are 0 to "
        f"{vocabulary_tokens - 1} in this model. Tokenise with the tokenizer of the model, or resize its embeddings"
    )


def cache_of(batch: Batch) -> Any:
    """Returns the cache that a batch continues or fills; None if there is none."""
    found = [cache for cache in map(batch.get, CACHES) if cache is not None]
    return found[0] if found else None


def tokens_of(batch: Batch) -> torch.Tensor:
    """Returns a tensor with one element per token of a batch."""
    tokens = batch.get("input_ids")
    return batch["inputs_embeds"][..., 0] if tokens is None else tokens


def shifted_labels(batch: Batch) -> torch.Tensor | None:
    """Returns labels of a batch, shifted in its rows as a model's loss would shift them; None if it has none."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if shifted is not None or not isinstance(labels, torch.Tensor):
        return shifted
    return torch.constant_pad_nd(labels[..., 1:], (0, 1), IGNORED_LABEL)  # quicker than `functional.pad`


def media_of(batch: Batch) -> list[str]:
    """Returns names of the images, videos and sound that a batch holds; does not wait for a device."""
    filled = []
    for name, given in batch.items():
        if names_media(name) and isinstance(given, torch.Tensor | list | tuple):
            if given.numel() if isinstance(given, torch.Tensor) else given:
                filled.append(name)
    return filled


@lru_cache(maxsize=1024)
def names_media(name: str) -> bool:
    """Returns whether an entry of this name holds images, videos or sound."""
    return MEDIA.search(name) is not None


def document_lengths(batch: Batch) -> IntArray | None:
    """Returns lengths of the documents of a batch, row after row; None if the batch is padded.

    `cu_seq_lens_q` takes precedence. Without it a document begins at every row, and wherever `position_ids` restart.

    Raises:
        PackingError: offsets, positions or numbers in the mask do not fit the tokens, or each other.
    """
    tokens = tokens_of(batch)
    check_mask_numbers(batch)
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and not bool(mask.all()):
        return None
    if tokens.numel() == 0:
        return as_int_array([], "document lengths")
    offsets, positions = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    if offsets is not None:
        _check_key_offsets(offsets, batch.get("cu_seq_lens_k"))
    if positions is not None and positions.ndim == 3:  # several positions per token, as of images
        if offsets is not None:
            positions = None  # they need not restart at documents
        elif len(positions) == POSITIONS_WITH_TEXT:
            positions = positions[0]
    check_positions_fit(positions, tokens)
    if offsets is not None and positions is not None:
        lengths = _agreed_lengths(offsets, positions.expand(tokens.shape))
    else:
        offsets = _offsets_of_rows(tokens, positions) if offsets is None else offsets
        lengths = check_cu_seqlens(offsets.flatten().cpu().numpy(), tokens.numel())
    return lengths[lengths > 0]


def _offsets_of_rows(tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Returns `[documents + 1]` offsets: a document begins at every row, and wherever positions restart."""
    if positions is None:
        rows, length = tokens.shape
        return whole_rows(rows, length, length, tokens.device).cu_seqlens_q
    positions = positions.expand(tokens.shape)
    # Joined to copy both to the host at once.
    starts = _restarts(positions).flatten().nonzero().flatten()
    starts, first_positions = torch.stack([starts, positions.flatten()[starts]]).cpu()
    check_beginnings(first_positions)
    return torch.cat([starts, starts.new_tensor([positions.numel()])])


def _restarts(positions: torch.Tensor) -> torch.Tensor:
    """Returns bool `[B, T]`, True at the beginning of every row, and wherever positions do not rise by one."""
    begins = torch.ones(positions.shape, dtype=torch.bool, device=positions.device)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return begins


def _check_key_offsets(offsets: torch.Tensor, key_offsets: torch.Tensor | None) -> None:
    """Checks that keys have the same documents as queries: ranks plan for both at once."""
    if key_offsets is None or key_offsets is offsets:
        return
    if not torch.equal(key_offsets.flatten().to(offsets), offsets.flatten()):
        raise PackingError(
            f"cu_seq_lens_k (of {key_offsets.numel() - 1} documents) differs from cu_seq_lens_q (of "
            f"{offsets.numel() - 1}); give the same documents for queries and keys"
        )


def _agreed_lengths(offsets: torch.Tensor, positions: torch.Tensor) -> IntArray:
    """Returns `[documents]` lengths from offsets. `[B, T]` positions must restart at these."""
    # Joined to copy both to the host at once.
    numbers = torch.cat([offsets.flatten().to(positions.device), positions.flatten()]).cpu().numpy()
    lengths = check_cu_seqlens(numbers[: offsets.numel()], positions.numel())
    begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
    given, expected = numbers[offsets.numel() :], np.arange(positions.numel()) - begins
    wrong = np.flatnonzero(given != expected)
    if len(wrong):
        at = int(wrong[0])
        raise PackingError(
            f"token {at}: position_ids say position {given[at]}, but cu_seq_lens_q says {expected[at]} (its document "
            f"begins at token {begins[at]}); leave one of the two out of the batch, or make them agree"
        )
    return lengths
