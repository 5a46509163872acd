"""Document rows: every document as a separate row, for layers with a state that do not support packed rows.

A whole mixer runs on batches of documents (`runtime.buckets`). That is exact for every mixer and needs no kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import Cache

from distca_hf.arrays import IntArray
from distca_hf.runtime.buckets import Buckets
from distca_hf.torch_private import hidden_from_dynamo


class DocumentRows:
    """Rows of the documents in `[batch_size, row_tokens]` tokens.

    This is not a tuple, mapping or dataclass: wrappers look into those in a model's arguments, and copy them. `rows`
    are places of the documents' tokens in the flattened batch; None: one after the other.
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
        given = zip(*(self._gathered(value) for value in (*args, *keywords.values())), strict=True)
        mixed: list[Any] = []
        for of_batch in given:
            of_names = dict(zip(keywords, of_batch[len(args) :], strict=True))
            mixed.append(mixer(*of_batch[: len(args)], **of_names))
        in_tuple = len(mixed[0]) if isinstance(mixed[0], tuple) else 0
        outputs = [batch[0] if in_tuple else batch for batch in mixed]
        joined = self._buckets.joined(outputs, self.batch_size * self.row_tokens)
        whole = joined.unflatten(0, (self.batch_size, self.row_tokens))
        return (whole, *[None] * (in_tuple - 1)) if in_tuple else whole

    def _gathered(self, value: Any) -> Sequence[object]:
        """Returns, for each batch of documents, its tokens; None for a cache; other values unchanged."""
        num_batches = len(self._buckets.numbers)
        if isinstance(value, Cache):
            return [None] * num_batches
        if isinstance(value, tuple):
            return list(zip(*(self._gathered(part) for part in value), strict=True)) if value else [()] * num_batches
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[1] != self.row_tokens:
            return [value] * num_batches
        if value.shape[0] not in (1, self.batch_size):
            return [value] * num_batches
        return self._buckets.gathered(value.expand(self.batch_size, *value.shape[1:]).flatten(0, 1))
