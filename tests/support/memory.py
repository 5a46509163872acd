"""Bytes of tensors that live at the same time, on a CPU, where nothing else counts them."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from distca_hf.comm.transport import Exchange, Transport


class LiveBytes(TorchDispatchMode):
    """Counts what operators of this thread allocate, until it is freed.

    Attributes:
        most: bytes at the worst moment; what was there before is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            storage = x.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._bytes:
                self._bytes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._bytes.pop, storage._cdata, None)
        self.most = max(self.most, sum(self._bytes.values()))
        return result


class QuietTransport:
    """A transport whose own buffers are not counted: over a network there are none."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.world_size, self.traffic = transport.rank, transport.world_size, transport.traffic
        self.grid, self.gather = transport.grid, transport.gather

    def exchange(self, *arguments: Any) -> "QuietExchange":
        return QuietExchange(self.transport.exchange(*arguments))


class QuietExchange:
    """An exchange of it."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def wait(self) -> torch.Tensor:
        with _disable_current_modes():
            return self.exchange.wait()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
