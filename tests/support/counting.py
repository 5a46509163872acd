"""A kernel that counts what it is asked to compute, and checks what only kernels of GPUs read."""

import numpy as np
import torch

from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Kernel, Outputs, Room, Saved, Spans


class CountingKernel:
    """Counts attended pairs x KV heads of all calls, as the kernel gets to see them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.forward_pairs = self.backward_pairs = 0

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        self.forward_pairs += attended_pairs(spans, spec) * inputs.k_SGH.shape[1]
        return self.kernel.forward(inputs, spans, spec, room)

    def backward(
        self, dout: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        self.backward_pairs += attended_pairs(spans, spec) * saved.k_SGH.shape[1]
        self.kernel.backward(dout, saved, gradients, spans, spec)


def attended_pairs(spans: Spans, spec: AttentionSpec) -> int:
    """Attended pairs of a call, one KV head: query i of n sees all keys of its task, under a causal mask but the last
    n - 1 - i, and under a window none before the last of them and the number of the window."""
    for offsets, on_device, longest in (
        (spans.queries, spans.cu_seqlens_q, spans.max_seqlen_q),
        (spans.keys, spans.cu_seqlens_k, spans.max_seqlen_k),
    ):
        assert longest == np.diff(offsets).max(initial=0), "kernels of GPUs leave out rows beyond the longest task's"
        assert on_device.data_ptr() % 16 == 0, "FlashAttention 4 copies these offsets in each layer"
    pairs = 0
    for queries, keys in zip(np.diff(spans.queries).tolist(), np.diff(spans.keys).tolist(), strict=True):
        for place in range(keys - queries, keys):
            first = max(0, place + 1 - spec.window_tokens) if spec.window_tokens else 0
            pairs += (place + 1 if spec.causal else keys) - first
    return pairs
