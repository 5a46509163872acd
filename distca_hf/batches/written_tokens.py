"""Written tokens: notices batches whose tokens changed between their reading and their pass, unseen.

A write through `.data` or NumPy leaves no trace in a tensor. What was read before is then wrong, and documents would
share prefixes that are no longer equal. So the device adds up the tokens of each pass that shares any, and a later
pass compares the sum with that of the tokens that were read, without waiting.
"""

from collections import deque

import torch

from distca_hf.batches.batch_documents import Batch
from distca_hf.batches.read_documents import ReadDocuments, sum_of_tokens
from distca_hf.errors import PackingError
from distca_hf.runtime.live_plan import LivePlan


class WrittenTokens:
    """Compares the tokens of passes with those that were read."""

    def __init__(self) -> None:
        self._next: tuple[torch.Tensor, int] | None = None
        # Sums on their way from the device, what they must be, and in which micro-batch.
        self._sums: deque[tuple[torch.Tensor, torch.cuda.Event | None, int, int]] = deque()

    def expect(self, batch: Batch, read: ReadDocuments) -> None:
        """Remembers what was read of the batch of the next pass.

        Raises:
            PackingError: the tokens of an earlier pass differ from what was read.
        """
        self._next = None if read.tokens_sum is None else (batch["input_ids"], read.tokens_sum)
        while self._sums and ((arrived := self._sums[0][1]) is None or arrived.query()):
            found, _, expected, micro_batch = self._sums.popleft()
            if int(found) != expected:
                self._sums.clear()
                raise PackingError(
                    f"the input_ids of micro-batch {micro_batch} have checksum {int(found)}, and had {expected} when "
                    "its documents were read: they were written to through .data or NumPy after the collator, and "
                    "layers may have shared prefixes that are not equal. Do not use the gradients of that "
                    "micro-batch. Write to tokens in the collator, or to the tensor itself"
                )

    def add_up(self, plan: LivePlan) -> None:
        """Adds up the tokens of a pass that has run, if its documents share prefixes."""
        expected, self._next = self._next, None
        if expected is None or not plan.facts.shared_tokens:
            return
        ids, tokens_sum = expected
        found = sum_of_tokens(ids).to("cpu", non_blocking=ids.is_cuda)
        arrived = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None
        self._sums.append((found, arrived, tokens_sum, plan.micro_batch))
