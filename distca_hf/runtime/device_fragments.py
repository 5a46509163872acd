"""Device fragments: what layers with a state exchange, with its indices on the device."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from distca_hf.arrays import IntArray, offsets
from distca_hf.planning.fragments import Fragments


@dataclass(frozen=True, eq=False)
class PinnedFragments:
    """Fragments of this rank before their indices are copied to the device.

    Attributes:
        indices: all indices, one after the other; in memory that a GPU copies from while the host goes on.
    """

    fragments: Fragments
    indices: torch.Tensor

    @classmethod
    def prepare(cls, fragments: Fragments, pin: bool) -> Self:
        """Joins the indices, so that one copy takes them all; safe in a background thread."""
        joined = torch.from_numpy(np.concatenate(_indices(fragments)))
        return cls(fragments, joined.pin_memory() if pin else joined)

    def to(self, device: torch.device) -> "DeviceFragments":
        """Returns the fragments with their indices on the device; the host does not wait."""
        lengths = [len(part) for part in _indices(self.fragments)]
        return DeviceFragments(self.fragments, *self.indices.to(device, non_blocking=True).split(lengths))


def _indices(fragments: Fragments) -> list[IntArray]:
    halo, whole = fragments.halo, fragments.whole_tokens
    of_halo = [halo.route.sent, halo.taken, halo.windows, halo.kept, halo.rows]
    return [fragments.summaries.sent, *of_halo, offsets(whole), np.repeat(np.arange(len(whole)), whole)]


@dataclass(frozen=True, eq=False)
class DeviceFragments:
    """Fragments of this rank with their indices on the device; see `Fragments`.

    Attributes:
        whole_offsets: `[whole documents + 1]`.
        whole_numbers: `[rows of whole documents]` number of the document that a row belongs to.
    """

    on_host: Fragments
    summaries_sent: torch.Tensor
    halo_sent: torch.Tensor
    taken: torch.Tensor
    windows: torch.Tensor
    kept: torch.Tensor
    rows: torch.Tensor
    whole_offsets: torch.Tensor
    whole_numbers: torch.Tensor
