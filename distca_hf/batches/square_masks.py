"""Masks: checks their shapes, and reads square masks `[B, 1, T, T]` that only say "causal, and documents apart".

Collators make them from packs for attention that takes a mask of every pair, for example sdpa. They are bool, or
numbers to add to scores: 0 if a token attends, very small if not. A rank computes only some of these pairs, and needs
documents instead. So the mask becomes numbers of documents, `[B, T]`:

    1 0 0 0 0
    1 1 0 0 0
    0 0 1 0 0    ──▶   1 1 2 2 0
    0 0 1 1 0
    0 0 0 0 0
"""

from typing import Any

import numpy as np
import torch

from distca_hf.batches.batch_documents import Batch, cache_of, tokens_of
from distca_hf.errors import PackingError


# Adding this or less to a score hides the pair.
HIDES = -1e4
REMEDY = "give zeros and ones of shape [batch, tokens], and position_ids that begin at 0 in every document"


def check_shapes(batch: Batch) -> None:
    """Checks that tokens are `[B, T]`, that a mask with one number per token fits them, and that tensors say where
    documents begin: lists would be left unread.

    Raises:
        PackingError: gives both shapes, or the type.
    """
    for name in ("attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        if isinstance(batch.get(name), list | tuple | np.ndarray):
            raise PackingError(f"{name} is a {type(batch[name]).__name__}, and must be a tensor; collate it as one")
    tokens, mask = tokens_of(batch), batch.get("attention_mask")
    shape = tuple(tokens.shape)
    if tokens.ndim != 2:
        given, form = ("input_ids", "[batch, tokens]"), ("inputs_embeds", "[batch, tokens, hidden]")
        name, expected = form if batch.get("input_ids") is None else given
        raise PackingError(f"{name} of shape {tuple(batch[name].shape)} must have the shape {expected}")
    if isinstance(mask, torch.Tensor) and mask.ndim < 3 and tuple(mask.shape) != shape:
        raise PackingError(
            f"attention_mask of shape {tuple(mask.shape)} does not fit tokens of shape {shape}; give one number per "
            "token, or leave it out"
        )


def is_square(batch: Batch) -> bool:
    """Returns whether a batch without a cache has a mask of every pair of its tokens."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or cache_of(batch) is not None:
        return False
    rows, length = tokens_of(batch).shape
    return mask.shape == (rows, 1, length, length)


def numbered_rows(batch: Batch, window_tokens: int | None = None) -> Batch:
    """Replaces a batch's square mask by numbers of documents, from 1 in every row, and 0 for padding; returns any
    other batch as it is. Reads every pair, and waits for the device.

    Args:
        window_tokens: shortest window of the model's layers; None if they have none. Other kinds of attention would
            follow the mask in these layers, too.

    Raises:
        PackingError: mask or position_ids say something else, or a document is longer than the window; names the first
            row and token.
    """
    if not is_square(batch):
        return batch
    mask, positions = batch["attention_mask"][:, 0], batch.get("position_ids")
    attends = _attends(mask)
    if mask.dtype != torch.bool and bool((others := ~attends & ~(mask <= HIDES)).any()):
        raise PackingError(
            f"attention_mask adds {float(mask[others][0]):g} to a score, and distca computes no attention bias; "
            f"{REMEDY}"
        )
    is_token = attends.diagonal(dim1=1, dim2=2)
    place = torch.arange(attends.shape[1], device=attends.device)
    first = attends.to(torch.uint8).argmax(dim=2)
    begins = is_token & (first == place)  # the first key of a query is itself
    numbers = begins.cumsum(dim=1) * is_token
    expected = (numbers[:, :, None] == numbers[:, None]) & is_token[:, :, None] & (place <= place[:, None])
    _refuse(
        (attends != expected).any(dim=2),
        "attention_mask lets it attend to tokens outside of its document, or after itself",
    )
    if window_tokens is not None:
        _refuse(
            is_token & (place - first >= window_tokens),
            f"attention_mask lets it attend to all of its document, and some layers of this model have a window of "
            f"{window_tokens} tokens",
        )
    if isinstance(positions, torch.Tensor) and positions.ndim == 2:
        restarts = torch.zeros_like(begins)
        restarts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1  # also after padding
        _refuse(
            restarts & is_token & ~begins, "position_ids restart, and attention_mask lets it attend to tokens before"
        )
    return {**batch, "attention_mask": numbers}


def tokens_in(batch: Batch) -> dict[str, Any]:
    """Returns the mask that replaces a square one that was read: `[B, T]`, True for tokens. Empty for any other
    batch."""
    if not is_square(batch):
        return {}
    return {"attention_mask": _attends(batch["attention_mask"][:, 0].diagonal(dim1=1, dim2=2))}


def _attends(mask: torch.Tensor) -> torch.Tensor:
    """Returns bool, True if a query attends to a key."""
    return mask if mask.dtype == torch.bool else mask == 0


def _refuse(wrong: torch.Tensor, what: str) -> None:
    """Raises for the first True token of bool `[B, T]`."""
    if bool(wrong.any()):
        row, token = wrong.nonzero()[0].tolist()
        raise PackingError(f"row {row}, token {token}: {what}; {REMEDY}")
