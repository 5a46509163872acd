"""Operators whose outputs' sizes are unknown while a graph is traced do not break it."""

import pytest
import torch

from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.layout import Layout
from distca_hf.runtime.op import flash_attn
from support.compiling import forget_graphs, graph_breaks
from support.parity import SPEC, live_plan


def _compiled_and_plain() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients of a function around planned attention."""
    layout = Layout.from_segments([8, 4], [[(0, 0, 8), (1, 0, 4)]])
    live = live_plan(layout, LocalTransport(), DistCAConfig(kernel="reference"))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, 2, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.tanh(flash_attn(torch.tanh(q), k, v, SPEC, live.handle)[0])

    results = []
    for run in (torch.compile(function, backend="aot_eager"), function):
        out = run(q, k, v)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    return results[0], results[1]


def test_graphs_are_whole_without_settings_of_the_process() -> None:
    forget_graphs()
    compiled, plain = _compiled_and_plain()

    torch.testing.assert_close(compiled, plain)
    assert graph_breaks() == []


def test_without_names_private_to_torch_numbers_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_graphs()
    monkeypatch.delattr(torch._library.fake_impl, "allocate_size")
    compiled, plain = _compiled_and_plain()

    torch.testing.assert_close(compiled, plain)
    assert "flash_attn" in graph_breaks()[0]
