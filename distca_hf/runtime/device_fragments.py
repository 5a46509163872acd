"""Device fragments: what layers with a state exchange, with its indices on the device."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch

from distca_hf.arrays import IntArray, offsets
from distca_hf.planning.folds import Fold, cheaper
from distca_hf.planning.fragments import Fragments
from distca_hf.runtime.buckets import Buckets, to_device


@dataclass(frozen=True, eq=False)
class PinnedFragments:
    """Fragments of this rank before their indices are copied to the device."""

    fragments: Fragments
    by_ranks: Fold  # this rank's fold if heads are not divided
    # All indices, one after the other; in memory from which a GPU copies while the host continues.
    indices: torch.Tensor
    lengths: dict[str, int]  # number of indices of each kind, by name

    @classmethod
    def prepare(cls, fragments: Fragments, pin: bool) -> Self:
        """Joins the indices for a single copy; safe in a background thread."""
        halo, fold = fragments.halo, Fold.of(fragments.cut, fragments.rank)
        edges = np.concatenate([halo.taken, halo.route.sent])
        edge_rows, edge_numbers = np.unique(edges, return_inverse=True)
        indices = {
            **{"edges": edges, "edge_rows": edge_rows, "edge_numbers": edge_numbers},
            **{"windows": halo.windows, "kept": halo.kept},
            **{"rows": halo.rows, "middle_numbers": np.array(fragments.middle_numbers, np.int64)},
            **{f"fold.{name}": index for name, index in _indices_of(fold).items()},
            **{f"group.{name}": offsets(tokens) for name, tokens in _tokens_of_groups(fragments).items()},
        }
        joined = torch.from_numpy(np.concatenate(list(indices.values())))
        lengths = {name: len(part) for name, part in indices.items()}
        return cls(fragments, fold, joined.pin_memory() if pin else joined, lengths)

    def to(self, device: torch.device) -> "DeviceFragments":
        """Returns the fragments with indices on the device; the host does not wait."""
        parts = self.indices.to(device, non_blocking=True).split(list(self.lengths.values()))
        of = dict(zip(self.lengths, parts, strict=True))
        fold = DeviceFold(self.by_ranks, **{name: of.pop(f"fold.{name}") for name in _indices_of(self.by_ranks)})
        tokens = _tokens_of_groups(self.fragments)
        groups: dict[str, Any] = {name: DeviceGroup(tokens[name].tolist(), of.pop(f"group.{name}")) for name in tokens}
        return DeviceFragments(self.fragments, fold, **groups, **of)


def _tokens_of_groups(fragments: Fragments) -> dict[str, IntArray]:
    """Returns tokens of the parts of all groups, and of middle fragments."""
    groups: dict[str, IntArray] = {**fragments.groups}  # type: ignore[dict-item]
    return groups | {"middle": fragments.groups["followed"][fragments.middle_numbers]}


def _indices_of(fold: Fold) -> dict[str, IntArray]:
    """Returns the indices of a fold by the names of `DeviceFold`."""
    sent = {"gathered": fold.gathered.sent, "returned": fold.returned.sent}
    return sent | {"placed": fold.placed, "before": fold.before, "states": fold.states}


@dataclass(frozen=True, eq=False)
class DeviceFold:
    """A fold with its indices on the device; see `Fold`."""

    on_host: Fold
    gathered: torch.Tensor
    placed: torch.Tensor
    before: torch.Tensor
    returned: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """Documents or fragments that layers compute together, with indices on the device."""

    tokens: list[int]  # tokens of each part, in row order
    long_offsets: torch.Tensor  # int64; see `offsets`

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
        """int32 `[1, rows of the group]` number of each row's part."""
        parts = torch.arange(len(self.tokens), dtype=torch.int32, device=self.long_offsets.device)
        return parts.repeat_interleave(self.long_offsets.diff(), output_size=sum(self.tokens))[None]

    @cached_property
    def buckets(self) -> Buckets:
        """The parts, for functions that do not support packed rows."""
        return Buckets(np.array(self.tokens, dtype=np.int64), self.long_offsets.device)


@dataclass(frozen=True, eq=False)
class DeviceFragments:
    """Fragments of this rank with their indices on the device; see `Fragments`."""

    on_host: Fragments
    by_ranks: DeviceFold
    whole: DeviceGroup
    followed: DeviceGroup
    last: DeviceGroup
    middle: DeviceGroup  # followed fragments that follow others
    middle_numbers: torch.Tensor  # int64, see `Fragments`
    edges: torch.Tensor  # int64, rows taken for windows, then rows to send
    # int64, each row of `edges` once, and the places of `edges` among these.
    edge_rows: torch.Tensor
    edge_numbers: torch.Tensor
    # Indices of `Halo`, under its names.
    windows: torch.Tensor
    kept: torch.Tensor
    rows: torch.Tensor
    _by_heads: dict[int, DeviceFold] = field(init=False, default_factory=dict)

    def fold(self, heads: int, head_bytes: int) -> DeviceFold:
        """Returns the fold of a layer, see `cheaper`; the same way on all ranks."""
        chosen = cheaper(self.by_ranks.on_host, lambda: self._divided(heads).on_host, heads, head_bytes)
        return self.by_ranks if chosen is self.by_ranks.on_host else self._divided(heads)

    def _divided(self, heads: int) -> DeviceFold:
        """Returns the fold by heads; made once per plan and number of heads."""
        if heads not in self._by_heads:
            fold = Fold.of(self.on_host.cut, self.on_host.rank, heads)
            indices = {name: to_device(index, self.rows.device) for name, index in _indices_of(fold).items()}
            self._by_heads[heads] = DeviceFold(fold, **indices)
        return self._by_heads[heads]
