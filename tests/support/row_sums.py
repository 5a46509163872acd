"""Sums of rows that are prepared once, for tensors of any device."""

from collections.abc import Sequence

import torch

from distca_hf.kernels.rows import RowSums, add_rows, prepare_add


def assert_prepared_sums_serve(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], sums: RowSums) -> None:
    """Asserts that sums prepared for some tensors are exact for them, for others like them, and once more.

    Args:
        one, other: target, own and returned rows, `[rows, parts, numbers]`, alike in shapes and strides.
    """
    add = prepare_add(*one, sums)
    for target, own, returned in (one, other, one):
        expected = target.flatten(1).clone()
        add_rows(expected, own.flatten(1), returned.flatten(1), sums)
        add(target, own, returned)

        assert torch.equal(target.flatten(1), expected)
