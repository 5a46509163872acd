"""Views of tensors that are alike."""

import torch

from distca_hf.runtime.kernel_calls import view_of


def test_parts_are_taken_of_tensors_that_are_alike() -> None:
    wide, other = torch.arange(48).view(2, 4, 6), -torch.arange(48).view(2, 4, 6)
    whole, like = wide[:, 1:], other[:, 1:]
    part = whole[1:, :, 2:4]

    assert torch.equal(view_of(part, whole)(like), like[1:, :, 2:4])
    assert view_of(part, whole)(like).untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert view_of(whole, whole)(like) is like
