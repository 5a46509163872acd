"""Buckets: documents of similar lengths in padded batches, for functions that cannot take packed rows.

    rows of the pack    | d0 d0 d0 d0 d0 | d1 d1 | d2 d2 d2 d2 d2 d2 | padding |
    batches             | d0 d0 d0 d0 d0  · |       | d1 d1 |
                        | d2 d2 d2 d2 d2 d2 |

Documents are gathered into batches with padding on the right, and results are scattered back. Tokens must not depend
on later ones, so that padding changes nothing.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from distca_hf.arrays import IntArray, exclusive_cumsum, ranges


# Shorter documents share a batch, because padding costs less than a call.
SHORT_TOKENS = 64


class Buckets:
    """Documents divided into batches, each of documents of similar lengths.

    Args:
        document_tokens: `[documents]` lengths.
        rows: `[tokens]` rows of the documents' tokens; None for consecutive rows.
    """

    def __init__(self, document_tokens: IntArray, device: torch.device, rows: IntArray | None = None) -> None:
        starts = exclusive_cumsum(document_tokens)
        power = np.ceil(np.log2(np.maximum(document_tokens, SHORT_TOKENS)))
        chosen = [np.flatnonzero(power == of_batch) for of_batch in np.unique(power)]
        self._sizes = [(len(documents), int(document_tokens[documents].max())) for documents in chosen]
        documents = np.argsort(power, kind="stable")
        tokens = document_tokens[documents]
        at = ranges(starts[documents], tokens)
        sizes = np.array(self._sizes, dtype=np.int64).reshape(-1, 2)
        padded_tokens = sizes[:, 1].repeat(sizes[:, 0])
        places = ranges(exclusive_cumsum(padded_tokens), tokens)
        self._rows, self._places = (to_device(index, device) for index in (at if rows is None else rows[at], places))
        # For each batch, int64 `[documents]` numbers of its documents.
        self.numbers = to_device(documents, device).split([number for number, _ in self._sizes])

    @cached_property
    def positions(self) -> list[torch.Tensor]:
        """For each batch, int64 `[documents, longest_tokens]` positions of tokens in their documents; padding counts
        on."""
        device = self._rows.device
        return [torch.arange(longest, device=device).expand(number, longest) for number, longest in self._sizes]

    def gathered(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns for each batch `[documents, longest_tokens, ...]` of `[tokens, ...]`, padded with zeros."""
        padded_tokens = [number * longest for number, longest in self._sizes]
        padded: torch.Tensor = _Moved.apply(flat, self._rows, self._places, sum(padded_tokens))
        return [batch.unflatten(0, size) for batch, size in zip(padded.split(padded_tokens), self._sizes, strict=True)]

    def joined(self, batches: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
        """Returns `[num_rows, ...]` of batches `[documents, longest_tokens, ...]`; 0 in rows outside documents."""
        flat = torch.cat([batch.flatten(0, 1) for batch in batches])
        joined: torch.Tensor = _Moved.apply(flat, self._places, self._rows, num_rows)
        return joined


class _Moved(torch.autograd.Function):
    """Moves rows, none of them twice, to rows of a tensor of zeros. Backward moves gradients back: unlike that of
    `index_select`, it adds nothing up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.source, ctx.target, ctx.num_rows = source, target, len(x)
        return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, target, x.index_select(0, source))

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        moved = gradients.new_zeros(ctx.num_rows, *gradients.shape[1:])
        return moved.index_copy_(0, ctx.source, gradients.index_select(0, ctx.target)), None, None, None


def to_device(numbers: IntArray, device: torch.device) -> torch.Tensor:
    """Copies indices to a device; the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
