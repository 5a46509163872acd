"""Columns that were packed before ranks agreed are used only for the same moves and tensors."""

import torch

from distca_hf.batches.batch_documents import Batch
from distca_hf.integrations.models.decoder_columns import NUMBERS, PackedColumns
from distca_hf.layout import Layout
from distca_hf.planning.row_moves import RowMoves
from distca_hf.runtime.row_moves import DeviceRowMoves, PinnedRowMoves


def moves_of_rows() -> DeviceRowMoves:
    """Moves of rank 0: the last of its documents of 4 and 2 tokens goes to rank 1."""
    home, placed = Layout.from_packs([[4, 2], []]), Layout.from_packs([[4], [2]])
    return PinnedRowMoves.prepare(RowMoves.of(home, placed, rank=0), pin=False).to(torch.device("cpu"))


def packed(moves: DeviceRowMoves, batch: Batch) -> PackedColumns:
    entries = {name: batch[name] for name in ("input_ids", "shift_labels", "weights")}
    return PackedColumns.of(moves, batch, batch["input_ids"].shape, entries)


def a_batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(6)[None]
    return {"input_ids": ids, "shift_labels": ids + 1, "weights": torch.rand(1, 6, 3, requires_grad=True)}


def test_whole_numbers_leave_side_by_side_with_positions_in_documents() -> None:
    batch = a_batch()
    columns = packed(moves_of_rows(), batch)
    assert columns.columns.differentiate
    assert columns.columns.described["weights"] == (torch.float32, torch.Size([3]))
    values = columns.with_positions(1)
    assert torch.equal(values[NUMBERS].T, torch.tensor([[0, 1, 2, 3, 0, 1], [*range(6)], [*range(1, 7)]]))
    assert torch.equal(values["weights"], batch["weights"][0])
    positions = columns.with_positions(3)[NUMBERS][:, :3]
    assert torch.equal(positions, values[NUMBERS][:, :1].expand(-1, 3))


def test_columns_are_packed_again_if_anything_that_moves_changed() -> None:
    moves, batch = moves_of_rows(), a_batch()
    columns = packed(moves, batch)
    assert columns.are_of(moves, {**batch})
    assert columns.are_of(moves, {**batch, "num_items_in_batch": torch.tensor(5), "use_cache": False})
    assert not columns.are_of(moves_of_rows(), batch)
    for name in ("input_ids", "shift_labels", "weights"):
        assert not columns.are_of(moves, {**batch, name: batch[name].clone()})
    assert not columns.are_of(moves, {**batch, "position_ids": torch.arange(6)[None]})
    assert not columns.are_of(moves, {**batch, "token_weights": torch.ones(1, 6)})
    assert not columns.are_of(moves, {name: batch[name] for name in ("input_ids", "weights")})
