"""Document rows: every document as a separate row, for layers with a state that do not support packed rows.

A whole mixer runs on batches of documents (`runtime.buckets`). That is exact for every mixer and needs no kernel.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Cache

from distca_hf.arrays import IntArray
from distca_hf.runtime.buckets import Bucket, Buckets
from distca_hf.torch_private import hidden_from_dynamo


class DocumentRows:
    """Rows of the documents in `[batch_size, row_tokens]` tokens.

    This is not a tuple, mapping or dataclass: wrappers look into those in a model's arguments, and copy them.

    Args:
        document_tokens: `[documents]` lengths.
        rows: `[tokens]` place of each token of these documents in the flattened batch; None: one after the other.
        device: of the tokens.
    """

    def __init__(
        self,
        document_tokens: IntArray,
        batch_size: int,
        row_tokens: int,
        device: torch.device,
        rows: IntArray | None = None,
    ) -> None:
        self.batch_size, self.row_tokens = batch_size, row_tokens
        self._buckets = Buckets(document_tokens, device, rows)

    @hidden_from_dynamo
    def mix(self, mixer: Callable[..., object], args: tuple[object, ...], keywords: Mapping[str, object]) -> object:
        """Runs a mixer on every document separately, outside compiled graphs: numbers of documents and tokens differ
        between batches, and mixers of Transformers fail in graphs with these dynamic shapes.

        Args:
            mixer: returns a tensor of its tokens, or a tuple that begins with one.
            args, keywords: its arguments. Gathers tensors with one row per token, drops a cache, which has one state
                for every row of the batch, and passes others unchanged.

        Returns:
            `[batch_size, row_tokens, ...]` the mixer's output, 0 for tokens of no document. In a tuple, Nones follow:
            the layer cannot use states of single documents.
        """
        in_tuple = 0

        def run(bucket: Bucket) -> torch.Tensor:
            nonlocal in_tuple
            given = [self._gathered(value, bucket) for value in args]
            mixed: Any = mixer(*given, **{name: self._gathered(value, bucket) for name, value in keywords.items()})
            in_tuple = len(mixed) if isinstance(mixed, tuple) else 0
            out: torch.Tensor = mixed[0] if in_tuple else mixed
            return out

        joined = self._buckets.run(run, self.batch_size * self.row_tokens)
        whole = joined.unflatten(0, (self.batch_size, self.row_tokens))
        return (whole, *[None] * (in_tuple - 1)) if in_tuple else whole

    def _gathered(self, value: Any, bucket: Bucket) -> object:
        """Returns the tokens of a batch of documents; None for a cache; other values unchanged."""
        if isinstance(value, Cache):
            return None
        if isinstance(value, tuple):
            return tuple(self._gathered(part, bucket) for part in value)
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[1] != self.row_tokens:
            return value
        if value.shape[0] not in (1, self.batch_size):
            return value
        return bucket.gathered(value.expand(self.batch_size, *value.shape[1:]).flatten(0, 1))
