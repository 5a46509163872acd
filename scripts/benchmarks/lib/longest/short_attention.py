"""Attention kernels with a sliding window, with the memory and exchanges of whole attention.

A step with a document of a million tokens is nearly all attention. Whether it fits a GPU is known in a fraction of the
time: buffers, gradients and what ranks send are as with whole attention. Times and losses mean nothing. Which keys a
query attends to is that of no model: a call on earlier keys is not causal, and its window lies elsewhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from distca_hf.config import KernelName
from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Kernel, Outputs, Room, Saved, Spans
from distca_hf.kernels.registry import Operands, choose_kernel
from distca_hf.runtime import alike_layers


class ShortKernel:
    """A kernel with a sliding window, whatever it is asked for."""

    def __init__(self, kernel: Kernel, window_tokens: int) -> None:
        self._kernel, self._window_tokens = kernel, window_tokens

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        """Computes as the kernel does, with the window."""
        return self._kernel.forward(inputs, spans, spec._replace(window_tokens=self._window_tokens), room)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        """Writes gradients as the kernel does, with the window."""
        self._kernel.backward(dout_TNV, saved, gradients, spans, spec._replace(window_tokens=self._window_tokens))


@contextmanager
def short_attention(window_tokens: int) -> Iterator[None]:
    """Lets the product choose kernels with a window of so many keys meanwhile; 0: nothing changes."""

    def choose(name: KernelName, operands: Operands, spec: AttentionSpec) -> Kernel:
        asked = spec._replace(window_tokens=window_tokens)
        return ShortKernel(choose_kernel(name, operands, asked), window_tokens)

    if not window_tokens:
        yield
        return
    with mock.patch.object(alike_layers, "choose_kernel", choose):
        yield
