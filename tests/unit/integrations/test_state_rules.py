"""Mamba1's scan goes on from a state that tokens add to it, whatever the decay of its entries."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from distca_hf.integrations.models.state_rules import SelectiveScan


CHANNELS, STATE, TOKENS = 4, 16, 5


def scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: Any = 0, **_: Any
) -> torch.Tensor:
    """Returns outputs `[N, C, T]` of rows, token by token."""
    outputs = []
    for token in range(x.shape[2]):
        step = dt[:, :, token, None]
        state = (A * step).exp() * state + step * x[:, :, token, None] * B[:, None, :, token]
        outputs.append((state * C[:, None, :, token]).sum(-1))
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("decay", [1e-3, 1.0, 1e3])
def test_a_scan_goes_on_from_a_state(decay: float) -> None:
    random = torch.Generator().manual_seed(1)
    x, dt = (torch.randn(1, TOKENS, CHANNELS, generator=random) for _ in range(2))
    B, C = (torch.randn(1, TOKENS, STATE, generator=random) for _ in range(2))
    A = -decay * torch.arange(STATE, 0, -1).expand(CHANNELS, STATE)
    state = torch.randn(1, CHANNELS, STATE, generator=random).requires_grad_()
    dt = dt - 7  # steps of about 0.001, as of trained models
    rule = SelectiveScan(scan, (x, dt, B, C), A, None, {"delta_bias": None, "delta_softplus": True})

    found, _ = rule._run(rule.rows, state)
    rows = [one.double().transpose(1, 2) for one in (x, functional.softplus(dt))]
    expected = scan(*rows, A.double(), *(one.double().transpose(1, 2) for one in (B, C)), state=state.double())
    expected = expected.transpose(1, 2)

    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    of_found, of_expected = (torch.autograd.grad(one.sum(), state)[0] for one in (found, expected))
    assert (of_found - of_expected).abs().max() <= 1e-5 * of_expected.abs().max()
