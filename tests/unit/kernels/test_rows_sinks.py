"""Sinks in complete rows, by their formula."""

import pytest
import torch

from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.kernels.rows import add_sinks, scale_rows, sink_gradients


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def rows(dtype: torch.dtype, tokens: int = 9, heads: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    out = torch.randn(tokens, heads, 5, generator=generator, dtype=torch.float64).to(dtype)
    return out, 3 * torch.randn(tokens, heads, generator=generator, dtype=torch.float64).to(accumulation_dtype(dtype))


@pytest.mark.parametrize("of_sinks", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["[T, N]", "[N, T]"])
def test_sinks_are_added_in_place(dtype: torch.dtype, of_sinks: torch.dtype, transposed: bool) -> None:
    (out, lse), sinks = rows(dtype), torch.tensor([-2.0, 0.5, 4.0]).to(of_sinks)
    given = lse.t().contiguous().t() if transposed else lse.clone()
    result = out.clone()
    add_sinks(result, given, sinks)

    total = (lse.double().exp() + sinks.double().exp()).log()
    unit = torch.finfo(dtype).eps
    assert (given.double() - total).abs().max() <= 16 * torch.finfo(given.dtype).eps
    assert (result.double() - out.double() * (lse.double() - total).exp()[..., None]).abs().max() <= 8 * unit


@pytest.mark.parametrize(("lse", "sink", "share"), [(1e4, -1e4, 1.0), (-1e4, 1e4, 0.0), (800.0, 800.0, 0.5)])
def test_scores_of_any_size_are_added(lse: float, sink: float, share: float) -> None:
    """Their exponentials are beyond every dtype."""
    out, of_row = torch.full((1, 1, 2), 2.0), torch.full((1, 1), lse)
    add_sinks(out, of_row, torch.tensor([sink]))

    assert out.flatten().tolist() == pytest.approx([2 * share] * 2, abs=1e-4)
    assert of_row.item() == pytest.approx(max(lse, sink) + (0.6931472 if lse == sink else 0))


def test_rows_may_be_scaled_into_another_tensor() -> None:
    out, lse = rows(torch.float64)
    before, target = out.clone(), torch.full_like(out, torch.nan)
    scale_rows(out, lse, lse + 1, target)

    torch.testing.assert_close(target, before * torch.e**-1)
    assert torch.equal(out, before)


def test_nothing_is_added_to_no_rows() -> None:
    out, lse = rows(torch.float32, tokens=0)
    add_sinks(out, lse, torch.zeros(3))

    with torch.no_grad():
        assert sink_gradients(out, out, lse, torch.zeros(3)).tolist() == [0, 0, 0]


def test_gradient_is_that_of_one_more_column() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, values = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    dout, sinks = torch.randn(4, 1, 6, generator=generator, dtype=torch.float64), torch.tensor([0.3]).double()
    given = sinks.clone().requires_grad_()
    shares = torch.cat([scores[:, :4], given.expand(4, 1)], 1).softmax(-1)[:, :4]
    whole = (shares @ values).unsqueeze(1)
    [expected] = torch.autograd.grad(whole, given, dout)

    out, lse = (scores[:, :4].softmax(-1) @ values).unsqueeze(1), scores[:, :4].logsumexp(-1, keepdim=True)
    add_sinks(out, lse, sinks)
    with torch.no_grad():
        torch.testing.assert_close(sink_gradients(dout, out, lse, sinks), expected)
    torch.testing.assert_close(out, whole.detach())
