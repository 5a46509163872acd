"""Launches of Triton kernels that cost the host little.

`kernel[grid](...)` finds out with every launch what the kernel is to be specialised on, and looks for settings in the
environment: 20 to 75 µs, more than these kernels run for. Here all numbers of a kernel are constants; whoever launches
keeps a `Launch` for each kind of tensors, and what its first call compiled is launched as Triton itself does it in the
end, but for the hooks of Triton's own profiler. For NVIDIA GPUs: on others Triton also specialises on how far pointers
reach.
"""

from typing import Any

import torch


# Bytes; Triton compiles for addresses that are multiples of it, or for any.
ALIGNMENT = 16


class Launch:
    """Launches a kernel whose arguments are tensors, then constants.

    Args:
        kernel: function of Triton's.
        constants: what follows the tensors.
        device: of all tensors, and the current one; their dtypes are always the same, too.
    """

    def __init__(self, kernel: Any, constants: tuple[int, ...], device: torch.device) -> None:
        self._kernel, self._constants, self._device = kernel, constants, device.index
        self._compiled: Any = None

    def __call__(self, rows: int, blocks: int, *tensors: torch.Tensor) -> None:
        """Launches `[rows, blocks]` programs on the current stream; the first launch compiles."""
        addresses = 0
        for x in tensors:
            addresses |= x.data_ptr()
        if addresses % ALIGNMENT:  # rare: views of single heads
            self._kernel[rows, blocks, 1](*tensors, *self._constants)
            return
        compiled = self._compiled
        if compiled is None:
            self._compiled = self._kernel[rows, blocks, 1](*tensors, *self._constants)
            return
        stream, no_hooks = current_stream(self._device), (None, None, None)
        grid = rows, blocks, 1
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, *no_hooks, *tensors, *self._constants)


def current_stream(device: int) -> int:
    """Handle of the stream that torch launches on now."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream
