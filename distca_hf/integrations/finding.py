"""Finding documents: reads which documents a batch holds from its mask, positions and offsets.

Only the tensors' values say how many documents and tokens there are. In a compiled graph an operator finds them: the
graph neither breaks nor depends on them.

Layers that carry a state from token to token (`models.mixers`) ask for lengths of documents on the host.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from distca_hf.arrays import IntArray
from distca_hf.batches.batch_documents import (
    POSITIONS_WITH_TEXT,
    Batch,
    check_beginnings,
    check_goes_on,
    check_mask_numbers,
    document_lengths,
    documents_at,
    given_documents,
    offsets_of,
    padded_rows,
    tokens_of,
    whole_rows,
)
from distca_hf.batches.square_masks import check_shapes
from distca_hf.errors import PackingError, UnsupportedAttentionError
from distca_hf.kernels.interface import Spans
from distca_hf.runtime.custom_op import define_op
from distca_hf.runtime.local_attention import Documents


# Marks places after the given ones, in a mask that was extended to the length of its cache.
NOT_GIVEN = -1


class Given(NamedTuple):
    """Everything a batch says about its documents. An operator takes it field by field."""

    # Rows of the batch; queries and keys of each.
    batch_size: int
    queries: int
    keys: int
    # Offsets of documents. They override everything else.
    cu_seq_lens_q: torch.Tensor | None
    cu_seq_lens_k: torch.Tensor | None
    # Places of the first query and the first key in their row, tokens in a cache included.
    q_offset: int
    kv_offset: int
    cached: torch.Tensor | None  # `q_offset` of a static cache, which counts it on its device
    # `[B, places]`, False for each place of a row that is padding; or as `all_places` returns it.
    padding: torch.Tensor | None
    numbers: torch.Tensor | None  # the same before it was made bool
    positions: torch.Tensor | None  # positions of the queries
    # bool `[B, T - 1]`, True for each token in the same document as the token before it. It overrides positions.
    goes_on: torch.Tensor | None
    unseen: bool  # whether the batch may have positions that are not given here


def all_places(padding: torch.Tensor, places: int) -> torch.Tensor:
    """Returns a mask of one length for all passes with a static cache: int8 `[B, places]`, `NOT_GIVEN` at its end."""
    given = padding.bool().to(torch.int8)
    return torch.nn.functional.pad(given, (0, max(0, places - given.shape[1])), value=NOT_GIVEN)


def find_documents(device: torch.device, given: Given) -> Documents:
    """Returns the documents that a batch holds, on a device. Raises PackingError if a document does not begin at
    position 0, or a mask, positions or offsets do not fit; UnsupportedAttentionError if nothing says whether rows hold
    several documents."""
    batch_size, queries, keys, positions = given.batch_size, given.queries, given.keys, given.positions
    # 1. Complete sources: offsets, and the function that Transformers made from packed positions.
    if given.cu_seq_lens_q is not None:
        rows = batch_size * queries, batch_size * keys
        return given_documents(given.cu_seq_lens_q, given.cu_seq_lens_k, *rows, device)
    if given.goes_on is not None:
        goes_on = given.goes_on.expand(batch_size, queries - 1)
        begins = torch.nn.functional.pad(~goes_on, (1, 0), value=True)  # also at the start of every row
        if positions is not None and positions.shape[-1] == queries and positions.ndim == 2:
            check_beginnings(positions.expand(begins.shape)[begins])
        offsets, longest = offsets_of(begins)
        return Documents.of(Spans(offsets, offsets, longest, longest))
    # 2. Positions: they restart at the beginning of documents, but after a cache all queries must continue one.
    first = given.q_offset if given.cached is None else int(given.cached)
    tokens = _tokens(given, first + queries, device)
    query_tokens = None if tokens is None else tokens[:, first - given.kv_offset :][:, :queries]
    if queries > 1 and first == 0:
        check_mask_numbers({"attention_mask": given.numbers, "position_ids": positions})
    if queries > 1 and positions is not None and positions.ndim == 2:
        if positions.shape[-1] != queries:
            raise PackingError(f"position_ids has {positions.shape[-1]} positions for {queries} tokens")
        positions = positions.expand(batch_size, queries)
        if first == 0:
            return documents_at(positions, tokens)
        check_goes_on(positions, query_tokens)
    elif queries > 1 and given.unseen and first == 0:
        raise UnsupportedAttentionError(
            "layers were given no position_ids, and a compiled pass with a cache or a mask cannot find them: rows may "
            "hold several documents. Leave attention_mask out and set use_cache=False, or do not compile this pass"
        )
    # 3. Otherwise each row, without its padding, is a document.
    if tokens is None or query_tokens is None:
        return whole_rows(batch_size, queries, keys, device)
    return padded_rows(query_tokens, tokens)


def _tokens(given: Given, filled: int, device: torch.device) -> torch.Tensor | None:
    """Returns bool `[B, S]`, False for keys that are padding or free places of a cache; None if all are tokens.
    `filled` places of a row count, this pass included."""
    padding, begin, end = given.padding, given.kv_offset, given.kv_offset + given.keys
    if padding is None and filled >= end:
        return None
    tokens = (torch.arange(begin, end, device=device) < filled).expand(given.batch_size, given.keys)
    if padding is not None:
        if padding.dtype == torch.int8:
            places = int((padding[0] != NOT_GIVEN).sum())
        else:
            places, padding = padding.shape[1], all_places(padding, end)
        if places < filled:
            raise PackingError(
                f"attention_mask has {places} places in a row for {filled} tokens; give one per token, also "
                "for tokens whose keys are in the cache"
            )
        tokens = tokens & (padding[:, begin:end] == 1)
    return None if tokens.all() else tokens


def _find_documents(
    there: torch.Tensor,
    batch_size: int,
    queries: int,
    keys: int,
    cu_seq_lens_q: torch.Tensor | None,
    cu_seq_lens_k: torch.Tensor | None,
    q_offset: int,
    kv_offset: int,
    cached: torch.Tensor | None,
    padding: torch.Tensor | None,
    numbers: torch.Tensor | None,
    positions: torch.Tensor | None,
    goes_on: torch.Tensor | None,
    unseen: bool,
    chunk_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the fields of `Documents` in a graph, with rows even if all of them are tokens."""
    given = Given(
        batch_size, queries, keys, cu_seq_lens_q, cu_seq_lens_k, q_offset, kv_offset, cached, padding, numbers,
        positions, goes_on, unseen,
    )  # fmt: skip
    found = in_chunks(find_documents(there.device, given), given, chunk_tokens)
    places = _most_offsets(batch_size, queries, cu_seq_lens_q, chunk_tokens)
    offsets = [_filled_up(offsets, places) for offsets in (found.cu_seqlens_q, found.cu_seqlens_k)]
    sizes, rows = found.sizes.clone(), []
    of_all = ((batch_size * queries, found.query_rows), (batch_size * keys, found.key_rows))
    for place, (count, of_tokens) in enumerate(of_all, start=3):
        tokens = torch.arange(count, device=there.device) if of_tokens is None else of_tokens
        rows.append(_filled_up(tokens, count))
        sizes[place] = len(tokens)
    return offsets[0], offsets[1], sizes, rows[0], rows[1]


