"""Row moves on the device: sends a pass's rows to the ranks whose layers compute them, and the results home.

One all-to-all each way carries all tensors of the tokens side by side, as bytes. Backward goes the other way:
gradients of results move in, gradients of inputs move home. Each rank takes part in both, whether or not it needs
them.

If documents share a prefix, its results are copied to all of them, and gradients of the copies are summed: in
max(fp32, their dtype), first on each rank in the order of its home rows, then in the order of ranks.

Tensor ranks hold the same rows. Each sends its share of every row's bytes, and they join what they receive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from distca_hf.arrays import IntArray, ceil_div
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import AllToAll, Transport
from distca_hf.kernels.rows import RowSums, prepare_add
from distca_hf.planning.row_moves import RowCopies, RowMoves
from distca_hf.torch_private import hidden_from_dynamo


# Bytes of the widest number. Shares of tensor ranks are whole multiples, so no number is divided.
NUMBER_BYTES = 8


@dataclass(frozen=True, eq=False)
class PinnedRowMoves:
    """Moves of this rank before their indices are copied to the device."""

    moves: RowMoves
    # All indices, one after the other; in memory from which a GPU copies while the host continues.
    indices: torch.Tensor
    lengths: list[int]  # number of rows in each index
    images: "PinnedRowMoves | None"  # moves of the rows of images only; None if it is not known which these are

    @classmethod
    def prepare(cls, moves: RowMoves, pin: bool) -> Self:
        """Joins the indices for a single copy; safe in a background thread."""
        indices = _indices(moves)
        joined = torch.from_numpy(np.concatenate(indices))
        images = None if moves.images is None else cls.prepare(moves.images, pin)
        return cls(moves, joined.pin_memory() if pin else joined, [*map(len, indices)], images)

    def to(self, device: torch.device) -> "DeviceRowMoves":
        """Returns the moves with their indices on the device; the host does not wait."""
        moves, indices = self.moves, self.indices.to(device, non_blocking=True)
        sent, received, positions, *of_home = indices.split_with_sizes(self.lengths)
        images = None if self.images is None else self.images.to(device)
        if (home := moves.shared_home) is None:
            return DeviceRowMoves(moves, sent, received, positions, images)
        places, *copies = of_home
        half = len(copies) // 2
        of_sent, of_copied = DeviceCopies.of(copies[:half], home.sent), DeviceCopies.of(copies[half:], home.copied)
        counts = home.sent_counts, home.received_counts
        way_home = DeviceHome(of_sent, counts, of_copied, places)
        return DeviceRowMoves(moves, sent, received, positions, images, way_home)


def _indices(moves: RowMoves) -> list[IntArray]:
    home = moves.shared_home
    of_home = [] if home is None else [home.places, *home.sent.indices, *home.copied.indices]
    return [moves.sent, moves.received, moves.positions, *of_home]


@dataclass(frozen=True, eq=False)
class DeviceCopies:
    """Copies of rows with their indices on the device; see `RowCopies`."""

    rows: torch.Tensor
    first: torch.Tensor
    more: torch.Tensor
    sums: RowSums

    @classmethod
    def of(cls, indices: Sequence[torch.Tensor], copies: RowCopies) -> Self:
        """Takes the indices of these copies, in the order of `RowCopies.indices`."""
        rows, first, more, repeated, more_in_repeated = indices
        return cls(rows, first, more, RowSums(repeated, more[:0], more[:0], more_in_repeated, copies.parts))

    def of_values(self, values: torch.Tensor) -> torch.Tensor:
        return values.index_select(0, self.rows)

    def summed(self, gradients: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Returns the sum of the gradients of each row's copies; zeros for rows without one."""
        total = gradients.new_zeros((num_rows, *gradients.shape[1:]))
        total.index_copy_(0, self.rows.index_select(0, self.first), gradients.index_select(0, self.first))
        more = gradients.index_select(0, self.more)
        prepare_add(total, more, more, self.sums)(total, more, more)
        return total


@dataclass(frozen=True, eq=False)
class DeviceHome:
    """The way home of results of shared prefixes, with its indices on the device; see `SharedHome`."""

    sent: DeviceCopies
    counts: tuple[list[int], list[int]]  # `[ranks]` number of rows to and from each rank
    copied: DeviceCopies
    places: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceRowMoves:
    """Moves of this rank with their indices on the device."""

    # The same moves on the host. For all others see `RowMoves`.
    on_host: RowMoves
    sent: torch.Tensor
    received: torch.Tensor
    positions: torch.Tensor
    images: "DeviceRowMoves | None" = None  # moves of the rows of images only; None if it is not known which these are
    home: DeviceHome | None = None  # the way of results home, if documents share prefixes


