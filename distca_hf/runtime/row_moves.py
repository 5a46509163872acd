"""Row moves on the device: sends a pass's rows to the ranks whose layers compute them, and the results home.

One all-to-all each way carries all tensors of the tokens side by side, as bytes. Backward goes the other way:
gradients of results move in, gradients of inputs move home. Each rank takes part in both, whether or not it needs
them.

Tensor ranks hold the same rows. Each sends its share of every row's bytes, and they join what they receive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from distca_hf.arrays import ceil_div
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import AllToAll, Transport
from distca_hf.planning.row_moves import RowMoves


# Bytes of the widest number. Shares of tensor ranks are whole multiples, so no number is divided.
NUMBER_BYTES = 8


@dataclass(frozen=True, eq=False)
class PinnedRowMoves:
    """Moves of this rank before their indices are copied to the device.

    Attributes:
        moves: the moves on the host.
        indices: all indices, one after the other; in memory from which a GPU copies while the host continues.
    """

    moves: RowMoves
    indices: torch.Tensor

    @classmethod
    def prepare(cls, moves: RowMoves, pin: bool) -> Self:
        """Joins the indices for a single copy; safe in a background thread."""
        joined = torch.from_numpy(np.concatenate([moves.sent, moves.received, moves.positions]))
        return cls(moves, joined.pin_memory() if pin else joined)

    def to(self, device: torch.device) -> "DeviceRowMoves":
        """Returns the moves with their indices on the device; the host does not wait."""
        moves = self.moves
        lengths = [len(part) for part in (moves.sent, moves.received, moves.positions)]
        return DeviceRowMoves(moves, *self.indices.to(device, non_blocking=True).split_with_sizes(lengths))


@dataclass(frozen=True, eq=False)
class DeviceRowMoves:
    """Moves of this rank with their indices on the device.

    Attributes:
        on_host: the same moves on the host. For all others see `RowMoves`.
    """

    on_host: RowMoves
    sent: torch.Tensor
    received: torch.Tensor
    positions: torch.Tensor


class PassRows:
    """The rows of one forward pass, and of its backward pass.

    Args:
        moves: moves of this rank.
        transport: among the ranks that hold rows.
        shape: of the batch, `(B, L)`.
        where: names the pass in messages.
        before_backward: agrees with all ranks that they differentiate this pass.

    Attributes:
        num_placed, num_tokens: number of rows that this rank's layers compute; the first `num_tokens` are tokens.
    """

    def __init__(
        self,
        moves: DeviceRowMoves,
        transport: Transport,
        shape: tuple[int, int],
        where: str,
        before_backward: Callable[[], None],
    ) -> None:
        self.num_placed, self.num_tokens, self.shape = moves.on_host.num_placed, len(moves.on_host.received), shape
        self._moves, self._transport, self._where = moves, transport, where
        self.before_backward = before_backward if moves.on_host.crosses else lambda: None

    def move_in(self, values: Sequence[torch.Tensor], differentiate: bool) -> list[torch.Tensor]:
        """Returns `[placed rows, ...]` of `[places, ...]` tensors; zeros in rows without a token. A collective call.

        Args:
            differentiate: whether some rank needs gradients of its values; the same on all ranks.
        """
        if not (differentiate or any(value.requires_grad for value in values)):
            return self.exchange(values, True, "forward", self.shapes_in(values))
        anchor = values[0].new_zeros((), dtype=torch.float32).requires_grad_()
        return list(_Move.apply(self, True, anchor, *values))

    def move_home(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns `[B, L, D]` of `[1, placed rows, D]` tensors, and `[B * L, D]` of `[placed rows, D]`; zeros in
        padding. A collective call."""
        return list(_Move.apply(self, False, None, *values))

    def shapes_in(self, values: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        """Returns the shapes of values that have moved in."""
        return [(self.num_placed, *value.shape[1:]) for value in values]

    def exchange(
        self, values: Sequence[torch.Tensor], goes_in: bool, phase: str, shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Moves `[rows, ...]` of all values in one exchange; results have these shapes."""
        taken, put, on_host = self._moves.sent, self._moves.received, self._moves.on_host
        counts = on_host.sent_counts, on_host.received_counts
        if not goes_in:
            taken, put, counts = put, taken, counts[::-1]
        rows = [value.index_select(0, taken) for value in values]
        if on_host.crosses:
            is_whole = len(rows) == 1 and self._transport.grid.shape[2] == 1
            joined = (
                rows[0]
                if is_whole
                else torch.cat(
                    [x.reshape(len(x), x.shape[1:].numel()).contiguous().view(torch.uint8) for x in rows], dim=1
                )
            )
            where = f"{self._where}, rows on their way {'in' if goes_in else 'home'}, {phase}"
            received = self._exchange(joined, counts, where)
            rows = [received] if is_whole else _as_values(received, values)
        num_rows = self.num_placed if goes_in else torch.Size(self.shape).numel()
        make = torch.Tensor.new_empty if len(put) == num_rows else torch.Tensor.new_zeros  # some may be padding
        results = [make(part, tuple(shape)) for part, shape in zip(rows, shapes, strict=True)]
        for result, part in zip(results, rows, strict=True):
            result.view(num_rows, *part.shape[1:]).index_copy_(0, put, part)
        return results

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
        moved = rows.exchange(flat, goes_in, "forward", shapes)
        ctx.mark_non_differentiable(
            *[value for value, is_float in zip(moved, ctx.are_float, strict=True) if not is_float]
        )
        return tuple(moved)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Moves gradients the other way."""
        rows: PassRows = ctx.rows
        rows.before_backward()
        floats = list(compress(gradients, ctx.are_float))
        if not ctx.goes_in:
            floats = [gradient.flatten(0, -2) for gradient in floats]
        shapes = list(compress(ctx.shapes, ctx.are_float))
        moved = iter(rows.exchange(floats, not ctx.goes_in, "backward", shapes) if floats else ())
        return None, None, None, *[next(moved) if is_float else None for is_float in ctx.are_float]
