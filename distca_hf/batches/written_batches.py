"""Written batches: finds batches that changed between their reading and their pass.

Torch counts the writes to a tensor, and a batch with other counts is read again (`state_of`). It does not count writes
through `.data` or NumPy. What was read is then wrong, and documents would share prefixes that are no longer equal. So
the device computes checksums of each pass that shares any, and a later pass compares them with those of the reading,
without waiting. They include all numbers of tokens, and a sample of images.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch

from distca_hf.batches.batch_documents import Batch, media_of, names_media
from distca_hf.batches.beginnings import ODD_FACTOR, OF_ITEMS, VALUES, as_int64, row_sums_of
from distca_hf.errors import PackingError
from distca_hf.runtime.live_plan import LivePlan


LABELS = ("labels", "shift_labels")
HAS_MEDIA = "has media"  # a pass has no argument of this name
# Entries of a batch that are read.
OF_TOKENS = ("input_ids", "attention_mask", "position_ids", "mm_token_type_ids", *LABELS)
READ = frozenset((*OF_TOKENS, "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", *OF_ITEMS))
# Rows of images that checksums include, at most twice as many.
SAMPLED_ROWS = 256
# Checksums of tensors by name and dtype: images may be cast between reading and pass.
Checksums = dict[tuple[str, torch.dtype], int]
# What `state_of` returns.
State = dict[str, object]


def read_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Returns the tensors that are read, by name."""
    return {name: value for name, value in batch.items() if name in READ and isinstance(value, torch.Tensor)}


def state_of(batch: Batch) -> State:
    """Returns address, shape, strides and version of the tensors that are read or hashed, by name; and under
    `HAS_MEDIA` whether there are media."""
    state: State = {HAS_MEDIA: bool(media_of(batch))}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and (name in READ or (names_media(name) and value.numel() > 0)):
            version = -1 if value.is_inference() else value._version
            state[name] = value.data_ptr(), value.shape, value.stride(), version
    return state


def checksums_of(batch: Batch, row_sums: Mapping[str, torch.Tensor]) -> dict[tuple[str, torch.dtype], torch.Tensor]:
    """Returns checksums of what was read of a batch: scalars, int64, on the device of its tokens. A checksum changes
    if one number does.

    Args:
        row_sums: `row_sums_of` images, or a sample of these sums.
    """
    device, columns = batch["input_ids"].device, {**read_of(batch), **row_sums}
    numbers = {name: as_int64(column).flatten().to(device, non_blocking=True) for name, column in columns.items()}
    factors = torch.arange(1, max(map(len, numbers.values())) + 1, device=device) * ODD_FACTOR
    factors ^= factors >> 31
    return {(name, batch[name].dtype): (one * factors[: len(one)]).sum() for name, one in numbers.items()}


def sampled(rows: torch.Tensor) -> torch.Tensor:
    """Returns some of the rows of images, or of their sums."""
    return rows[:: max(1, len(rows) // SAMPLED_ROWS)]


class _Arriving(NamedTuple):
    """Checksums of a pass, which have reached the host once `arrived` is recorded, and those of the reading."""

    found: torch.Tensor
    arrived: torch.cuda.Event | None
    expected: list[tuple[str, int]]
    micro_batch: int


class WrittenBatches:
    """Compares the batches of passes with what was read of them."""

    def __init__(self) -> None:
        self._next: tuple[Batch, State, Checksums] | None = None
        self._arriving: deque[_Arriving] = deque()

    def expect(self, batch: Batch, state: State, checksums: Checksums | None) -> None:
        """Remembers what was read of the batch of the next pass.

        Args:
            state: `state_of` the batch.

        Raises:
            PackingError: the batch of an earlier pass differs from what was read.
        """
        watched = {name: batch[name] for name in state if name != HAS_MEDIA}
        self._next = None if checksums is None else (watched, state, checksums)
        while self._arriving and ((arrived := self._arriving[0].arrived) is None or arrived.query()):
            pass_sums = self._arriving.popleft()
            for (name, expected), found in zip(pass_sums.expected, pass_sums.found.tolist(), strict=True):
                if found != expected:
                    self._arriving.clear()
                    raise PackingError(
                        f"the checksum of {name} in micro-batch {pass_sums.micro_batch} is {found}, and was "
                        f"{expected} when documents were read: {name} was written to through .data or NumPy after the "
                        "collator, and layers may have shared prefixes that are not equal. Do not use the gradients "
                        f"of that micro-batch. Write to {name} in the collator, or to the tensor itself"
                    )

    def check_later(self, plan: LivePlan) -> None:
        """Computes checksums of a pass that has run, if its documents share prefixes."""
        expected, self._next = self._next, None
        if expected is None or not plan.facts.shared_tokens:
            return
        watched, before, checksums = expected
        after = state_of(watched)  # layers may have written, too
        batch = {name: tensor for name, tensor in watched.items() if after[name] == before[name]}
        images = {name: values for name, values in batch.items() if name in VALUES and values.ndim > 1}
        row_sums = row_sums_of({name: sampled(values.flatten(0, -2)) for name, values in images.items()})
        known = checksums_of(batch, row_sums) if "input_ids" in batch else {}
        sums = {key: checksum for key, checksum in known.items() if key in checksums}
        if not sums:
            return
        device = batch["input_ids"].device
        found = torch.stack([*sums.values()]).to("cpu", non_blocking=device.type == "cuda")
        arrived = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        named = [(name, checksums[name, dtype]) for name, dtype in sums]
        self._arriving.append(_Arriving(found, arrived, named, plan.micro_batch))
