"""Calls that cost the host little: views of rows, launches of Triton kernels, and functions that are prepared once for
layers that are alike. Each layer makes many of them.

**Views** cost microseconds, so one is made only where something is left out. All are made by `as_strided`. Kernel
functions fill the processor's caches. Behind one, a function of torch that was just used takes half the time of
another one.

**Launches.** `kernel[grid](...)` finds out with every launch on which values the kernel is specialised, and looks for
settings in the environment. That takes 20 to 75 µs, more than these kernels run for. Here most numbers of a kernel are
constants, and callers keep a `Launch` for each kind of tensors. Its first call compiles. Later ones launch the result
as Triton itself does in the end, but without the hooks of Triton's own profiler. For NVIDIA GPUs: on others Triton
also specialises on how far pointers reach.

Names of Triton that it does not document are used here alone: `function`, `packed_metadata` and `run` of a compiled
kernel.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from distca_hf.torch_private import current_stream


# Bytes. Triton compiles for addresses that are multiples of it, or for all addresses.
ALIGNMENT = 16
# Metadata for Triton's hooks, and the hooks before and after a launch.
_NO_HOOKS = None, None, None


# Functions that `kernels.rows` prepares for tensors of one device, dtype, shape and strides.
# Of sources and targets:
CopyRows = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
# Of the target, own and returned rows:
AddRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
# Of outputs and log-sum-exps, and of those over other keys:
MergeRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class CompiledKernel(Protocol):
    """A kernel of Triton's, compiled for one specialisation."""

    function: object
    packed_metadata: object
    run: Callable[..., object]


class JitFunction(Protocol):
    """A kernel of Triton's, which compiles when it is launched on a grid."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., CompiledKernel]: ...


class Launch:
    """Launches a kernel whose arguments are tensors, then index tensors, then numbers, then constants.

    Args:
        kernel: function of Triton's, specialised neither on numbers nor on where index tensors begin. These are parts
            of others, and begin anywhere.
        constants: the last arguments.
        device: of all tensors, and the current one; not checked. Dtypes are always the same, too, and numbers fit 32
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
                # Addresses, because Triton asks the driver of each tensor whether it is on the device.
                self._run(rows, blocks, 1, current_stream(device), *self._of_launch, *addresses, *last)

        return launch

    def _note(self, compiled: CompiledKernel) -> None:
        """Notes how the kernel is launched once it is compiled."""
        with suppress(AttributeError):  # another Triton: its own launch, slower, each time
            self._of_launch = compiled.function, compiled.packed_metadata, *_NO_HOOKS
            self._run = compiled.run


def some_rows(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns `x[rows]`, or `x` itself if these are all rows."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else part(x, rows)


def part(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns `x[rows]`, of rows that there are."""
    strides = x.stride()
    first = x.storage_offset() + rows.start * strides[0]
    return x.as_strided((rows.stop - rows.start, *x.shape[1:]), strides, first)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Returns `x.t()` of `[rows, columns]`."""
    (rows, columns), (of_row, of_column) = x.shape, x.stride()
    return x.as_strided((columns, rows), (of_column, of_row))


def view_of(part: torch.Tensor, whole: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that gets tensors like `whole`, in shape and strides, and returns the part of each that
    `part` is of `whole`."""
    if part is whole:
        return lambda x: x
    shape, strides, first = part.shape, part.stride(), part.storage_offset() - whole.storage_offset()
    return lambda x: x.as_strided(shape, strides, x.storage_offset() + first)


# Shape of one row of a tensor, strides of the tensor, dtype: alike from layer to layer and from batch to batch.
KindOfRows = tuple[torch.Size, tuple[int, ...], torch.dtype]


def kinds_of_rows(tensors: Sequence[torch.Tensor]) -> tuple[KindOfRows, ...]:
    """Returns the kind of each tensor's rows."""
    return tuple([(x.shape[1:], x.stride(), x.dtype) for x in tensors])


def widths_of_parts(sources: Sequence[KindOfRows], targets: Sequence[KindOfRows]) -> list[int]:
    """Returns the elements of a row of each tensor that is copied.

    Raises:
        ValueError: rows of sources and targets are not the same.
    """
    rows, places = ([shape for shape, *_ in kinds] for kinds in (sources, targets))
    widths, room = ([shape.numel() for shape in shapes] for shapes in (rows, places))
    same = rows == places if len(rows) == len(places) else sum(widths) == sum(room)
    if not same or len({dtype for *_, dtype in (*sources, *targets)}) > 1:
        words = (" and ".join(f"{tuple(row)} of {dtype}" for row, _, dtype in kinds) for kinds in (sources, targets))
        raise ValueError(f"cannot copy rows {' to '.join(words)}")
    return max(widths, room, key=len)
