"""Sums of rows that are prepared once, for tensors of any device."""

from collections.abc import Sequence

import torch

from distca_hf.kernels.rows import RowSums, prepare_add


def assert_prepared_sums_serve(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], sums: RowSums) -> None:
    """Asserts that sums prepared for some tensors are exact for them, for others like them, and once more.

    Args:
        one, other: target, own and returned rows, `[rows, parts, numbers]`, alike in shapes and strides.
    """
    add = prepare_add(*one, sums)
    for target, own, returned in (one, other, one):
        flat = target.flatten(1).clone(), own.flatten(1), returned.flatten(1)
        prepare_add(*flat, sums)(*flat)
        expected = flat[0]
        add(target, own, returned)

        assert torch.equal(target.flatten(1), expected)
