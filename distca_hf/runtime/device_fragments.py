"""Device fragments: what layers with a state exchange, with its indices on the device."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch

from distca_hf.arrays import offsets
from distca_hf.planning.fragments import Fragments
from distca_hf.runtime.buckets import Buckets


@dataclass(frozen=True, eq=False)
class PinnedFragments:
    """Fragments of this rank before their indices are copied to the device.

    Attributes:
        indices: all indices, one after the other; in memory that a GPU copies from while the host goes on.
        lengths: of each kind of indices.
    """

    fragments: Fragments
    indices: torch.Tensor
    lengths: list[int]

    @classmethod
    def prepare(cls, fragments: Fragments, pin: bool) -> Self:
        """Joins the indices, so that one copy takes them all; safe in a background thread."""
        halo, whole = fragments.halo, fragments.whole_tokens
        of_halo = [halo.route.sent, halo.taken, halo.windows, halo.kept, halo.rows]
        indices = [fragments.summaries.sent, *of_halo, offsets(whole), np.repeat(np.arange(len(whole)), whole)]
        joined = torch.from_numpy(np.concatenate(indices))
        return cls(fragments, joined.pin_memory() if pin else joined, [len(part) for part in indices])

    def to(self, device: torch.device) -> "DeviceFragments":
        """Returns the fragments with their indices on the device; the host does not wait."""
        return DeviceFragments(self.fragments, *self.indices.to(device, non_blocking=True).split(self.lengths))


@dataclass(frozen=True, eq=False)
class DeviceFragments:
    """Fragments of this rank with their indices on the device; see `Fragments`.

    Attributes:
        offsets, numbers: int64; see `whole_offsets` and `whole_numbers`.
    """

    on_host: Fragments
    summaries_sent: torch.Tensor
    halo_sent: torch.Tensor
    taken: torch.Tensor
    windows: torch.Tensor
    kept: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    numbers: torch.Tensor

    @cached_property
    def buckets(self) -> Buckets:
        """The whole documents, for functions that know nothing of packed rows."""
        return Buckets(self.on_host.whole_tokens, self.rows.device)

    @cached_property
    def whole_offsets(self) -> torch.Tensor:
        """int32 `[whole documents + 1]` where they begin among the rows of all of them; padding counts as one."""
        return self.offsets.to(torch.int32)

    @cached_property
    def whole_offsets_on_host(self) -> torch.Tensor:
        """The same numbers, on the host."""
        return torch.from_numpy(offsets(self.on_host.whole_tokens)).to(torch.int32)

    @cached_property
    def whole_numbers(self) -> torch.Tensor:
        """int32 `[1, rows of whole documents]` number of the document that each belongs to."""
        return self.numbers.to(torch.int32)[None]