def _shapes(
    there: torch.Tensor, batch_size: int, queries: int, keys: int, cu_seq_lens_q: torch.Tensor | None, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    places = _most_offsets(batch_size, queries, cu_seq_lens_q, others[-1])
    offsets_q, offsets_k = (there.new_empty([places], dtype=torch.int32) for _ in range(2))
    sizes = torch.empty([5], dtype=torch.int64, device="cpu")
    rows_q, rows_k = (
        there.new_empty([count], dtype=torch.int64) for count in (batch_size * queries, batch_size * keys)
    )
    return offsets_q, offsets_k, sizes, rows_q, rows_k


def _most_offsets(batch_size: int, queries: int, cu_seq_lens_q: torch.Tensor | None, chunk_tokens: int | None) -> int:
    """Returns the largest number of offsets: one more than documents. Only given offsets allow empty documents."""
    tokens = batch_size * max(queries, 1)
    if cu_seq_lens_q is None:
        return tokens + 1
    return cu_seq_lens_q.numel() + (tokens // chunk_tokens if chunk_tokens else 0)


def _filled_up(numbers: torch.Tensor, places: int) -> torch.Tensor:
    """Returns a copy of the numbers, padded with zeros to length `places`."""
    copy = numbers.new_zeros(places)
    copy[: len(numbers)] = numbers
    return copy


find_in_graph = define_op(_find_documents, _shapes)


def in_chunks(documents: Documents, given: Given, chunk_tokens: int | None) -> Documents:
    """Returns documents divided into chunks of this length, or unchanged if it is None or no document is longer.
    Raises UnsupportedAttentionError if queries with a cache are beyond the first chunk: the cache may lack some of
    their keys."""
    if chunk_tokens is None:
        return documents
    first = given.q_offset if given.cached is None else int(given.cached)
    if first and first + given.queries > chunk_tokens:
        raise UnsupportedAttentionError(
            f"layers attend inside of chunks of {chunk_tokens} tokens, and a pass with a cache is at token "
            f"{first + given.queries}: beyond the first chunk these are computed without a cache only. Set "
            "use_cache=False, or run this model without distca_hf"
        )
    num_documents, _, longest_keys, *_ = documents.sizes.tolist()
    if longest_keys <= chunk_tokens:
        return documents
    offsets = documents.cu_seqlens_k[: num_documents + 1].tolist()
    cut = [at for start, stop in pairwise(offsets) for at in range(start, stop, chunk_tokens)] + offsets[-1:]
    cut_offsets = documents.cu_seqlens_q.new_tensor(cut)
    spans = Spans(cut_offsets, cut_offsets, chunk_tokens, chunk_tokens)
    return Documents.of(spans, documents.query_rows, documents.key_rows)


def name_of(module: nn.Module) -> str:
    """Returns class and number of a layer."""
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"


def agreed_lengths(batch: Batch) -> IntArray | None:
    """Returns lengths of the documents of a training batch, row after row; None if the batch is padded. Raises
    PackingError if offsets, positions and `seq_idx` disagree."""
    lengths = document_lengths(batch)
    if lengths is not None:
        _check_seq_idx(batch, lengths)
    return lengths


def stated_lengths(batch: Batch) -> IntArray | None:
    """Returns `agreed_lengths`. Raises PackingError also if nothing says where documents begin."""
    lengths = agreed_lengths(batch)
    stated = any(batch.get(name) is not None for name in ("cu_seq_lens_q", "position_ids", "attention_mask"))
    if lengths is not None and len(lengths) and not stated:
        raise PackingError(
            "nothing says where documents begin, and layers of this model carry a state from token to token: one "
            "document would run into the next. Give position_ids or cu_seq_lens_q (DataCollatorWithFlattening does), "
            "or an attention_mask if every row is a document"
        )
    return lengths


def lengths_and_rows(batch: Batch) -> tuple[IntArray, IntArray | None]:
    """Returns lengths of the documents of any batch, and the place of each of their tokens in the flattened batch;
    None instead of places if documents fill all rows, one after the other. Raises PackingError if offsets, positions,
    `seq_idx` and mask disagree, or a document does not begin at position 0."""
    lengths = agreed_lengths(batch)
    if lengths is not None:
        return lengths, None
    check_shapes(batch)
    tokens, mask, positions = tokens_of(batch), batch["attention_mask"], batch.get("position_ids")
    if positions is not None and positions.ndim == 3:  # several positions per token, as of images
        positions = positions[0] if len(positions) == POSITIONS_WITH_TEXT else None
    is_token = mask != 0
    if positions is None:
        found = padded_rows(is_token, is_token)
    else:
        found = documents_at(positions.expand(tokens.shape), is_token)
    assert found.query_rows is not None
    return found.cu_seqlens_q.diff().cpu().numpy().astype(np.int64), found.query_rows.cpu().numpy()


def _check_seq_idx(batch: Batch, lengths: IntArray) -> None:
    """Checks that `seq_idx`, if a batch has it, changes at the first token of every document and nowhere else."""
    seq_idx = batch.get("seq_idx")
    if not isinstance(seq_idx, torch.Tensor):
        return
    numbers, tokens = seq_idx.flatten().cpu().numpy(), int(lengths.sum())
    if len(numbers) != tokens:
        raise PackingError(f"seq_idx numbers {len(numbers)} tokens, the batch has {tokens}")
    if not tokens:
        return
    begins = np.zeros(tokens, dtype=bool)
    begins[np.cumsum(lengths)[:-1]] = True
    changes = np.diff(numbers, prepend=numbers[:1]) != 0
    rows = seq_idx.shape[-1]
    changes[::rows] = begins[::rows]  # numbers may restart in every row, or continue
    wrong = np.flatnonzero(begins != changes)
    if len(wrong):
        at = int(wrong[0])
        one, other = ("begins", "goes on") if begins[at] else ("goes on", "begins")
        raise PackingError(
            f"token {at}: a document {one} there by cu_seq_lens_q or position_ids, and {other} by seq_idx "
            f"({numbers[at - 1]} is followed by {numbers[at]}); leave seq_idx out of the batch, or make them agree: "
            "give position_ids that begin at 0 in every document"
        )
