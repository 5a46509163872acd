"""Batches of given documents, as collators make them: a row for each, or one row of all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from distca_hf import prefixes
from distca_hf.batches import document_gather
from support.models import VOCABULARY


Batch = dict[str, Any]
Documents = Sequence[torch.Tensor]


@contextmanager
def prefixes_in_steps_of(tokens: int) -> Iterator[None]:
    """Compares prefixes in steps of this many tokens."""
    with patch.object(prefixes, "BLOCK_TOKENS", tokens), patch.object(document_gather, "BLOCK_TOKENS", tokens):
        yield


def words(tokens: int, seed: int) -> torch.Tensor:
    """Returns random tokens."""
    return torch.randint(3, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed))


def padded(documents: Documents, side: str = "right", learnt_from: int = 1) -> Batch:
    """Returns a row for each document."""
    longest = max(map(len, documents))
    ids = torch.zeros(len(documents), longest, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, document in enumerate(documents):
        first = longest - len(document) if side == "left" else 0
        at = slice(first, first + len(document))
        ids[row, at], mask[row, at] = document, 1
        labels[row, first + learnt_from : at.stop] = document[learnt_from:]
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def packed(documents: Documents, learnt_from: int = 1) -> Batch:
    """Returns one row of all documents."""
    ids = torch.cat([*documents])[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(positions < learnt_from, -100), "position_ids": positions}
