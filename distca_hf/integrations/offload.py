"""Keeps what checkpointed layers save for backward in host memory.

A layer keeps its input and the outputs of attention (`integrations.checkpointing`). Copies run on one more stream:

    forward     layer ── input, attention outputs ──▶ host, while this layer runs
    backward    layer ◀── input, attention outputs ── host, while the layer after it runs backward

Tensors are allocated on the stream of kernels, which waits for a copy before the memory is used again. So the host may
run ahead, and the peak is still one layer's more. Pinned memory is torch's, which keeps it for the next step.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from distca_hf.runtime.regions import REMEDY, check_call, runs_of
from distca_hf.torch_private import hidden_from_dynamo


# Torch rounds pinned memory up to a power of two. Pieces of this size waste hardly any.
PIECE_BYTES = 2**26


class _Copying:
    """Holds a tensor while another stream copies from or to it: its own stream waits before the memory is freed."""

    def __init__(self, x: torch.Tensor, copies: torch.cuda.Stream | None) -> None:
        self._x, self._version = x, x._version
        self._stream = torch.cuda.current_stream(x.device) if copies else None
        self._done = copies.record_event() if copies else None

    def arrived(self) -> torch.Tensor:
        """Returns the tensor for kernels of the current stream."""
        if self._done is not None:
            torch.cuda.current_stream(self._x.device).wait_event(self._done)
        return self._x

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the tensor was changed in place: copies may have read it before or after that."""
        check_unchanged(self._x, self._version)

    def __del__(self) -> None:
        if self._stream is not None and self._done is not None and not sys.is_finalizing():
            self._stream.wait_event(self._done)


def check_unchanged(x: torch.Tensor, version: int) -> None:
    """Raises RuntimeError if a tensor was changed in place since it had this version."""
    if x._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)}, input or attention output of a checkpointed layer, was changed in "
            "place after it was kept for backward; change a copy of it"
        )


class OnHost:
    """A tensor that waits in host memory, pinned if it comes from a GPU.

    Args:
        x: contiguous.
        copies: stream of copies; None on the CPU. `x` must stay unchanged until the copy is done.
    """

    def __init__(self, x: torch.Tensor, copies: torch.cuda.Stream | None) -> None:
        self._like, self._shape, self._copies = x.new_empty(0), x.shape, copies
        self.coming: _Copying | None = None  # the tensor on its way back to the device
        with _copying_on(copies, x.device):
            self._pieces = [_to_host(piece) for piece in _pieces(x)]

    def fetch(self) -> None:
        """Starts to copy the tensor back to its device, unless it is on its way."""
        if self.coming is not None:
            return
        x = self._like.new_empty(self._shape)
        with _copying_on(self._copies, x.device):
            for piece, host in zip(_pieces(x), self._pieces, strict=True):
                piece.copy_(host, non_blocking=True)
        self.coming = _Copying(x, self._copies)

    def take(self) -> torch.Tensor:
        """Returns a tensor with the same numbers, on the original's device."""
        self.fetch()
        assert self.coming is not None
        x, self.coming = self.coming.arrived(), None
        return x


@contextmanager
def _copying_on(copies: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Runs copies on their stream, after all work queued so far on the current stream."""
    if copies is None:
        yield
        return
    copies.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(copies):
        yield


def _pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.view(-1).split(PIECE_BYTES // x.element_size())


def _to_host(piece: torch.Tensor) -> torch.Tensor:
    host = torch.empty(piece.shape, dtype=piece.dtype, device="cpu", pin_memory=piece.is_cuda)
    return host.copy_(piece, non_blocking=piece.is_cuda)


class OffloadedLayers:
    """Runs the checkpointed modules of one model; what each keeps waits on the host."""

    def __init__(self) -> None:
        self._regions: list[weakref.ref[HostRegion]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._leaving: list[_Copying] = []

    def __reduce__(self) -> tuple[type["OffloadedLayers"], tuple[()]]:
        """Copies and pickles as a new object: regions belong to passes of this model."""
        return OffloadedLayers, ()

    def run(self, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Runs a checkpointed module in forward. `function` is like `torch.utils.checkpoint.checkpoint`, not
        reentrant."""
        region = self._begin()
        # The module's inputs are all that it saves outside its checkpoint.
        with saved_tensors_hooks(region.save_input, region.take_input):
            return function(*args, **kwargs, context_fn=lambda: runs_of(region))

    @hidden_from_dynamo  # torch 2.11 compiles weak references to what they refer to
    def _begin(self) -> "HostRegion":
        """Returns the region of the next module in forward."""
        self.settle()
        region = HostRegion(self)
        self._regions = [known for known in self._regions if known() is not None]  # others have run backward
        self._regions.append(weakref.ref(region))
        return region

    def send(self, x: torch.Tensor) -> OnHost:
        """Starts to copy a tensor to the host. It stays on the device until the next module runs."""
        x = x.detach().contiguous()
        copies = self._stream(x.device) if x.is_cuda else None
        host = OnHost(x, copies)
        if copies is not None:
            self._leaving.append(_Copying(x, copies))
        return host

    def settle(self) -> None:
        """Lets go of tensors whose copies to the host have started; kernels to come wait for these copies. Raises
        RuntimeError if one of them was changed in place."""
        leaving, self._leaving = self._leaving, []
        for copying in leaving:
            copying.check_unchanged()

    def before(self, region: "HostRegion") -> "HostRegion | None":
        """Returns the region before this one in forward, which is next in backward; None if there is none."""
        known = [found for reference in self._regions if (found := reference()) is not None]
        at = known.index(region)
        return known[at - 1] if at else None

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class HostRegion:
    """Keeps inputs of a checkpointed module, and outputs of its attention calls, in host memory."""

    def __init__(self, layers: OffloadedLayers) -> None:
        self._layers = layers
        self._inputs: list[OnHost] = []
        self._calls: list[tuple[OnHost, ...]] = []
        self._taken = 0

    def save_input(self, x: torch.Tensor) -> tuple[torch.Tensor, int] | OnHost:
        """Starts to copy an input to the host. Positions and the like stay: all layers have the same tensors. So does
        the empty tensor that checkpointing of older versions of torch adds."""
        if not (x.requires_grad and x.numel()):
            return x, x._version
        self._inputs.append(self._layers.send(x))
        return self._inputs[-1]

    def take_input(self, saved: tuple[torch.Tensor, int] | OnHost) -> torch.Tensor:
        if isinstance(saved, tuple):
            x, version = saved
            check_unchanged(x, version)
            return x
        if saved.coming is None:
            self.fetch()
        return saved.take()

    def save(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Starts to copy a call's outputs to the host."""
        self._calls.append(tuple(self._layers.send(x) for x in outputs))

    def fetch(self) -> None:
        """Starts to copy everything back to its device."""
        self._layers.settle()
        for host in (*self._inputs, *(host for call in self._calls for host in call)):
            host.fetch()

    def begin(self, recomputes: bool) -> None:
        self._taken = 0
        if recomputes:
            self._fetch_before_if_all_taken()

    def take(self) -> tuple[torch.Tensor, ...]:
        """Returns outputs of the next call, on the device. After the last call, starts to fetch the region before."""
        check_call(self._taken, len(self._calls), REMEDY)
        outputs, self._taken = self._calls[self._taken], self._taken + 1
        taken = tuple(host.take() for host in outputs)
        self._fetch_before_if_all_taken()
        return taken

    def _fetch_before_if_all_taken(self) -> None:
        if self._taken == len(self._calls):
            before = self._layers.before(self)
            if before is not None:
                before.fetch()
