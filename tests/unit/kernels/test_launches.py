"""Calls of a package that are recorded, and repeated on other tensors.

The package runs only on GPUs. The one made here has a function that chooses "compiled" kernels in the same way: it
keeps them in a cache, makes tensors for sums, and launches several kernels in a call.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distca_hf.kernels import launches
from distca_hf.kernels.launches import RecordedCalls


class Package:
    """Functions that write `2 * a` and the rows' sums of `a`, in two launches.

    Attributes:
        calls: of the function.
        launched: shapes of what kernels got.
        before: something that the function does with its tensors, too.
    """

    def __init__(self) -> None:
        self.calls, self.launched = 0, list[tuple[int, ...]]()
        self.before: Callable[[torch.Tensor, torch.Tensor], object] = lambda a, out: None
        function: Any = lambda *arguments: self._double_and_sum(*arguments)  # noqa: E731 (methods have no attributes)
        function.compile_cache = self.compiled = dict[object, Callable[..., object]]()
        self.function = function
        self.recorded = RecordedCalls(SimpleNamespace(function=function, other=len))  # type: ignore[arg-type]

    def _double_and_sum(self, a: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, factor: float) -> None:
        self.calls += 1
        assert a.is_contiguous()
        assert a.shape == out.shape
        self.before(a, out)
        totals = torch.zeros(a.shape[0], dtype=torch.float64, device=a.device)
        room = torch.empty(*a.shape, dtype=a.dtype)
        for key, kernel in (("double", self._double), ("write", self._write)):
            if key not in self.function.compile_cache:
                a.reshape(-1)  # compilers look at tensors in other ways
                self.function.compile_cache[key] = kernel
        self.function.compile_cache["double"](a.detach(), room, totals, factor, None)
        self.function.compile_cache["write"](room, out, totals, sums)

    def _double(self, a: torch.Tensor, room: torch.Tensor, totals: torch.Tensor, factor: float, unused: None) -> None:
        self.launched.append(tuple(a.shape))
        room.copy_(a).mul_(factor)
        totals.add_(a.sum(dim=1))  # wrong unless they begin with zeros

    def _write(self, room: torch.Tensor, out: torch.Tensor, totals: torch.Tensor, sums: torch.Tensor) -> None:
        out.copy_(room)
        sums.copy_(totals)

    def run(self, rows: int = 3, factor: float = 2.0, width: int = 4) -> None:
        """Makes a call on new tensors, and checks its results."""
        a = torch.randn(rows, width, dtype=torch.float64)
        out, sums = torch.full_like(a, torch.nan), torch.full((rows,), torch.nan, dtype=torch.float64)
        self.recorded.run(lambda: self.function(a, out, sums, factor), (a, out, sums), factor)
        assert torch.equal(out, factor * a)
        assert torch.equal(sums, a.sum(dim=1))


def test_the_first_call_compiles_the_second_is_recorded_and_others_repeat_it() -> None:
    package = Package()
    for calls in (1, 2, 2, 2, 2):
        package.run()
        assert package.calls == calls
        assert package.function.compile_cache is package.compiled
    assert package.launched == [(3, 4)] * 5


def test_what_a_call_depends_on_is_recorded_anew() -> None:
    package = Package()
    package.run()
    for _ in range(2):
        for arguments in ({}, {"rows": 5}, {"factor": 3.0}, {"width": 8}):
            package.run(**arguments)
    assert package.calls == 1 + 4


@pytest.mark.parametrize(
    "before",
    [
        lambda a, out: out.zero_(),
        lambda a, out: a.contiguous(),
        lambda a, out: out.__setitem__(0, 1.0),
        lambda a, out: torch.ones(3),
        lambda a, out: a.unbind(),
    ],
    ids=["writes", "copies", "sets", "another new tensor", "several"],
)
def test_a_function_that_does_more_with_tensors_is_called_every_time(before: Any) -> None:
    package = Package()
    package.before = before
    for calls in range(1, 5):
        package.run()
        assert package.calls == calls


def test_a_launch_with_a_tensor_of_somewhere_else_is_not_repeated() -> None:
    package, other = Package(), torch.zeros(3)
    package.before = lambda a, out: package.function.compile_cache["extra"](other, (None, [other]))
    package.compiled["extra"] = lambda *arguments: None
    for calls in range(1, 5):
        package.run()
        assert package.calls == calls


def test_a_call_some_of_whose_tensors_reach_no_launch_is_not_repeated() -> None:
    """Kernels that are not in the caches of the package may have written them."""
    package = Package()
    for calls in range(1, 5):
        a, out, sums = torch.randn(3, 4).double(), torch.empty(3, 4).double(), torch.empty(3).double()
        unseen = torch.empty(3)
        package.recorded.run(lambda: package.function(a, out, sums, 2.0), (a, out, sums, unseen))  # noqa: B023
        assert package.calls == calls


def test_tensors_that_are_aligned_otherwise_are_recorded_by_themselves() -> None:
    package = Package()
    for first, calls in ((0, 1), (0, 2), (1, 3), (0, 3), (1, 3), (2, 3)):  # numbers of 8 bytes
        a = torch.randn(32, dtype=torch.float64)[first : first + 12].view(3, 4)
        out, sums = torch.empty(3, 4, dtype=torch.float64), torch.empty(3, dtype=torch.float64)
        package.recorded.run(lambda: package.function(a, out, sums, 2.0), (a, out, sums))  # noqa: B023 (called here)
        assert torch.equal(out, 2 * a)
        assert package.calls == calls


def test_a_failed_call_restores_the_package() -> None:
    package = Package()
    package.run()
    package.before = lambda a, out: a.view(-1, 5)
    with pytest.raises(RuntimeError, match="shape"):
        package.run()
    assert package.function.compile_cache is package.compiled
    package.before = lambda a, out: None
    for calls in (3, 3):
        package.run()
        assert package.calls == calls


def test_a_call_of_another_thread_meanwhile_is_not_mixed_in() -> None:
    package = Package()
    package.run()

    def call_elsewhere(a: torch.Tensor, out: torch.Tensor) -> None:
        package.before = lambda a, out: None
        other = threading.Thread(target=package.run, kwargs={"rows": 7})
        other.start()
        other.join()

    package.before = call_elsewhere
    a, out, sums = torch.randn(3, 4).double(), torch.empty(3, 4).double(), torch.empty(3).double()
    package.recorded.run(lambda: package.function(a, out, sums, 2.0), (a, out, sums), 2.0)
    assert package.calls == 3
    package.run()
    assert package.calls == 3
    assert package.launched == [(3, 4), (7, 4), (3, 4), (3, 4)]


def test_recorded_calls_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MOST_CALLS", 2)
    package = Package()
    for rows in (2, 2, 3, 4, 4, 2):
        package.run(rows=rows)
    assert package.calls == 1 + 1 + 1 + 1 + 1  # rows of 2 were forgotten
    assert len(package.recorded._known) == 2


def test_nothing_is_recorded_of_a_package_that_keeps_no_kernels() -> None:
    calls = list[int]()
    recorded = RecordedCalls(SimpleNamespace(function=len))  # type: ignore[arg-type]
    for _ in range(3):
        recorded.run(lambda: calls.append(1), (torch.zeros(1),))
    assert len(calls) == 3
