"""Device fragments: what layers with a state compute and exchange, with its indices on the device.

Functions that cannot take packed rows get documents of similar lengths in padded batches (`Buckets`):

    rows of the pack    | d0 d0 d0 d0 d0 | d1 d1 | d2 d2 d2 d2 d2 d2 | padding |
    batches             | d0 d0 d0 d0 d0  · |       | d1 d1 |
                        | d2 d2 d2 d2 d2 d2 |

Documents are gathered into batches with padding on the right, and results are scattered back. Tokens must not depend
on later ones, so that padding changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch

from distca_hf.arrays import IntArray, exclusive_cumsum, offsets, ranges
from distca_hf.planning.folds import Fold, cheaper
from distca_hf.planning.fragments import Fragments


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
