"""Launches of compiled kernels that cost the host little. FlashAttention 4's are repeated, and Triton's leave out its
Python code.

In every call a function of FlashAttention 4 checks its tensors and chooses among kernels, which takes the host 80 to
130 µs. Launching what it chose takes 20 µs. The choice depends on dtypes, sizes, strides and alignment, and layers of
a micro-batch differ in none of them. So the first of alike calls is recorded, and the others repeat it on their own
tensors:

    function(q, k, v, out, lse, ...)                 recorded
        checks, choices                              -
        sums = torch.zeros(...)                      new tensor 0: torch.zeros(...)
        compile_cache[key](q, sums, scale)           launch: a kernel, with tensor q, new tensor 0, and the number
        compile_cache[other](sums, out)              launch: a kernel, with new tensor 0, and tensor out

A call is not repeated if the function was seen to do anything else with a tensor, or if a tensor reached no launch.
Before a kernel is used, its repeated calls are compared with the reference, too (`kernels.reference`). Recording takes
about as long as four calls, so it pays for models with five or more alike layers.

At every launch, Triton's `kernel[grid](...)` finds out on which values the kernel is specialised, and reads settings
from the environment. That takes 20 to 75 µs, longer than these kernels run. Here most numbers of a kernel are
constants, and callers keep a `TritonLaunch` for each kind of tensors. Its first call compiles. Later calls launch the
result as Triton itself does in the end, but without the hooks of Triton's own profiler. Only for NVIDIA GPUs: on
others Triton also specialises on how far pointers reach. Undocumented names of Triton are used only here: `function`,
`packed_metadata` and `run` of a compiled kernel.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch.overrides import TorchFunctionMode

from distca_hf.torch_private import current_stream


# Functions of torch whose results are new tensors.
MAKES_TENSORS = (torch.empty, torch.zeros)
# Types that functions of torch return if they only read properties of a tensor.
PROPERTIES = (bool, int, float, tuple, torch.dtype, torch.device)
# Most calls that are remembered. Micro-batches of other sizes add more; beyond this number all are forgotten.
MOST_CALLS = 1024
# FlashAttention 4 copies tensors whose addresses are not multiples of this.
FLASH4_ALIGNED_BYTES = 16


class Launch(NamedTuple):
    """A launch of a compiled kernel."""

    kernel: Callable[..., object]
    arguments: Sequence[object]  # its arguments; None in place of tensors
    tensors: Sequence[tuple[int, int]]  # place among the arguments, and number, of each tensor


class Launches(NamedTuple):
    """What a call makes and launches, in order. Tensors are numbered: the call's, then new ones."""

    new_tensors: Sequence[Callable[[], torch.Tensor]]
    launches: Sequence[Launch]

    def repeat(self, tensors: Iterable[torch.Tensor]) -> None:
        """Launches the same kernels on the tensors of another call."""
        numbered = [*tensors, *[make() for make in self.new_tensors]]
        for kernel, arguments, places in self.launches:
            given = [*arguments]
            for place, number in places:
                given[place] = numbered[number]
            kernel(*given)


class RecordedCalls:
    """Records calls of a package's functions, and repeats them. They keep compiled kernels in their attribute
    `compile_cache`. Without such functions nothing is recorded."""

    # Shared by all instances: they replace attributes of the same functions.
    _recording = threading.Lock()

    def __init__(self, package: ModuleType) -> None:
        self._functions = [function for function in vars(package).values() if hasattr(function, "compile_cache")]
        self._known: dict[Hashable, Launches | None] = {}

    def run(self, call: Callable[[], object], tensors: Sequence[torch.Tensor], *facts: Hashable) -> None:
        """Runs a call, or repeats what an alike one launched.

        Args:
            call: writes its results into some of the tensors.
            tensors: all that it reads and writes.
            facts: everything else that it depends on.
        """
        if not self._functions:
            call()
            return
        layouts = [(x.shape, x.stride(), x.data_ptr() % FLASH4_ALIGNED_BYTES, x.dtype) for x in tensors]
        key = facts, tensors[0].device, *layouts
        launches = self._known.get(key)
        if launches is not None:
            launches.repeat(tensors)
        elif key in self._known or not self._recording.acquire(blocking=False):
            call()
        else:
            try:
                self._record(key, call, tensors)
            finally:
                self._recording.release()

    def _record(self, key: Hashable, call: Callable[[], object], tensors: Sequence[torch.Tensor]) -> None:
        """Runs a call, and remembers what it launched."""
        recorder = _Recorder(tensors)
        with _noted(self._functions, recorder), recorder:
            call()
        if recorder.compiles:  # compilers do more with tensors, so the next call is recorded
            return
        if len(self._known) >= MOST_CALLS:
            self._known.clear()
        self._known[key] = recorder.launches()


