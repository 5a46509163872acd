"""Compiled kernels are found by what they were compiled for; whatever address is not aligned is left to Triton."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distca_hf.kernels.launch import ALIGNMENT, Launcher


class Compiled:
    """What a first launch returns, and later ones launch."""

    def __init__(self, launches: list[str]) -> None:
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self._launches.append("compiled")


class Kernel:
    """A kernel of Triton's, which compiles with every launch of its own."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def launch(*arguments: Any) -> Compiled:
            self.launches.append("compiles")
            self.arguments.append((grid, *arguments))
            return Compiled(self.launches)

        return launch


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def aligned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of zeros whose address is a multiple of ALIGNMENT, whatever the allocator does."""
    numbers = torch.zeros(torch.Size(shape).numel() + ALIGNMENT, dtype=dtype)
    first = next(at for at in range(ALIGNMENT) if numbers[at:].data_ptr() % ALIGNMENT == 0)
    return numbers[first : first + torch.Size(shape).numel()].view(shape)


def test_one_kind_is_compiled_once(kernel: Kernel) -> None:
    launch, grid = Launcher(kernel), (3, 1, 1)
    x, y = aligned(4, 8), aligned(2, 8)
    launch(grid, (x, y), (8, 16))
    launch((5, 2, 1), (y, x), (8, 16))

    assert kernel.launches == ["compiles", "compiled"]
    assert kernel.arguments[0][0] == grid
    assert kernel.arguments[0][1] is x
    assert kernel.arguments[0][3:] == (8, 16)


def test_other_numbers_and_dtypes_are_compiled_apart(kernel: Kernel) -> None:
    launch, x = Launcher(kernel), aligned(4, 8)
    for tensors, constants in (
        ((x,), (8,)),
        ((x,), (16,)),
        ((aligned(4, 8, dtype=torch.float64),), (8,)),
        ((x,), (8,)),
    ):
        launch((1, 1, 1), tensors, constants)

    assert kernel.launches == ["compiles"] * 3 + ["compiled"]


def test_other_addresses_are_left_to_triton(kernel: Kernel) -> None:
    launch, x = Launcher(kernel), aligned(4, 8)
    launch((1, 1, 1), (x, x), (8,))
    launch((1, 1, 1), (x, x[:, 1:]), (8,))
    launch((1, 1, 1), (x, x), (8,))

    assert kernel.launches == ["compiles", "compiles", "compiled"]
