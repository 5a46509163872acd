"""Offload: attention outputs that checkpointing saves wait for backward in host memory.

    forward     attend ── output ──▶ next layers                 backward    fetch ──▶ recompute the rest of a layer
                            └──▶ host, beside the next layers                 └──▶ fetch the layer before, meanwhile

Modes for `torch.utils.checkpoint.checkpoint(context_fn=...)`, in place of torch's selective checkpointing, which keeps
outputs where they are.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

import distca_hf.runtime.local_attention
import distca_hf.runtime.op  # noqa: F401 (both register operators)
from distca_hf.torch_private import TorchDispatchMode


SAVED_OPERATORS = (
    torch.ops.distca.flash_attn.default,
    torch.ops.distca.flash_attn_local.default,
)


class OffloadedAttention:
    """The `context_fn` of all checkpointed modules of one model; called once for each region and forward pass."""

    def __init__(self) -> None:
        self._regions: list[weakref.ref[_Region]] = []
        self._stream: torch.cuda.Stream | None = None

    def __call__(self) -> tuple["_Storing", "_Restoring"]:
        region = _Region(self)
        self._regions = [known for known in self._regions if known() is not None]  # others have run backward
        self._regions.append(weakref.ref(region))
        return _Storing(region), _Restoring(region)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Returns the stream of copies."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def before(self, region: "_Region") -> "_Region | None":
        """Returns the region whose forward pass came before, the next one in backward; None if there is none."""
        known = [found for reference in self._regions if (found := reference()) is not None]
        at = known.index(region)
        return known[at - 1] if at else None


class _Region:
    """Outputs of the attention calls of one checkpointed region."""

    def __init__(self, owner: OffloadedAttention) -> None:
        self._owner = owner
        self._saved: list[list[tuple[torch.Tensor, torch.device]]] = []
        self._fetched: list[list[torch.Tensor]] | None = None
        self._taken = 0

    def save(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Starts copies of a call's outputs to the host."""
        self._saved.append([(self._to_host(x), x.device) for x in outputs])

    def begin(self) -> None:
        """Begins recomputation; with `retain_graph` perhaps not for the first time."""
        self._taken = 0
        self.fetch()

    def fetch(self) -> None:
        """Starts copies of all outputs to where they were; once."""
        if self._fetched is None:
            self._fetched = [[self._to_device(x, device) for x, device in outputs] for outputs in self._saved]

    def take(self) -> tuple[torch.Tensor, ...]:
        """Returns outputs of the next call, on the device. The region before is fetched meanwhile.

        Raises:
            RuntimeError: recomputation makes more calls than forward did.
        """
        if self._fetched is None or self._taken >= len(self._saved):
            raise RuntimeError(
                f"recomputation made more than the {len(self._saved)} attention calls of its forward pass; "
                "checkpointed_attention='recompute' attends again"
            )
        outputs, self._taken = self._fetched[self._taken], self._taken + 1
        for x in outputs:
            if x.is_cuda:
                torch.cuda.current_stream(x.device).wait_stream(self._owner.stream(x.device))
                x.record_stream(torch.cuda.current_stream(x.device))
        if self._taken == len(self._fetched):
            self._fetched = None
            before = self._owner.before(self)
            if before is not None:
                before.fetch()
        return tuple(outputs)

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return x.clone()
        stream = self._owner.stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(stream)
        return host

    def _to_device(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type != "cuda":
            return host.clone()
        with torch.cuda.stream(self._owner.stream(device)):
            return host.to(device, non_blocking=True)


class _Mode(TorchDispatchMode):
    """Looks at attention operators; everything else runs as it is."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, region: _Region) -> None:
        super().__init__()
        self._region = region


class _Storing(_Mode):
    """Forward: outputs of attention are copied to the host."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        outputs = func(*args, **(kwargs or {}))
        if func in SAVED_OPERATORS:
            self._region.save(outputs)
        return outputs


class _Restoring(_Mode):
    """Recomputation: attention returns its earlier outputs."""

    def __enter__(self) -> Self:
        self._region.begin()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in SAVED_OPERATORS:
            return self._region.take()
        return func(*args, **(kwargs or {}))