class _Recorder(TorchFunctionMode):
    """Notes what a call in this thread does with tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._numbers = {id(x): number for number, x in enumerate(tensors)}
        self._kept: list[object] = []  # or the next object might get the same id
        self._new_tensors: list[Callable[[], torch.Tensor]] = []
        self._launches: list[Launch] = []
        self._first_new = len(tensors)
        self._launched: set[int] = set()
        self._can_repeat = len(self._numbers) == len(tensors)  # or a tensor has two roles
        self._launches_now = False
        self.compiles = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._launches_now:
            return result
        if func in MAKES_TENSORS:
            self._numbers[id(result)] = self._first_new + len(self._new_tensors)
            self._new_tensors.append(partial(func, *args, **(kwargs or {})))
        elif func is torch.Tensor.detach and id(args[0]) in self._numbers:
            self._numbers[id(result)] = self._numbers[id(args[0])]
        elif not isinstance(result, PROPERTIES) or _holds_tensor(result):
            self._can_repeat = False
        self._kept.append(result)
        return result

    def launch(self, kernel: Callable[..., object], *arguments: object, **named: object) -> object:
        """Launches a compiled kernel, and notes it."""
        if threading.get_ident() != self._thread:
            return kernel(*arguments, **named)
        self._launches_now = True
        result = kernel(*arguments, **named)
        self._launches_now = False
        places = [
            (place, self._numbers[id(each)]) for place, each in enumerate(arguments) if id(each) in self._numbers
        ]
        others = [each for each in arguments if id(each) not in self._numbers]
        self._can_repeat &= not named and not any(map(_holds_tensor, others))
        known = {place for place, _ in places}
        template = [None if place in known else each for place, each in enumerate(arguments)]
        self._launches.append(Launch(kernel, template, places))
        self._launched.update(number for _, number in places)
        return result

    def launches(self) -> Launches | None:
        """Returns what was launched; None if it cannot be repeated."""
        reached = len(self._launched) == self._first_new + len(self._new_tensors)
        return Launches((*self._new_tensors,), (*self._launches,)) if self._can_repeat and reached else None


def _holds_tensor(value: object) -> bool:
    """Returns whether an argument is or may hold a tensor."""
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensor, value))
    return not (value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)))


class _NotedCache:
    """Compiled kernels of a function, whose launches are noted."""

    def __init__(self, kernels: Any, recorder: _Recorder) -> None:
        self._kernels, self._recorder = kernels, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def __contains__(self, key: object) -> bool:
        return key in self._kernels

    def __setitem__(self, key: object, kernel: object) -> None:
        self._kernels[key] = kernel
        self._recorder.compiles = True

    def __getitem__(self, key: object) -> Callable[..., object]:
        return partial(self._recorder.launch, self._kernels[key])


@contextmanager
def _noted(functions: Sequence[Any], recorder: _Recorder) -> Iterator[None]:
    """Notes what some functions launch within the `with` block."""
    caches = [function.compile_cache for function in functions]
    noted = [_NotedCache(kernels, recorder) for kernels in caches]
    for function, cache in zip(functions, noted, strict=True):
        function.compile_cache = cache
    try:
        yield
    finally:
        for function, kernels, cache in zip(functions, caches, noted, strict=True):
            if function.compile_cache is cache:  # others may have replaced it
                function.compile_cache = kernels


# Triton compiles either for addresses that are multiples of this, or for all addresses.
TRITON_ALIGNED_BYTES = 16
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


class TritonLaunch:
    """Launches a kernel whose arguments are tensors, then index tensors, then numbers, then constants.

    Args:
        kernel: Triton function, specialised neither on numbers nor on the alignment of index tensors, which are parts
            of others.
        constants: the last arguments.
        device: of all tensors, and the current one. This is not checked, nor that dtypes stay the same and numbers fit
            32 bits.
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
            if bits % TRITON_ALIGNED_BYTES:  # rare: views of single heads
                self._kernel[rows, blocks, 1](*tensors, *index, *others)
            elif self._run is None:
                compiled = self._kernel[rows, blocks, 1](*tensors, *index, *others)
                with suppress(AttributeError):  # another version of Triton: keeps to its own launch, which is slower
                    self._of_launch = compiled.function, compiled.packed_metadata, *_NO_HOOKS
                    self._run = compiled.run
            else:
                # Addresses: for tensors, Triton asks the driver whether each is on the device.
                self._run(rows, blocks, 1, current_stream(device), *self._of_launch, *addresses, *last)

        return launch
