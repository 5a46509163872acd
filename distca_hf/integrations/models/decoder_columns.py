"""Decoder columns: tensors with a value per token, which move with the rows of a batch, and what ranks agree on.

Token ids, labels, positions and other whole numbers travel side by side: one index then picks all numbers of a row.
"""

from collections.abc import Mapping
from operator import is_
from typing import NamedTuple, Self

import torch

from distca_hf.batches.batch_documents import Batch
from distca_hf.comm.agreement import REMEDIES, Agreement, Occasion, by_value
from distca_hf.errors import PlanMismatchError
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.row_moves import DeviceRowMoves


# Keywords that describe the documents of a given batch; the plan describes those of placed rows.
REPLACED_BY_PLAN = frozenset(
    {"attention_mask", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx"}
)
# Features of images for the first layers, only of visual tokens; and the mask of visual tokens.
DEEP, DEEP_MASK = "deepstack_visual_embeds", "visual_pos_masks"
# Entries of a batch that do not move unchanged.
APART = REPLACED_BY_PLAN | {"position_ids", DEEP, DEEP_MASK}
# Name of all whole numbers of a token, which exists only in transit.
NUMBERS = "distca_numbers"
# Numbers that ranks show each other, by their names in messages.
POSITIONS, IMAGE_LAYERS = "numbers per position", "layers that get features of images"


class Columns(NamedTuple):
    """What ranks agreed on for the columns of a pass."""

    position_rows: int  # how many numbers make up each token's position: 1, or several (for images)
    deep_layers: int  # layers that get features of images; 0 if no rank has any
    differentiate: bool  # whether some rank needs gradients of its columns
    described: Mapping[str, tuple[torch.dtype, torch.Size]]  # dtype and width of each column, by name

    @property
    def facts(self) -> dict[str, object]:
        """All attributes by name, for messages."""
        numbers = {POSITIONS: self.position_rows, IMAGE_LAYERS: self.deep_layers}
        return numbers | {"gradients are needed": self.differentiate, **self.in_words}

    @property
    def in_words(self) -> dict[str, str]:
        """Dtype and width of each column, as text."""
        return {name: f"{dtype} {[*shape]}" for name, (dtype, shape) in self.described.items()}

    def agreed(self, facts: Mapping[str, object], plan: LivePlan) -> "Columns":
        """Returns the columns that all ranks move, given these of this rank, and facts. A collective call."""
        numbers = {
            POSITIONS: self.position_rows,
            IMAGE_LAYERS: self.deep_layers,
            "differentiate": int(self.differentiate),
        }
        agreement = Agreement.start(plan.transport, Occasion.MOVE, plan.micro_batch, facts, numbers)
        shown_by = agreement.wait()
        for name, spare in ((POSITIONS, 1), (IMAGE_LAYERS, 0)):
            if len({*shown_by[name]} - {spare}) > 1:
                shown = by_value([str(value) for value in shown_by[name]], agreement.labels)
                raise PlanMismatchError(
                    f"{plan.transport.grid.name}, micro-batch {plan.micro_batch}: ranks disagree, nothing was sent: "
                    f"{name} is {shown}. {REMEDIES[Occasion.MOVE]}"
                )
        return self._replace(
            position_rows=max(shown_by[POSITIONS]),
            deep_layers=max(shown_by[IMAGE_LAYERS]),
            differentiate=any(shown_by["differentiate"]),
        )


class PackedColumns(NamedTuple):
    """Columns of this rank's batch, ready to leave.

    Attributes:
        moves, batch, entries: what they were packed for and from, and the entries of the batch that move.
        columns: what this rank knows of them; not agreed on.
        numbers: `[places, position rows + whole numbers]`, positions first.
        whole: names of the other whole numbers, in their order.
        others: `[places, ...]` all other columns.
    """

    moves: DeviceRowMoves
    batch: Batch
    entries: Mapping[str, torch.Tensor]
    columns: Columns
    numbers: torch.Tensor
    whole: list[str]
    others: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, moves: DeviceRowMoves, batch: Batch, shape: torch.Size, entries: Mapping[str, torch.Tensor]) -> Self:
        """Packs entries of a batch, `[B, L, ...]`, and its positions; without any, those counted in documents.

        Args:
            shape: `(B, L)`.
        """
        position_ids = batch.get("position_ids")
        if position_ids is None:
            positions = moves.positions[None]
        else:  # [B, L] or [1, L], or several of these
            of_places = position_ids.expand(*position_ids.shape[:-2], *shape)
            positions = of_places.reshape(-1, shape.numel()).to(torch.int64)
        described = {name: (value.dtype, value.shape[2:]) for name, value in entries.items()}
        differentiate = moves.on_host.crosses and torch.is_grad_enabled()
        differentiate = differentiate and any([value.requires_grad for value in entries.values()])
        columns = Columns(positions.shape[0], len(batch.get(DEEP) or ()), differentiate, described)
        others = {name: value.flatten(0, 1) for name, value in entries.items()}
        whole = [name for name, value in others.items() if value.dtype == torch.int64 and value.ndim == 1]
        numbers = torch.stack([*positions.unbind(), *map(others.pop, whole)], dim=1)
        return cls(moves, batch, entries, columns, numbers, whole, others)

    def are_of(self, moves: DeviceRowMoves, batch: Batch) -> bool:
        """Returns whether these were packed for the same moves from the tensors of a batch, which may have got other
        entries since."""
        is_same = moves is self.moves and batch.get("position_ids") is self.batch.get("position_ids")
        added = [batch[name] for name in batch.keys() - self.batch.keys()]
        return (
            is_same
            and all(map(is_, map(batch.get, self.entries), self.entries.values()))
            and not [value for value in added if isinstance(value, torch.Tensor) and value.ndim > 1]
        )

    def with_positions(self, position_rows: int) -> dict[str, torch.Tensor]:
        """Returns all columns by name, with so many numbers per position: this rank's, or 1 repeated."""
        numbers, more = self.numbers, position_rows - self.columns.position_rows
        if more:
            numbers = torch.cat([numbers[:, :1].expand(-1, more), numbers], dim=1)
        return {**self.others, NUMBERS: numbers}
