"""Exchanges and copies that end long after the kernels around them: a step has the same bits as when they end at once.

A kernel that does not wait for what it reads, or memory that is used again too early, shows only if the other stream
is late. Memory that nothing has written yet holds NaN.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils import deterministic

import distca_hf
from distca_hf.comm import torch_transport
from distca_hf.integrations import offload
from distca_hf.integrations.models.forward_watch import watch_of
from support.given_batches import gradients_of, padded, with_images
from support.models import tiny_model
from support.multimodal import multimodal_model
from support.ranks import run_ranks


pytestmark = pytest.mark.multigpu

# Widths that FlashAttention 4 takes; torch's kernel takes those of the other models.
SIZES: dict[str, dict[str, Any]] = {"llama": {"hidden_size": 512}, "gemma3": {"head_dim": 64}}
CHUNKS, HEADS = {"exchange_chunks": 3, "kv_residency": "refetch"}, {"attention_kv_heads": 1, "mlp_tokens": 256}
OFFLOAD, RECOMPUTE = {"checkpointed_attention": "offload"}, {"checkpointed_attention": "recompute"}
# By name: model, whether its layers are checkpointed, whether documents begin alike, settings.
CASES: dict[str, tuple[str, bool, bool, dict[str, Any]]] = {
    "rows": ("llama", False, False, {}),
    "chunks": ("llama", True, False, CHUNKS | RECOMPUTE),
    "tiles of heads": ("llama", True, False, HEADS),
    "offloaded": ("llama", True, False, OFFLOAD),
    "shared prefixes": ("llama", True, True, {"shared_prefix_tokens": 64}),
    "windows": ("gemma3", True, False, {}),
    "states": ("nemotron_h", False, False, {}),
    "images": ("qwen2_5_vl", False, False, {}),
}
REPEATS, STEPS = 3, 2


class Lateness:
    """Delays exchanges and copies to the host and back."""

    def __init__(self) -> None:
        self.is_on, self.delayed = False, 0
        self._random = random.Random(dist.get_rank())
        self._all_to_all_of, self._copying_on = torch_transport.all_to_all_of, offload._copying_on

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def sleep(self) -> None:
        """Lets the current stream wait for up to several milliseconds."""
        self.delayed += 1
        torch.cuda._sleep(self._random.choice((1000, 10**6, 10**7)))

    def all_to_all_of(self, group: Any, device: torch.device) -> Callable[..., dist.Work]:
        start = self._all_to_all_of(group, device)
        return partial(self._exchange, start) if device.type == "cuda" else start

    def _exchange(self, start: Callable[..., dist.Work], *arguments: Any) -> dist.Work:
        if not self.is_on:
            return start(*arguments)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.sleep()
            return start(*arguments)

    @contextmanager
    def copying_on(self, copies: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
        with self._copying_on(copies, device):
            if self.is_on and copies is not None:
                self.sleep()
            yield


def _batch(kind: str, begins_alike: bool, step: int) -> dict[str, Any]:
    """Returns long documents on one rank and a short one on the others."""
    lengths = [1900, 700, 40] if dist.get_rank() == step % 2 else [90]
    seed = 10 * step + dist.get_rank()
    if kind == "qwen2_5_vl":
        batch = with_images(kind, [length // 8 + 10 for length in lengths], seed, len(lengths) > 1, "right")
    else:
        batch = padded(lengths, seed)
    if begins_alike:
        batch["input_ids"][:2, :300] = batch["input_ids"][0, :300]
        batch["labels"][:2, :301] = -100
    return {name: x.to("cuda", torch.bfloat16 if x.is_floating_point() else x.dtype) for name, x in batch.items()}


def _equal_repeats(case: str) -> tuple[int, int, bool]:
    """Repeats with the gradients of the first one, itself included, only the first one without delays; how many
    exchanges and copies were delayed; whether rows moved."""
    kind, checkpoints, begins_alike, settings = CASES[case]
    late = Lateness()
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    first: dict[str, torch.Tensor] | None = None
    equal, moved = 0, True
    with (
        patch.object(torch_transport, "all_to_all_of", late.all_to_all_of),
        patch.object(offload, "_copying_on", late.copying_on),
    ):
        for repeat in range(REPEATS):
            made = multimodal_model(kind) if kind == "qwen2_5_vl" else tiny_model(kind, **SIZES.get(kind, {}))
            model = made.to("cuda", torch.bfloat16).train()
            plugin = distca_hf.DistCAPlugin(deterministic=True, **settings)
            if checkpoints:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            distca_hf.enable(model, plugin)
            late.is_on = repeat > 0
            for step in range(STEPS):
                if late.is_on:
                    late.sleep()
                model(**_batch(kind, begins_alike, step), use_cache=False).loss.backward()
                moved = moved and watch_of(model).planner.latest_moves.crosses
            gradients = {name: x.cpu() for name, x in gradients_of(model).items()}
            first = gradients if first is None else first
            equal += all(torch.equal(x, first[name]) for name, x in gradients.items())
            plugin.close()
    return equal, late.delayed, moved


@pytest.mark.parametrize("case", CASES)
def test_gradients_have_the_same_bits(case: str, tmp_path: Path) -> None:
    for equal, delayed, moved in run_ranks(2, _equal_repeats, tmp_path, case, backend="nccl"):
        assert equal == REPEATS
        assert delayed > 10
        assert moved
