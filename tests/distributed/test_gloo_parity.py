"""Core attention over random layouts on real gloo ranks."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distca_hf.comm.groups import open_transport
from support.layouts import random_layout
from support.parity import Case, Difference, compare
from support.ranks import run_ranks


CASES = 25


def _compare_many(first_seed: int, num_ranks: int) -> list[Difference]:
    transport = open_transport(torch.device("cpu"), 20.0)
    seeds = range(first_seed, first_seed + CASES)
    return [compare(Case.draw(seed, random_layout(random.Random(seed), num_ranks)), transport) for seed in seeds]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_outputs_and_gradients_equal_unsplit_attention(
    num_ranks: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    by_rank = run_ranks(num_ranks, _compare_many, tmp_path, 1000 * num_ranks, num_ranks)

    differences = [difference for rank in by_rank for difference in rank]
    record_property("largest difference", max(difference.largest for difference in differences))
    assert max(difference.largest for difference in differences) <= 1e-10
    assert all(difference.as_planned for difference in differences), differences
    assert any(difference.bytes_sent for difference in differences)
