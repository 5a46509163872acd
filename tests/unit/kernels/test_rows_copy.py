"""Rows are copied from where they are to where they belong, and nothing else is written."""

import math
import re

import pytest
import torch

from distca_hf.kernels.rows import copy_rows, prepare_copy, prepare_merge


@pytest.mark.parametrize("shape", [(3,), (2, 4)], ids=str)
def test_rows_are_written_to_their_places(shape: tuple[int, ...]) -> None:
    target, places = torch.zeros(6, *shape), torch.tensor([4, 0, 3])
    rows = torch.arange(1.0, 4.0).view(3, *[1] * len(shape)).expand(3, *shape)
    copy_rows((rows,), None, (target,), places)

    assert target.flatten(1)[:, 0].tolist() == [2, 0, 0, 3, 1, 0]
    assert (target == target.flatten(1)[:, 0].view(6, *[1] * len(shape))).all()


def test_rows_of_two_tensors_are_gathered_side_by_side() -> None:
    k, v, rows = torch.arange(12.0).view(6, 2), -torch.arange(6.0).view(6, 1), torch.tensor([5, 0, 2])
    beside = torch.full((3, 4), 7.0)
    copy_rows((k, v), rows, (beside[:, :2], beside[:, 2:3]), None)

    assert beside.tolist() == [[10, 11, -5, 7], [0, 1, 0, 7], [4, 5, -2, 7]]


def test_chosen_rows_go_to_chosen_places() -> None:
    target = torch.zeros(4)
    copy_rows((torch.arange(1.0, 6.0),), torch.tensor([4, 1]), (target,), torch.tensor([0, 3]))

    assert target.tolist() == [5, 0, 0, 2]


def test_steps_are_prepared_for_all_tensors_that_are_alike() -> None:
    like, rows = (torch.zeros(6, 2), torch.zeros(6, 1)), torch.tensor([5, 0, 2])
    copy = prepare_copy(like, rows, (torch.zeros(3, 3),), None)
    merge = prepare_merge(torch.zeros(4, 1, 2), torch.zeros(4, 1), torch.zeros(2, 1, 2), torch.zeros(1, 2), 1)
    for layer in range(1, 3):
        k, v, beside = layer * torch.arange(12.0).view(6, 2), -torch.arange(6.0).view(6, 1), torch.zeros(3, 3)
        copy((k, v), (beside,))
        out, lse, far = torch.zeros(4, 1, 2), torch.zeros(4, 1), torch.full((2, 1, 2), 2.0 * layer)
        merge(out, lse, far, torch.zeros(1, 2))

        assert beside.tolist() == [[10 * layer, 11 * layer, -5], [0, layer, 0], [4 * layer, 5 * layer, -2]]
        assert out[:, 0, 0].tolist() == [0, layer, layer, 0]
        assert lse[:, 0].tolist() == pytest.approx([0, math.log(2), math.log(2), 0])


def test_no_rows_change_nothing() -> None:
    target = torch.ones(3, 2)
    copy_rows((torch.zeros(0, 2),), None, (target,), torch.zeros(0, dtype=torch.int64))

    assert (target == 1).all()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (torch.zeros(3, 4), "that have 2 and 3 rows"),
        (torch.zeros(2, 5), "(4,) of torch.float32 and (5,) of torch.float32 to (4,) of"),
        (torch.zeros(2, 4).long(), "(4,) of torch.float32 and (4,) of torch.int64 to (4,) of"),
    ],
    ids=["more rows", "wider rows", "another dtype"],
)
def test_rows_that_do_not_fit_are_refused(source: torch.Tensor, told: str) -> None:
    target = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=re.escape(told)):
        copy_rows((target[:2], source), None, (target, target), torch.tensor([0, 1]))

    assert not target.any()


@pytest.mark.parametrize(("rows", "places"), [([0, 1, 2], [3, 4]), (None, [3]), ([0], None)], ids=str)
def test_as_many_places_as_rows_are_needed(rows: list[int] | None, places: list[int] | None) -> None:
    target = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"cannot copy \d rows to \d places"):
        copy_rows((target[:2],), rows and torch.tensor(rows), (target,), places and torch.tensor(places))


@pytest.mark.parametrize("count", [0, 2])
def test_rows_of_another_shape_are_refused(count: int) -> None:
    """Also if there are none of them, and if they are as long."""
    target, places = torch.zeros(5, 4), torch.arange(count)
    with pytest.raises(ValueError, match=re.escape("(2, 2) of torch.float32 to (4,) of torch.float32")):
        copy_rows((torch.ones(count, 2, 2),), None, (target,), places)


def test_rows_side_by_side_are_taken_apart_and_put_together() -> None:
    """Whatever the shapes of the rows."""
    k, v, beside = torch.arange(24.0).view(6, 2, 2), -torch.arange(6.0).view(6, 1), torch.zeros(4, 5)
    copy_rows((k, v), torch.tensor([5, 2]), (beside,), torch.tensor([3, 0]))
    assert beside.tolist() == [[8, 9, 10, 11, -2], [0] * 5, [0] * 5, [20, 21, 22, 23, -5]]

    again_k, again_v = torch.zeros(2, 2, 2), torch.zeros(2, 1)
    copy_rows((beside,), torch.tensor([3, 0]), (again_k, again_v), None)
    assert torch.equal(again_k, k[[5, 2]])
    assert torch.equal(again_v, v[[5, 2]])


def test_whole_tensors_are_not_copied_by_rows() -> None:
    with pytest.raises(ValueError, match="neither rows nor places"):
        copy_rows((torch.ones(2),), None, (torch.zeros(2),), None)
