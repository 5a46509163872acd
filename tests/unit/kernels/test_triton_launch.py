"""What a first launch compiled is launched again; whatever address is not aligned is left to Triton, but for those of
index tensors, which need not be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distca_hf.kernels import launches
from distca_hf.kernels.launches import TRITON_ALIGNED_BYTES, TritonLaunch


DEVICE = torch.device("cuda", 3)


class Compiled:
    """What Triton returns for a first launch, and launches in the end."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.run: Callable[..., None] = lambda *given: launches.append(given)


class Kernel:
    """A function of Triton's."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def compile_and_launch(*arguments: Any) -> Compiled:
            self.compiled.append((*grid, *arguments))
            return Compiled(self.launched)

        return compile_and_launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launches, "current_stream", lambda device: f"stream of device {device}")
    return Kernel()


def aligned(*shape: int) -> torch.Tensor:
    """Rows of zeros whose address is a multiple of TRITON_ALIGNED_BYTES, whatever the allocator does."""
    numbers = torch.zeros(torch.Size(shape).numel() + TRITON_ALIGNED_BYTES)
    first = next(at for at in range(TRITON_ALIGNED_BYTES) if numbers[at:].data_ptr() % TRITON_ALIGNED_BYTES == 0)
    return numbers[first : first + torch.Size(shape).numel()].view(shape)


def test_kernel_is_compiled_once(kernel: Kernel) -> None:
    copy, x, y = TritonLaunch(kernel, (8, 16), DEVICE), aligned(4, 8), aligned(2, 8)
    copy(3, 1, x, y)
    copy(5, 2, y, x)

    [compiled], [launched] = kernel.compiled, kernel.launched
    assert compiled[:3] == (3, 1, 1)
    assert compiled[3] is x
    assert compiled[5:] == (8, 16)
    assert launched[:9] == (5, 2, 1, "stream of device 3", "function", "metadata", None, None, None)
    assert launched[9:] == (y.data_ptr(), x.data_ptr(), 8, 16)


def test_index_and_numbers_stand_between_tensors_and_constants(kernel: Kernel) -> None:
    merge, x, index = TritonLaunch(kernel, (8,), DEVICE), aligned(4, 8), torch.arange(3)
    merge(1, 1, x, index=(index,), numbers=(5,))
    merge(1, 1, x, index=(index[1:],), numbers=(7,))

    [compiled], [launched] = kernel.compiled, kernel.launched
    assert compiled[4] is index
    assert compiled[5:] == (5, 8)
    assert launched[9:] == (x.data_ptr(), index[1:].data_ptr(), 7, 8)


def test_prepared_launches_keep_all_but_their_tensors(kernel: Kernel) -> None:
    x, y, index = aligned(4, 8), aligned(2, 8), torch.arange(3)
    merge = TritonLaunch(kernel, (8,), DEVICE).prepared(3, 2, (index,), (5,))
    for given in (x, y, y[:, 1:]):
        merge(given)

    assert len(kernel.compiled) == 2  # the first one, and another address
    [launched] = kernel.launched
    assert launched[:3] == (3, 2, 1)
    assert launched[9:] == (y.data_ptr(), index.data_ptr(), 5, 8)


def test_other_addresses_are_left_to_triton(kernel: Kernel) -> None:
    copy, x = TritonLaunch(kernel, (8,), DEVICE), aligned(4, 8)
    copy(1, 1, x, x)
    copy(1, 1, x, x[:, 1:])
    copy(1, 1, x, x)

    assert len(kernel.compiled) == 2
    assert len(kernel.launched) == 1


def test_first_address_may_be_any(kernel: Kernel) -> None:
    """What Triton compiles for it is good for such addresses alone, and is not kept."""
    copy, x = TritonLaunch(kernel, (), DEVICE), aligned(4, 8)
    for given in (x[:, 1:], x, x):
        copy(1, 1, given)

    assert len(kernel.compiled) == 2
    assert len(kernel.launched) == 1


def test_another_triton_launches_itself(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Compiled, "packed_metadata")
    copy, x = TritonLaunch(kernel, (8,), DEVICE), aligned(4, 8)
    for _ in range(3):
        copy(1, 1, x, x)

    assert (len(kernel.compiled), len(kernel.launched)) == (3, 0)
