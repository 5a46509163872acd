"""One length of the search for the longest document: steps on a document over all ranks, in this process group."""

import argparse
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from distca_hf.config import KernelName
from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Kernel, Outputs, Room, Saved, Spans
from distca_hf.kernels.registry import Operands, choose_kernel
from distca_hf.runtime import alike_layers
from lib.documents import random_tokens
from lib.header import facts_of
from lib.longest.launch import OUT_OF_MEMORY, RESULT, is_out_of_memory
from lib.model import read_config
from lib.place import Place
from lib.report import load_of, rates_of
from lib.whole_model import TrainingRunner, build_planned
from lib.wires import WiredPlugin


def attempt(options: argparse.Namespace, device: torch.device) -> None:
    """Trains on one document; writes figures, or that this rank is out of memory, to the folder of the attempt. A
    collective call."""
    try:
        figures = _train(options, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        first_line = f"rank {dist.get_rank()}: {type(error).__name__}: {error}".partition("\n")[0]
        (options.attempt / OUT_OF_MEMORY.format(rank=dist.get_rank())).write_text(first_line)
        os._exit(1)  # other ranks wait for this one: nothing can be torn down in order
    if dist.get_rank() == 0:
        (options.attempt / RESULT).write_text(json.dumps(figures))


def _train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    length = num_ranks * options.tokens_per_rank
    options.lengths, options.documents = [length], str(length)
    config = read_config(options, length)
    _limit_memory(options, config, device)
    tiles = {"mlp_tokens": options.mlp_tokens, "attention_kv_heads": options.attention_kv_heads}
    place = Place.build(config, options, device, plugins=partial(WiredPlugin, **tiles))
    place.enable(options.tokens_per_rank, length, options)
    documents = random_tokens([length], config.get_text_config().vocab_size)
    planned = build_planned("placed", place, documents, options.steps)
    runner = TrainingRunner(place)
    with short_attention(options.attended_tokens):
        measured = runner.run([planned.mode], warmup=options.steps - 1, rounds=1)["placed"]
    if not math.isfinite(measured.loss):
        raise SystemExit(f"the loss is {measured.loss}")
    load = load_of(options, place.shape, num_ranks, device)
    return {
        **rates_of(measured, load),
        "tokens_per_rank": options.tokens_per_rank,
        "header": "; ".join([*facts_of(options, config, load.tokens, device), *_settings(options)]),
    }


def _settings(options: argparse.Namespace) -> list[str]:
    """Parts of the header that `facts_of` does not have."""
    return [
        f"head {options.head}, fused AdamW" + " on the host" * options.offload,
        f"MLPs on {options.mlp_tokens or 'all'} tokens at a time",
        f"attention on {options.attention_kv_heads or 'all'} KV heads at a time",
    ] + ([f"at most {options.gpu_gib} GiB of a GPU"] if options.gpu_gib else [])


def _limit_memory(options: argparse.Namespace, config: PreTrainedConfig, device: torch.device) -> None:
    """Makes the GPU as small as was asked; a CPU fails as if its layers' inputs did not fit."""
    if options.gpu_gib is None:
        return
    limit = options.gpu_gib * 2**30
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info(device)[1], device)
        return
    needed = options.tokens_per_rank * config.num_hidden_layers * config.hidden_size * options.dtype.itemsize
    if needed > limit:
        raise torch.OutOfMemoryError(f"inputs of layers need {needed} bytes, {limit:.0f} are allowed")


class ShortKernel:
    """A kernel with a sliding window, whatever it is asked for."""

    def __init__(self, kernel: Kernel, window_tokens: int) -> None:
        self._kernel, self._window_tokens = kernel, window_tokens

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        return self._kernel.forward(inputs, spans, spec._replace(window_tokens=self._window_tokens), room)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
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
