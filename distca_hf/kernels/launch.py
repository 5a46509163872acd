"""Launches of Triton kernels that cost the host little.

`kernel[grid](...)` finds out with every launch what the kernel is to be specialised on, and looks for settings in the
environment: 20 to 75 µs, more than these kernels run for. Here all numbers of a kernel are constants, and what was
compiled is found by them, and launched as Triton's tutorial of persistent kernels does. For NVIDIA GPUs: on others
Triton also specialises on how far pointers reach.
"""

from typing import Any

import torch


# Bytes; Triton compiles for addresses that are multiples of it, or for any.
ALIGNMENT = 16


class Launcher:
    """Launches a kernel whose arguments are tensors, then constants."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], constants: tuple[int, ...]
    ) -> None:
        """Launches on the current stream; the first launch of a kind compiles."""
        addresses, kind = 0, [constants, tensors[0].device]
        for x in tensors:
            addresses |= x.data_ptr()
            kind.append(x.dtype)
        if addresses % ALIGNMENT:  # rare: views of single heads
            self._kernel[grid](*tensors, *constants)
            return
        compiled = self._compiled.get(key := tuple(kind))
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*tensors, *constants)
        else:
            compiled[grid](*tensors, *constants)
