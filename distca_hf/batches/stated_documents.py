"""Stated documents: documents of a batch for a model whose mixers must keep them apart.

Attention may take a row for a document where nothing else is said. Mixers carry a state through the whole row, so a
batch that is trained on must say where documents begin, and all that it says must agree.
"""

import numpy as np
import torch

from distca_hf.arrays import IntArray
from distca_hf.batches.batch_documents import (
    POSITIONS_WITH_TEXT,
    Batch,
    document_lengths,
    documents_at,
    padded_rows,
    tokens_of,
)
from distca_hf.errors import PackingError


def stated_lengths(batch: Batch) -> IntArray | None:
    """Returns lengths of the documents of a batch that is trained on, row after row; None if the batch is padded.

    Raises:
        PackingError: nothing says where documents begin, or offsets, positions and `seq_idx` disagree.
    """
    lengths = document_lengths(batch)
    if lengths is None:
        return None
    if len(lengths) and all(batch.get(name) is None for name in ("cu_seq_lens_q", "position_ids", "attention_mask")):
        raise PackingError(
            "nothing says where documents begin, and layers of this model carry a state from token to token: one "
            "document would run into the next. Give position_ids or cu_seq_lens_q (DataCollatorWithFlattening does), "
            "or an attention_mask if every row is a document"
        )
    _check_seq_idx(batch, lengths)
    return lengths


def lengths_and_rows(batch: Batch) -> tuple[IntArray, IntArray | None]:
    """Returns lengths of the documents of any batch, and the row of each of their tokens, counted over the batch; None
    if documents fill all rows, one after the other.

    Raises:
        PackingError: offsets, positions, `seq_idx` and mask disagree, or a document does not begin at position 0.
    """
    lengths = document_lengths(batch)
    if lengths is not None:
        _check_seq_idx(batch, lengths)
        return lengths, None
    tokens, mask, positions = tokens_of(batch), batch["attention_mask"], batch.get("position_ids")
    if mask.shape != tokens.shape:
        raise PackingError(
            f"attention_mask of shape {tuple(mask.shape)} does not fit tokens of shape {tuple(tokens.shape)}; give "
            "zeros and ones of shape [batch, tokens]"
        )
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
    """Checks that `seq_idx`, where a batch has it, changes at the first token of every document and nowhere else.

    Raises:
        PackingError: names the first token where it does not.
    """
    seq_idx = batch.get("seq_idx")
    if not isinstance(seq_idx, torch.Tensor):
        return
    numbers, tokens = seq_idx.flatten().cpu().numpy(), int(lengths.sum())
    if len(numbers) != tokens:
        raise PackingError(f"seq_idx numbers {len(numbers)} tokens, the batch has {tokens}")
    begins = np.zeros(tokens, dtype=bool)
    begins[np.cumsum(lengths)[:-1]] = True
    changes = np.diff(numbers, prepend=numbers[:1]) != 0
    rows = seq_idx.shape[-1]
    changes[::rows] = begins[::rows]  # numbers may begin anew in every row, or go on
    wrong = np.flatnonzero(begins != changes)
    if len(wrong):
        at = int(wrong[0])
        one, other = ("begins", "goes on") if begins[at] else ("goes on", "begins")
        raise PackingError(
            f"token {at}: a document {one} there by cu_seq_lens_q or position_ids, and {other} by seq_idx "
            f"({numbers[at - 1]} is followed by {numbers[at]}); leave seq_idx out of the batch, or make them agree"
        )
