"""A tensor that waits in host memory comes back as it was, whatever its size."""

import pytest
import torch

from distca_hf.integrations import offload
from distca_hf.integrations.offload import OffloadedLayers, OnHost


@pytest.mark.parametrize("shape", [(1, 7, 5), (2, 16), (3, 0), ()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_copy_in_pieces_is_whole(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(offload, "PIECE_BYTES", 64)
    x = torch.randn(shape, dtype=dtype)
    copy = OnHost(x, None)
    first = copy.take()
    expected = x.clone()
    x.zero_()

    for back in (first, copy.take()):
        assert back.dtype == dtype
        assert torch.equal(back, expected)


def test_a_copy_of_a_view_has_its_rows_alone() -> None:
    x = torch.arange(24.0).view(4, 6)
    copy = OffloadedLayers().send(x[:, 1:3].t())

    assert torch.equal(copy.take(), x[:, 1:3].t())