class PassRows:
    """The rows of one forward pass, and of its backward pass."""

    def __init__(
        self,
        moves: DeviceRowMoves,
        transport: Transport,
        shape: tuple[int, int],  # shape of the batch, `(B, L)`
        where: str,
        before_backward: Callable[[], None],  # agrees with all ranks that they differentiate this pass
    ) -> None:
        # This rank's layers compute `num_placed` rows, of which the first `num_tokens` are tokens.
        self.num_placed, self.num_tokens, self.shape = moves.on_host.num_placed, moves.received.shape[0], shape
        self._moves, self._transport, self._where = moves, transport, where
        self.before_backward = before_backward if moves.on_host.crosses else lambda: None

    def move_in(self, values: Sequence[torch.Tensor], differentiate: bool) -> list[torch.Tensor]:
        """Returns `[placed rows, ...]` of `[places, ...]` tensors; zeros in rows without a token. A collective call.
        `differentiate` says whether some rank needs gradients of its values; the same on all ranks."""
        if not (differentiate or any(value.requires_grad for value in values)):
            return self.exchange(values, True, "forward", self.shapes_in(values))
        anchor = values[0].new_zeros((), dtype=torch.float32).requires_grad_()
        return list(_Move.apply(self, True, anchor, *values))

    def move_images_in(self, value: torch.Tensor, differentiate: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `[placed rows of images, ...]` of a `[places, ...]` tensor, and `[placed rows]` which rows are of
        images. A collective call, unless all images are in padding: then no row is of an image."""
        moves, is_image = self._moves.images, torch.zeros(self.num_placed, dtype=torch.bool, device=value.device)
        if moves is None:
            return value[:0], is_image
        rows = PassRows(moves, self._transport, self.shape, f"{self._where}, features of images", self.before_backward)
        return rows.move_in([value], differentiate)[0], is_image.index_fill_(0, moves.positions, True)

    def move_home(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns `[B, L, D]` of `[1, placed rows, D]` tensors, `[N, B, L, D]` of `[N, 1, placed rows, D]` (in Gemma
        3n a token has several states), and `[B * L, D]` of `[placed rows, D]`; zeros in padding. A collective call."""
        flat = [value.movedim(0, 2).flatten(2) if value.ndim == 4 else value for value in values]
        homes = _Move.apply(self, False, None, *flat)
        return [
            home.unflatten(2, (len(value), -1)).movedim(2, 0) if value.ndim == 4 else home
            for home, value in zip(homes, values, strict=True)
        ]

    def shapes_in(self, values: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        return [(self.num_placed, *value.shape[1:]) for value in values]

    def exchange(
        self, values: Sequence[torch.Tensor], goes_in: bool, phase: str, shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Moves `[rows, ...]` of all values in one exchange; results have these shapes."""
        taken, put, on_host = self._moves.sent, self._moves.received, self._moves.on_host
        counts = on_host.sent_counts, on_host.received_counts
        if not goes_in:
            taken, put, counts = put, taken, counts[::-1]
        rows = self._send([value.index_select(0, taken) for value in values], counts, goes_in, phase)
        num_rows = self.num_placed if goes_in else torch.Size(self.shape).numel()
        make = torch.Tensor.new_empty if put.shape[0] == num_rows else torch.Tensor.new_zeros  # some may be padding
        results = [make(part, tuple(shape)) for part, shape in zip(rows, shapes, strict=True)]
        for result, part in zip(results, rows, strict=True):
            result.view(num_rows, *part.shape[1:]).index_copy_(0, put, part)
        return results

    def return_results(self, values: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Moves `[placed rows, ...]` of all values home; results have these shapes."""
        if (home := self._moves.home) is None:
            return self.exchange(values, False, "forward", shapes)
        results = []
        received = self._send([home.sent.of_values(value) for value in values], home.counts, False, "forward")
        for part, shape in zip(received, shapes, strict=True):
            results.append(part.new_zeros(tuple(shape)))
            flat = results[-1].view(-1, *part.shape[1:])
            flat.index_copy_(0, home.places, home.copied.of_values(part))
        return results

    def return_gradients(self, values: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Moves gradients of results, `[places, ...]`, in; results have these shapes."""
        if (home := self._moves.home) is None:
            return self.exchange(values, True, "backward", shapes)
        of_places = [value.index_select(0, home.places) for value in values]
        sums = [home.copied.summed(value, sum(home.counts[1])) for value in of_places]
        came = self._send(sums, home.counts[::-1], True, "backward")
        return [
            home.sent.summed(part, self.num_placed).view(tuple(shape))
            for part, shape in zip(came, shapes, strict=True)
        ]

    def _send(
        self, rows: list[torch.Tensor], counts: tuple[list[int], list[int]], goes_in: bool, phase: str
    ) -> list[torch.Tensor]:
        """Sends rows of all values in one exchange, and returns what comes; the same rows if no rank sends any."""
        if not self._moves.on_host.crosses:
            return rows
        where = f"{self._where}, rows on their way {'in' if goes_in else 'home'}, {phase}"
        if len(rows) == 1 and self._transport.grid.shape[2] == 1:
            return [self._exchange(rows[0], counts, where)]
        parts = [x.reshape(len(x), x.shape[1:].numel()).contiguous().view(torch.uint8) for x in rows]
        return _as_values(self._exchange(torch.cat(parts, dim=1), counts, where), rows)

    def _exchange(self, rows: torch.Tensor, counts: tuple[list[int], list[int]], where: str) -> torch.Tensor:
        """Returns the rows that other ranks send to this one. With tensor ranks, rows are bytes."""
        num_shares = self._transport.grid.shape[2]
        if num_shares == 1:
            return self._transport.exchange(AllToAll(rows, *counts, where)).wait()
        width = rows.shape[1]
        share = ceil_div(width, num_shares * NUMBER_BYTES) * NUMBER_BYTES
        first = self._transport.grid.tensor_rank * share
        mine = nn.functional.pad(rows, (0, share * num_shares - width))[:, first : first + share].contiguous()
        received = self._transport.exchange(AllToAll(mine, *counts, where)).wait()
        each, where = [len(received)] * num_shares, f"{where}, shares of tensor ranks"
        asked = AllToAll(received.repeat(num_shares, 1), each, each, where, scope=Scope.TENSOR)
        shares = self._transport.exchange(asked).wait().view(num_shares, len(received), share)
        return shares.transpose(0, 1).flatten(1)[:, :width]


def _as_values(joined: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns rows with the dtypes and shapes of other tensors from `[rows, bytes]` that hold them side by side."""
    widths = [value.shape[1:].numel() * value.element_size() for value in like]
    return [
        # A copy, because `contiguous` returns a single row as it is, wherever its bytes begin.
        part.clone(memory_format=torch.contiguous_format).flatten().view(value.dtype).view(len(part), *value.shape[1:])
        for part, value in zip(joined.split(widths, dim=1), like, strict=True)
    ]


class _Move(torch.autograd.Function):
    """Moves rows; backward moves gradients of all floating-point values the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: PassRows, goes_in: bool, anchor: torch.Tensor | None, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Moves rows. An anchor requires a gradient, so backward runs even if no value needs one on this rank."""
        ctx.rows, ctx.goes_in = rows, goes_in
        ctx.are_float = [value.is_floating_point() for value in values]
        ctx.shapes = [value.shape for value in values]
        if goes_in:
            shapes = rows.shapes_in(values)
        else:
            batch_size, length = rows.shape
            leads = [(batch_size, length) if value.ndim == 3 else (batch_size * length,) for value in values]
            shapes = [(*lead, value.shape[-1]) for lead, value in zip(leads, values, strict=True)]
        flat = values if goes_in else [value.flatten(0, -2) for value in values]
        moved = rows.exchange(flat, True, "forward", shapes) if goes_in else rows.return_results(flat, shapes)
        ctx.mark_non_differentiable(
            *[value for value, is_float in zip(moved, ctx.are_float, strict=True) if not is_float]
        )
        return tuple(moved)

    @staticmethod
    @hidden_from_dynamo
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Moves gradients the other way."""
        rows: PassRows = ctx.rows
        rows.before_backward()
        floats, shapes = list(compress(gradients, ctx.are_float)), list(compress(ctx.shapes, ctx.are_float))
        if not floats:
            return None, None, None, *[None for _ in ctx.are_float]
        if ctx.goes_in:
            moved = iter(rows.exchange(floats, False, "backward", shapes))
        else:
            moved = iter(rows.return_gradients([gradient.flatten(0, -2) for gradient in floats], shapes))
        return None, None, None, *[next(moved) if is_float else None for is_float in ctx.are_float]
