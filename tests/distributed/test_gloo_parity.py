"""Core attention over random layouts on real gloo ranks."""

import random
from collections.abc import Callable
from pathlib import Path

import torch

from distca_hf.comm.groups import open_transport
from support.layouts import random_layout
from support.parity import Case, Difference, compare
from support.ranks import run_ranks


CASES, RANKS = 25, 3


def _compare_many() -> list[Difference]:
    transport = open_transport(torch.device("cpu"), 20.0)
    seeds = range(1000 * RANKS, 1000 * RANKS + CASES)
    return [compare(Case.draw(seed, random_layout(random.Random(seed), RANKS)), transport) for seed in seeds]


def test_outputs_and_gradients_equal_unsplit_attention(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    differences = [difference for rank in run_ranks(RANKS, _compare_many, tmp_path) for difference in rank]
    record_property("largest difference", max(difference.largest for difference in differences))
    assert max(difference.largest for difference in differences) <= 1e-10
    assert all(difference.as_planned for difference in differences), differences
    assert any(difference.bytes_sent for difference in differences)
