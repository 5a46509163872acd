"""Buckets: documents of similar lengths in padded batches, for functions that cannot take packed rows.

    rows of the pack    | d0 d0 d0 d0 d0 | d1 d1 | d2 d2 d2 d2 d2 d2 | padding |
    batches             | d0 d0 d0 d0 d0  · |       | d1 d1 |
                        | d2 d2 d2 d2 d2 d2 |

Documents are gathered into batches with padding on the right, and results are scattered back. Tokens must not depend
on later ones, so that padding changes nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from distca_hf.arrays import IntArray, exclusive_cumsum, ranges


# Shorter documents share a batch, because padding costs less than a call.
SHORT_TOKENS = 64


class Bucket(NamedTuple):
    """Documents of similar lengths.

    Attributes:
        documents, longest_tokens: sizes of the padded batch.
        numbers: int64 `[documents]` their numbers among all documents.
        rows: int64 `[tokens]` rows of their tokens in the pack.
        places: int64 `[tokens]` places of their tokens in the padded batch, counted row by row.
    """

    documents: int
    longest_tokens: int
    numbers: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor

    def gathered(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns `[documents, longest_tokens, ...]` of `[tokens, ...]`, padded with zeros."""
        padded = flat.new_zeros(self.documents * self.longest_tokens, *flat.shape[1:])
        padded = padded.index_copy(0, self.places, flat.index_select(0, self.rows))
        return padded.unflatten(0, (self.documents, self.longest_tokens))


class Buckets:
    """Divides documents into buckets.

    Args:
        document_tokens: `[documents]` lengths.
        device: device of the tokens.
        rows: `[tokens]` rows of the documents' tokens; None for consecutive rows.
    """

    def __init__(self, document_tokens: IntArray, device: torch.device, rows: IntArray | None = None) -> None:
        starts = exclusive_cumsum(document_tokens)
        power = np.ceil(np.log2(np.maximum(document_tokens, SHORT_TOKENS)))
        self._buckets = []
        for of_bucket in np.unique(power):
            chosen = np.flatnonzero(power == of_bucket)
            tokens = document_tokens[chosen]
            longest = int(tokens.max())
            at = ranges(starts[chosen], tokens)
            places = ranges(np.arange(len(chosen)) * longest, tokens)
            indices = chosen, at if rows is None else rows[at], places
            self._buckets.append(Bucket(len(chosen), longest, *(to_device(index, device) for index in indices)))

    def run(self, function: Callable[[Bucket], torch.Tensor], num_rows: int) -> torch.Tensor:
        """Runs a function on every bucket.

        Args:
            function: gathers the rows of a bucket, and returns `[documents, longest_tokens, ...]`.

        Returns:
            `[num_rows, ...]` its results; 0 in rows outside documents.
        """
        joined: torch.Tensor | None = None
        for bucket in self._buckets:
            out = function(bucket).flatten(0, 1)
            if joined is None:
                joined = out.new_zeros(num_rows, *out.shape[1:])
            joined = joined.index_copy(0, bucket.rows, out.index_select(0, bucket.places))
        assert joined is not None
        return joined


def to_device(numbers: IntArray, device: torch.device) -> torch.Tensor:
    """Copies indices to a device; the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
