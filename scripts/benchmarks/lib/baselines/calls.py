"""Kernel calls of a benchmark step: which queries attend which keys, and where gradients of keys go.

Shape legend in `distca_hf.kernels.interface`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from distca_hf.kernels.interface import Spans


class Keys(Protocol):
    """Which keys a kernel call reads, and where their gradients go; the same for values.

    Attributes:
        adds: gradients of several calls are summed, so that totals begin with zero and are kept in max(fp32, dtype).
    """

    @property
    def adds(self) -> bool: ...

    def take(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys `[S, G, H]` and values `[S, G, V]` of the call, from the rows of this rank (or of all)."""
        ...

    def gradient(self, taken: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in which the kernel writes the gradient of the keys that were taken.

        Args:
            taken: keys or values of the call.
            total: gradient of the rows that they were taken from.
        """
        ...

    def settle(self, gradient: torch.Tensor, total: torch.Tensor) -> None:
        """Puts that gradient where it belongs in the total."""
        ...


@dataclass(frozen=True)
class OwnKeys:
    """Consecutive rows, read and written where they lie.

    Attributes:
        rows: of this rank.
    """

    rows: slice
    adds: bool = False

    def take(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k[self.rows], v[self.rows]

    def gradient(self, taken: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total[self.rows]

    def settle(self, gradient: torch.Tensor, total: torch.Tensor) -> None:
        pass


@dataclass(frozen=True, eq=False)
class ChosenKeys:
    """Any rows, none twice; other calls may read them, too.

    Attributes:
        rows: int64 `[S]`.
    """

    rows: torch.Tensor
    adds: bool = True

    def take(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k.index_select(0, self.rows), v.index_select(0, self.rows)

    def gradient(self, taken: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(taken)

    def settle(self, gradient: torch.Tensor, total: torch.Tensor) -> None:
        total.index_add_(0, self.rows, gradient.to(total.dtype))


class MadeUpKeys:
    """Random numbers, among which this rank's own rows have their places.

    Only these are copied, and only their gradients are kept: no token has that of a made-up key.

    Args:
        sizes: `[made-up rows, G, H]` and `[made-up rows, G, V]`, of keys and of values.
        places, rows: where own rows are put, and which these are.
    """

    adds = False

    def __init__(
        self, sizes: tuple[torch.Size, torch.Size], dtype: torch.dtype, places: torch.Tensor, rows: torch.Tensor
    ) -> None:
        self.places, self.rows = places, rows
        self._sizes, self._dtype = sizes, dtype
        self._made_up: list[torch.Tensor] = []

    def make(self) -> None:
        """Makes keys and values up."""
        self._made_up = [torch.randn(size, dtype=self._dtype, device=self.rows.device) for size in self._sizes]

    def forget(self) -> None:
        """Lets go of them: other modes need the memory."""
        self._made_up = []

    def take(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self._made_up
        for store, x in ((key, k), (value, v)):
            store.index_copy_(0, self.places, x.index_select(0, self.rows))
        return key, value

    def gradient(self, taken: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(taken)

    def settle(self, gradient: torch.Tensor, total: torch.Tensor) -> None:
        total.index_copy_(0, self.rows, gradient.index_select(0, self.places))


@dataclass(frozen=True, eq=False)
class Call:
    """A varlen kernel call: consecutive query rows, and the keys they attend.

    Attributes:
        queries: rows of this rank.
        keys: which it reads.
        spans: offsets of its tasks.
    """

    queries: slice
    keys: Keys
    spans: Spans


def make_call(
    first_query: int, query_tokens: Sequence[int], key_tokens: Sequence[int], keys: Keys, device: torch.device
) -> Call:
    """Returns a call of tasks.

    Args:
        first_query: row of the first one.
        query_tokens, key_tokens: `[tasks]` of each.
        keys: of all tasks, one after the other.
        device: of offsets.
    """
    offsets_q, offsets_k = (
        torch.tensor([0, *accumulate(tokens)], dtype=torch.int32, device=device)
        for tokens in (query_tokens, key_tokens)
    )
    spans = Spans(offsets_q, offsets_k, max(query_tokens), max(key_tokens))
    return Call(slice(first_query, first_query + sum(query_tokens)), keys, spans)
