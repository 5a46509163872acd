"""Moved images on the device: sends features home from the ranks whose towers computed them.

Backward sends gradients of features to the ranks that computed them. Each rank takes part, whether or not it holds or
computes an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from distca_hf.arrays import IntArray
from distca_hf.comm.agreement import labels_of
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import AllToAll, Transport
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.planning.image_moves import ImageMoves


# Dtypes of pixels and features by their numbers in gathers; 0: a rank that has none.
DTYPES = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)


class FeatureForm(NamedTuple):
    """Form of the features of images, the same on all ranks."""

    is_stacked: bool  # whether they are one tensor `[images, ...]`, not one tensor for each image
    deep_layers: int  # layers of the text decoder that add further features (DeepStack)
    width: int
    dtype: torch.dtype


class Features(NamedTuple):
    """Features that one rank has computed."""

    rows: torch.Tensor  # `[tokens, (1 + deep_layers) * width]`
    tokens: Sequence[int]  # number of rows of each unit
    form: FeatureForm


def show_features(
    transport: Transport, features: Features | None, moves: ImageMoves, rank_of: IntArray, where: str
) -> tuple[FeatureForm, IntArray]:
    """Returns the form of features, and the number of rows of each unit of all ranks. A collective call. Raises
    UnsupportedAttentionError if a rank got another number of features than images, or features of another form.

    Args:
        features: what this rank has computed; None without images.
        rank_of: `[units]` rank that computes each.
    """
    values = [0] * 6
    if features is not None:
        form = features.form
        values = [len(features.tokens), len(features.rows), int(form.is_stacked), form.deep_layers, form.width]
        values += [DTYPES.index(form.dtype), *features.tokens]
    most = int(moves.of_ranks.max())
    values = (values + [0] * (6 + most - len(values)))[: 6 + most]
    shown = transport.gather(values, f"{where}, numbers of features").wait()
    tokens, first = np.zeros(len(rank_of), dtype=np.int64), next((row for row in shown if row[0]), shown[0])
    for rank, row in enumerate(shown):
        count, rows, units = row[0], row[1], int(moves.of_ranks[rank])
        if count != units or sum(row[6 : 6 + units]) != rows or (units and row[2:6] != first[2:6]):
            raise UnsupportedAttentionError(
                f"{transport.grid.name}, {where}: get_image_features returned {count} features, of {rows} rows in "
                f"all, for {units} images on rank {labels_of(transport, Scope.ROWS)[rank]}; expected a tensor for each"
            )
        mine = np.flatnonzero(rank_of == rank)  # none on a rank with a dummy
        tokens[mine] = row[6 : 6 + len(mine)]
    stacked, deep_layers, width, number = first[2:6]
    dtype = DTYPES[number]
    assert dtype is not None
    return FeatureForm(bool(stacked), deep_layers, width, dtype), tokens


@dataclass(frozen=True, eq=False)
class RowsHome:
    """Sends features home from the ranks that computed them."""

    transport: Transport
    places: torch.Tensor  # `[rows]` places of the rows that come home, in the order in which they come
    # `[ranks]` number of rows to and from each rank; further rows of this rank stay unused.
    sent: list[int]
    received: list[int]
    where: str

    def features(self, rows: torch.Tensor, differentiate: bool) -> torch.Tensor:
        """Returns `[rows of the batch, D]` from `[computed rows, D]`. A collective call. `differentiate` says whether
        gradients go back; the same on all ranks."""
        if not differentiate:
            return self.bring(rows.detach())
        anchor = rows.new_zeros((), dtype=torch.float32).requires_grad_()
        home: torch.Tensor = _Home.apply(self, anchor, rows)
        return home

    def bring(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends computed rows home, and returns what comes in the order of the batch."""
        asked = AllToAll(rows[: sum(self.sent)].contiguous(), self.sent, self.received, f"{self.where}, home")
        arrived = self.transport.exchange(asked).wait()
        return torch.empty_like(arrived).index_copy_(0, self.places, arrived)

    def take_back(self, gradients: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Sends gradients of the batch's rows to where these were computed; unused rows get zeros."""
        leaving = gradients.index_select(0, self.places)
        where = f"{self.where}, backward"
        arrived = self.transport.exchange(AllToAll(leaving, self.received, self.sent, where)).wait()
        if len(arrived) == num_rows:
            return arrived
        return torch.cat([arrived, arrived.new_zeros((num_rows - len(arrived), *arrived.shape[1:]))])


class _Home(torch.autograd.Function):
    """Sends features home; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, home: RowsHome, anchor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Brings features home. The anchor requires a gradient, so backward runs on ranks that computed nothing."""
        ctx.home, ctx.num_rows = home, len(rows)
        return home.bring(rows)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[Any, ...]:
        """Sends gradients to the ranks that computed the features."""
        return None, None, ctx.home.take_back(gradients, ctx.num_rows)
