"""Device fragments: what layers with a state exchange, with its indices on the device."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
import torch

from distca_hf.arrays import IntArray, offsets
from distca_hf.planning.folds import Fold
from distca_hf.planning.fragments import Fragments
from distca_hf.runtime.buckets import Buckets, to_device


# Ranks divide heads if that saves the busiest one more than this in a layer: it takes one exchange more.
LEAST_SAVED_BYTES = 2**23


@dataclass(frozen=True, eq=False)
class PinnedFragments:
    """Fragments of this rank before their indices are copied to the device.

    Attributes:
        by_ranks: its fold if heads are not divided.
        indices: all indices, one after the other; in memory that a GPU copies from while the host goes on.
        lengths: of each kind of indices.
    """

    fragments: Fragments
    by_ranks: Fold
    indices: torch.Tensor
    lengths: list[int]

    @classmethod
    def prepare(cls, fragments: Fragments, pin: bool) -> Self:
        """Joins the indices, so that one copy takes them all; safe in a background thread."""
        halo, fold = fragments.halo, Fold.of(fragments.cut, fragments.rank)
        indices = [halo.route.sent, halo.taken, halo.windows, halo.kept, halo.rows]
        indices += [fold.gathered.sent, fold.placed, fold.returned.sent, fold.states]
        for tokens in _tokens_of_groups(fragments):
            indices += [offsets(tokens), np.repeat(np.arange(len(tokens)), tokens)]
        joined = torch.from_numpy(np.concatenate(indices))
        return cls(fragments, fold, joined.pin_memory() if pin else joined, [len(part) for part in indices])

    def to(self, device: torch.device) -> "DeviceFragments":
        """Returns the fragments with their indices on the device; the host does not wait."""
        parts = self.indices.to(device, non_blocking=True).split(self.lengths)
        of_groups = zip(_tokens_of_groups(self.fragments), parts[9::2], parts[10::2], strict=True)
        whole, followed, last, middle = (DeviceGroup(tokens.tolist(), *indices) for tokens, *indices in of_groups)
        fold = DeviceFold(self.by_ranks, *parts[5:9])
        return DeviceFragments(self.fragments, fold, whole, followed, last, middle, *parts[:5])


def _tokens_of_groups(fragments: Fragments) -> list[IntArray]:
    """Returns tokens of the parts of all groups, and of middle fragments."""
    return [*fragments.groups.values(), fragments.groups["followed"][fragments.middle]]


@dataclass(frozen=True, eq=False)
class DeviceFold:
    """A fold with its indices on the device; see `Fold`."""

    on_host: Fold
    gathered: torch.Tensor
    placed: torch.Tensor
    returned: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """Documents or fragments that layers compute together, with indices on the device.

    Attributes:
        tokens: of each part, in row order.
        long_offsets, long_numbers: int64; see `offsets` and `numbers`.
    """

    tokens: list[int]
    long_offsets: torch.Tensor
    long_numbers: torch.Tensor

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int32 `[parts + 1]` first rows of parts among the rows of the group."""
        return self.long_offsets.to(torch.int32)

    @cached_property
    def offsets_on_host(self) -> torch.Tensor:
        """The same numbers, on the host."""
        return torch.from_numpy(offsets(np.array(self.tokens, dtype=np.int64))).to(torch.int32)

    @cached_property
    def numbers(self) -> torch.Tensor:
        """int32 `[1, rows of the group]` number of the part that each belongs to."""
        return self.long_numbers.to(torch.int32)[None]

    @cached_property
    def buckets(self) -> Buckets:
        """The parts, for functions that know nothing of packed rows."""
        return Buckets(np.array(self.tokens, dtype=np.int64), self.long_offsets.device)


@dataclass(frozen=True, eq=False)
class DeviceFragments:
    """Fragments of this rank with their indices on the device; see `Fragments`.

    Attributes:
        whole, followed, last: groups.
        middle: followed fragments that follow others.
        halo_sent, taken, windows, kept, rows: of `Halo`.
    """

    on_host: Fragments
    by_ranks: DeviceFold
    whole: DeviceGroup
    followed: DeviceGroup
    last: DeviceGroup
    middle: DeviceGroup
    halo_sent: torch.Tensor
    taken: torch.Tensor
    windows: torch.Tensor
    kept: torch.Tensor
    rows: torch.Tensor
    _by_heads: dict[int, DeviceFold] = field(default_factory=dict)

    def fold(self, heads: int, head_bytes: int) -> DeviceFold:
        """Returns the fold that moves fewer bytes; the same way on all ranks.

        Args:
            heads: of the layer.
            head_bytes: of a summary of one of them.
        """
        by_ranks_bytes = self.by_ranks.on_host.busiest * heads * head_bytes
        if by_ranks_bytes <= LEAST_SAVED_BYTES:
            return self.by_ranks
        by_heads = self._by_heads.get(heads)
        if by_heads is None:
            fold = Fold.of(self.on_host.cut, self.on_host.rank, heads)
            indices = (fold.gathered.sent, fold.placed, fold.returned.sent, fold.states)
            by_heads = DeviceFold(fold, *(to_device(part, self.rows.device) for part in indices))
            self._by_heads[heads] = by_heads
        saved_bytes = by_ranks_bytes - by_heads.on_host.busiest * head_bytes
        return by_heads if saved_bytes > LEAST_SAVED_BYTES else self.by_ranks
