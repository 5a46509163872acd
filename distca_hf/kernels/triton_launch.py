"""Launches of Triton kernels that cost the host little.

At every launch, `kernel[grid](...)` finds out on which values the kernel is specialised, and reads settings from the
environment. That takes 20 to 75 µs, longer than these kernels run. Here most numbers of a kernel are constants, and
callers keep a `Launch` for each kind of tensors. Its first call compiles. Later calls launch the result as Triton
itself does in the end, but without the hooks of Triton's own profiler. Only for NVIDIA GPUs: on others Triton also
specialises on how far pointers reach.

Undocumented names of Triton are used only here: `function`, `packed_metadata` and `run` of a compiled kernel.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from distca_hf.torch_private import current_stream


# Bytes. Triton compiles either for addresses that are multiples of it, or for all addresses.
ALIGNMENT = 16
# Metadata for Triton's hooks, and the hooks before and after a launch.
_NO_HOOKS = None, None, None


class CompiledKernel(Protocol):
    """A Triton kernel, compiled for one specialisation."""

    function: object
    packed_metadata: object
    run: Callable[..., object]


class JitFunction(Protocol):
    """A Triton kernel that compiles when it is launched on a grid."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., CompiledKernel]: ...


class Launch:
    """Launches a kernel whose arguments are tensors, then index tensors, then numbers, then constants.

    Args:
        kernel: Triton function, specialised neither on numbers nor on the alignment of index tensors, which are parts
            of others.
        constants: the last arguments.
        device: of all tensors, and the current one; not checked. Dtypes must also stay the same, and numbers fit 32
            bits.
    """

    def __init__(self, kernel: JitFunction, constants: tuple[int, ...], device: torch.device) -> None:
        self._kernel, self._constants, self._device = kernel, constants, device.index
        self._run: Callable[..., object] | None = None
        self._of_launch: tuple[object, ...] = ()

    def __call__(
        self,
        rows: int,
        blocks: int,
        *tensors: torch.Tensor,
        index: Sequence[torch.Tensor] = (),
        numbers: tuple[int, ...] = (),
    ) -> None:
        """Launches `[rows, blocks]` programs on the current stream; the first launch compiles."""
        self.prepared(rows, blocks, index, numbers)(*tensors)

    def prepared(
        self, rows: int, blocks: int, index: Sequence[torch.Tensor] = (), numbers: tuple[int, ...] = ()
    ) -> Callable[..., None]:
        """Returns a function of tensors that launches with these other arguments."""
        device, others = self._device, (*numbers, *self._constants)
        last = *[x.data_ptr() for x in index], *others

        def launch(*tensors: torch.Tensor) -> None:
            addresses, bits = [], 0
            for x in tensors:
                address = x.data_ptr()
                addresses.append(address)
                bits |= address
            if bits % ALIGNMENT:  # rare: views of single heads
                self._kernel[rows, blocks, 1](*tensors, *index, *others)
            elif self._run is None:
                self._note(self._kernel[rows, blocks, 1](*tensors, *index, *others))
            else:
                # Addresses: for tensors, Triton asks the driver whether each is on the device.
                self._run(rows, blocks, 1, current_stream(device), *self._of_launch, *addresses, *last)

        return launch

    def _note(self, compiled: CompiledKernel) -> None:
        """Notes how to launch the compiled kernel."""
        with suppress(AttributeError):  # another version of Triton: keeps to its own launch, which is slower
            self._of_launch = compiled.function, compiled.packed_metadata, *_NO_HOOKS
            self._run = compiled.run
