"""Without a name that is private to torch, its public way around gives the same results."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad, profiler

from distca_hf import torch_private
from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.layout import Layout
from distca_hf.runtime import custom_op
from distca_hf.runtime.custom_op import define_op
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


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def _shape(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.factor = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient * ctx.factor, None


def _operator(name: str) -> Callable[..., Any]:
    """A new operator: names are looked for when it is defined."""

    def function(x: torch.Tensor, factor: float) -> torch.Tensor:
        return _times(x, factor)

    function.__name__ = name
    return define_op(function, _shape, _backward, _save)


@pytest.mark.parametrize("private", [True, False])
def test_operators_are_the_same_with_public_names(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatched ones, too, in eager mode and compiled."""
    if not private:
        monkeypatch.setattr(custom_op, "below_autograd", lambda operator: None)
        monkeypatch.delattr(torch._compile, "_disable_dynamo")
    times = _operator(f"times_{'by_private_names' if private else 'by_public_names'}")
    monkeypatch.setattr(custom_op, "is_plain", lambda given: False)
    for run in (times, torch.compile(lambda x, factor: times(x, factor), backend="aot_eager", fullgraph=True)):
        x = torch.arange(3.0, requires_grad=True)
        y = run(x, 3.0)
        y.sum().backward()

        assert y.tolist() == [0.0, 3.0, 6.0]
        assert x.grad.tolist() == [3.0] * 3
    with pytest.raises(UnsupportedAttentionError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda x: times(x, 3.0), (torch.ones(3),), (torch.ones(3),))


@pytest.mark.parametrize("missing", ["_AutoDispatchBelowAutograd", "_after_autograd_keyset"])
def test_torch_registers_autograd_if_a_private_name_is_gone(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = torch.ops.aten.mul.Tensor
    assert torch_private.below_autograd(operator) is not None
    monkeypatch.delattr(torch._C, missing)

    assert torch_private.below_autograd(operator) is None


@pytest.mark.parametrize(
    ("place", "missing"),
    [(torch._C, "_len_torch_function_stack"), (profiler, "_is_profiler_enabled"), (forward_ad, "_current_level")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_a_private_name_every_call_is_dispatched(
    place: Any, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = torch.ones(2), 1.0, None
    assert torch_private._make_is_plain()(given)
    monkeypatch.delattr(place, missing)

    assert not torch_private._make_is_plain()(given)


def test_forward_derivatives_may_be_asked_for_if_that_cannot_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch_private.in_dual_level()
    with forward_ad.dual_level():
        assert torch_private.in_dual_level()
    monkeypatch.delattr(forward_ad, "_current_level")

    assert torch_private.in_dual_level()


def test_a_pass_is_taken_for_backward_if_that_cannot_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch_private.backward_number()))
    for _ in range(2):
        x.sum().backward()
    seen.append(torch_private.backward_number())
    monkeypatch.delattr(torch._C, "_current_graph_task_id")

    assert 0 <= seen[0] < seen[1]
    assert [seen[2], torch_private._make_backward_number()()] == [-1, 0]


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class GroupWithoutBackends:
    """A process group of a torch without `_get_backend`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group


def test_all_to_alls_without_backends_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = dist.all_to_all_single

    def public(*given: Any, group: GroupWithoutBackends, async_op: bool) -> dist.Work:
        return start(*given, group=group.group, async_op=async_op)

    monkeypatch.setattr(dist, "all_to_all_single", public)
    received = []
    with one_rank(tmp_path):
        for group in (dist.group.WORLD, GroupWithoutBackends(dist.group.WORLD)):
            room = torch.zeros(3, 2)
            all_to_all = torch_private.all_to_all_of(group, torch.device("cpu"))
            all_to_all(room, torch.arange(6.0).view(3, 2), [3], [3]).wait()
            received.append(room.tolist())

    assert received == [[[0, 1], [2, 3], [4, 5]]] * 2


def test_groups_of_this_process_are_unknown_without_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_rank(tmp_path):
        assert torch_private.num_groups() == 1
    assert torch_private.num_groups() == 0
    monkeypatch.delattr(dist.distributed_c10d, "_world")

    assert torch_private.num_groups() == 0


def test_ranks_compare_the_number_after_which_torch_names_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it has opened since torch 2.14, also if they are closed again."""

    def hash_of(ranks: object) -> str:
        return f"{ranks}_{dist.distributed_c10d._world.group_count}"

    with one_rank(tmp_path):
        monkeypatch.setattr(dist.distributed_c10d, "_hash_ranks_to_str", hash_of)
        before = torch_private.num_groups()
        dist.destroy_process_group(dist.new_group([0]))
        assert torch_private.num_groups() == before + 1


def test_a_first_hook_runs_before_those_that_were_there_and_is_numbered_so() -> None:
    module, ran = torch.nn.Linear(2, 2), list[str]()
    module.register_forward_hook(lambda *_: ran.append("before"))
    handle = torch_private.register_first_hook(module, lambda *_: ran.append("first"))
    module.register_forward_hook(lambda *_: ran.append("after"))

    module(torch.zeros(1, 2))
    assert ran == ["first", "before", "after"]
    assert next(iter(dict.keys(module._forward_hooks))) == handle.id  # where Dynamo looks

    handle.remove()
    module(torch.zeros(1, 2))
    assert ran[3:] == ["before", "after"]


class Caller:
    """Looks at the objects whose methods run."""

    def look(self) -> list[object]:
        return [*torch_private.running_objects()]

    def look_within(self) -> list[object]:
        def look() -> list[object]:
            assert self is not None
            return [*torch_private.running_objects()]

        return look()


def test_a_look_at_running_objects_keeps_no_output_of_a_loop_alive() -> None:
    caller, output = Caller(), torch.zeros(2)
    held = weakref.ref(output)
    found, within = caller.look(), caller.look_within()
    assert sum(one is caller for one in found) == 1
    assert sum(one is caller for one in within) == 2

    del output
    assert held() is None
