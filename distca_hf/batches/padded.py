"""Padded rows: turns the tokens of a padded batch into one pack, and remembers their places in its rows.

    mask  0 0 1 1 1         tokens     a a a b b b b
          1 1 1 1 0    ──▶  positions  0 1 2 0 1 2 3

A pack has no padding: it is planned like any other, and linear layers compute only tokens. A rank without tokens runs
on a row of padding, so that it takes part in everything that other ranks do.
"""

from dataclasses import dataclass

import torch

from distca_hf.batches.batch_documents import (
    POSITIONS_WITH_TEXT,
    Batch,
    check_mask_numbers,
    check_positions_fit,
    documents_at,
    media_of,
    padded_rows,
    tokens_of,
)
from distca_hf.data.documents import IGNORED_LABEL
from distca_hf.data.rows import MEDIA
from distca_hf.errors import PackingError, and_more


@dataclass
class PaddedRows:
    """Places and documents of the tokens of a padded batch.

    Attributes:
        shape: shape of the batch, `(B, L)`.
        token_places: `[T]` places of the tokens among all B · L, row after row.
        offsets: `[documents + 1]` int32, where documents begin among the tokens.
        has_own_positions: whether the batch had positions.
        is_left_padded: whether some row begins with padding.
    """

    shape: tuple[int, int]
    token_places: torch.Tensor
    offsets: torch.Tensor
    has_own_positions: bool
    is_left_padded: bool

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Picks the values of tokens, `[1, T, ...]`, from values of all places, `[B, L, ...]`."""
        return values.flatten(0, 1)[self.token_places][None]

    def pin(self) -> None:
        """Moves `token_places` to memory that a GPU copies from while the host goes on; once."""
        if not self.token_places.is_pinned():
            self.token_places = self.token_places.pin_memory()

    def places_on(self, device: torch.device) -> torch.Tensor:
        """Returns `token_places` on a device; the host does not wait."""
        if device.type == "cuda":
            self.pin()
        return self.token_places.to(device, non_blocking=True)


def padded_rows_of(batch: Batch, with_images: bool = False) -> PaddedRows | None:
    """Returns the rows of a padded batch; waits for the device.

    Args:
        with_images: whether it may have images, whose features are among the tokens when they are packed.

    Returns:
        None if the batch is not padded, or must stay so: it has offsets, a mask of several numbers per token, or
        labels to learn that padding predicts; or images, or positions of several numbers per token.

    Raises:
        PackingError: a row has no token, or padding between tokens; or positions do not fit the mask.
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    tokens = tokens_of(batch)
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape != tokens.shape or bool(mask.all()):
        return None
    if batch.get("cu_seq_lens_q") is not None or (media_of(batch) and not with_images):
        return None
    if positions is not None and positions.ndim == 3 and with_images:
        positions = positions[0] if len(positions) == POSITIONS_WITH_TEXT else None
    if positions is not None and positions.ndim != 2:
        return None
    check_positions_fit(positions, tokens)
    check_mask_numbers(batch)
    is_token = mask.bool()
    _check_runs(is_token)
    if _learns_after_padding(batch.get("labels"), batch.get("shift_labels"), is_token):
        return None
    if positions is None:
        documents = padded_rows(is_token, is_token)
    else:
        documents = documents_at(positions.expand(mask.shape), is_token)
    assert documents.query_rows is not None
    return PaddedRows(
        shape=(mask.shape[0], mask.shape[1]),
        token_places=documents.query_rows,
        offsets=documents.cu_seqlens_q,
        has_own_positions=batch.get("position_ids") is not None,
        is_left_padded=not bool(is_token[:, 0].all()),
    )


def _learns_after_padding(labels: object, shift_labels: object, is_token: torch.Tensor) -> bool:
    """Returns whether a label is learnt that padding predicts, as of the first token of a row that is padded on its
    left: padding has no hidden states in a pack.

    Args:
        is_token: bool `[B, L]`.
    """
    if isinstance(shift_labels, torch.Tensor) and shift_labels.shape == is_token.shape:
        if bool(((shift_labels != IGNORED_LABEL) & ~is_token).any()):
            return True
    if not isinstance(labels, torch.Tensor) or labels.shape != is_token.shape:
        return False
    return bool(((labels[:, 1:] != IGNORED_LABEL) & ~is_token[:, :-1]).any())


def _check_runs(is_token: torch.Tensor) -> None:
    """Checks that the tokens of every row, bool `[B, L]`, are one run."""
    begins = is_token.clone()
    begins[:, 1:] &= ~is_token[:, :-1]
    runs = begins.sum(dim=1)
    wrong = (runs != 1).nonzero().flatten().tolist()
    if not wrong:
        return
    row = wrong[0]
    if int(runs[row]) == 0:
        raise PackingError(
            f"row {row} of a padded batch has no token: its attention_mask is 0 everywhere{and_more(len(wrong) - 1)}. "
            "Leave such rows out of the dataset"
        )
    hole = int((begins[row].cumsum(0) > 1).nonzero()[0])
    raise PackingError(
        f"row {row} of a padded batch has padding between tokens: its attention_mask begins again at place {hole}"
        f"{and_more(len(wrong) - 1)}. Pad rows only on the left, or only on the right"
    )


def fill_empty(batch: Batch) -> dict[str, torch.Tensor | int | None]:
    """Returns inputs for a rank without tokens: one row of padding without a label, of loss 0. Empty for other
    ranks."""
    if tokens_of(batch).numel():
        return {}
    filled: dict[str, torch.Tensor | int | None] = (
        {"num_items_in_batch": 1} if batch.get("num_items_in_batch") is None else {}
    )
    for name, values in batch.items():
        if not isinstance(values, torch.Tensor):
            continue
        if name.startswith("cu_seq_lens"):
            filled[name] = values.new_tensor([0, 1])
        elif name == "position_ids" and values.ndim == 3:  # several positions per token, as of images
            filled[name] = values.new_zeros((len(values), 1, 1))
        elif MEDIA.search(name) and not values.numel():
            filled[name] = None
        elif 0 in values.shape[:2]:
            is_mask = name == "attention_mask"  # 1: a mean over no token is NaN
            number = IGNORED_LABEL if name.endswith("labels") else int(is_mask)
            filled[name] = values.new_full((1, 1, *values.shape[2:]), number)
    return filled
