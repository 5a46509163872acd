"""Fit: whether a training fits its GPUs and the memory of their nodes, and what would make it fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, get_args

import numpy as np

from distca_hf.analysis.decoder_size import DecoderSize, StateSize
from distca_hf.analysis.memory import USABLE_SHARE, Memory, estimate_memory, shardings
from distca_hf.analysis.request import MAX_MICRO_STEPS, MAX_RANKS, check_choices, check_ranges, check_tiles_and_host
from distca_hf.analysis.training_setup import GIB, Checkpointing, Sharding, TrainingSetup
from distca_hf.arrays import ceil_div
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.flops import Gpu
from distca_hf.layout import MAX_DOCUMENT_TOKENS
from distca_hf.planning.transfers import received_bytes


# Tokens of a tile to suggest; tiles of this size were measured (docs/long-context.md).
SUGGESTED_MLP_TOKENS = 16_384
# KV heads of a tile to suggest: with fewer, most of the memory is in tensors of all heads.
SUGGESTED_KV_HEADS = 2
# Most ranks to suggest, as a multiple of the given ones; and fewest tokens of a rank.
MOST_TIMES_RANKS, FEWEST_TOKENS = 64, 1024
# Step and maximum of the numbers of tokens per rank to try.
TOKENS_STEP, MOST_TOKENS = 1024, 1 << 20


@dataclass(frozen=True)
class Room:
    """Memory that there is. `gpu_bytes`: bytes that torch may allocate on a GPU. `host_gib`: GiB of a node that may be
    pinned; None if that is not known, and everything fits."""

    gpu_bytes: float
    host_gib: float | None = None
    ranks_per_node: int = 8

    def node_bytes(self, memory: Memory, num_ranks: int) -> int:
        return memory.host * min(num_ranks, self.ranks_per_node)

    def fits(self, memory: Memory, num_ranks: int) -> bool:
        fits_host = self.host_gib is None or self.node_bytes(memory, num_ranks) <= self.host_gib * GIB
        return memory.total <= self.gpu_bytes and fits_host

    def on_host(self, memory: Memory, num_ranks: int) -> str:
        """Returns what a node's host needs, and whether that does not fit, as the end of a sentence; empty if that is
        nothing."""
        if not memory.host:
            return ""
        node_bytes = self.node_bytes(memory, num_ranks)
        fits = self.host_gib is None or node_bytes <= self.host_gib * GIB
        needs = f"; the host of a node needs {node_bytes / GIB:,.1f} GiB"
        return needs if fits else f"{needs}, which does not fit: {self.host_gib:,.1f} may be pinned"

    def lacking(self, memory: Memory, num_ranks: int) -> str:
        """Returns what does not fit, with both numbers, as text; empty if everything fits."""
        reasons = []
        if memory.total > self.gpu_bytes:
            reasons.append(f"a GPU needs {memory.total / GIB:,.1f} GiB, and {self.gpu_bytes / GIB:,.1f} are usable")
        node_bytes = self.node_bytes(memory, num_ranks)
        if self.host_gib is not None and node_bytes > self.host_gib * GIB:
            reasons.append(
                f"the host of a node needs {node_bytes / GIB:,.1f} GiB, and {self.host_gib:,.1f} may be pinned "
                "(--host-gib)"
            )
        return "; ".join(reasons)


@dataclass(frozen=True)
class RankLoad:
    """What one rank holds in a micro-step; see `estimate_memory`."""

    size: DecoderSize
    rank_tokens: int
    received_bytes: int = 0
    head_tokens: int = 0
    state_bytes: int = 0

    def memory(self, setup: TrainingSetup) -> Memory:
        return estimate_memory(
            self.size, setup, self.rank_tokens, self.received_bytes, self.head_tokens, self.state_bytes
        )

    def by_sharding(self, setup: TrainingSetup, whole_documents: bool) -> dict[Sharding, Memory]:
        """Returns the memory for each way to shard weights that can train the model."""
        ways = shardings(setup.micro_steps, whole_documents, setup.state_on_host)
        return {way: self.memory(replace(setup, sharding=way)) for way in ways}

    def with_tokens(self, rank_tokens: int) -> "RankLoad":
        """Returns the load with other tokens: received bytes and the head's tokens grow with them, states do not."""

        def scaled(number: int) -> int:
            return number * rank_tokens // max(1, self.rank_tokens)

        received, head_tokens = scaled(self.received_bytes), scaled(self.head_tokens)
        return replace(self, rank_tokens=rank_tokens, received_bytes=received, head_tokens=head_tokens)


def largest_tokens(load: RankLoad, setup: TrainingSetup, room: Room) -> int:
    """Returns the most tokens per rank that fit, of multiples of `TOKENS_STEP`; 0 if none fit."""
    choices = range(TOKENS_STEP, MOST_TOKENS + 1, TOKENS_STEP)
    fitting = (tokens for tokens in choices if room.fits(load.with_tokens(tokens).memory(setup), setup.num_ranks))
    return max(fitting, default=0)


# Before an option that is left out.
DROPPED = "no "
# Changes of options, in the order in which they are tried: field of a setup, its value before (None: any other) and
# after, and the setting of a training that it stands for. The last two take less of the host.
CHANGES: dict[str, tuple[str, Any, Any, str]] = {
    "--liger": ("liger", False, True, "use_liger_kernel=True"),
    "--checkpointing offloaded": ("checkpointing", None, "offloaded", 'checkpointed_attention="offload"'),
    **{
        f"--{name.replace('_', '-')} {number}": (name, 0, number, f"{name}={number}")
        for name, number in (("mlp_tokens", SUGGESTED_MLP_TOKENS), ("attention_kv_heads", SUGGESTED_KV_HEADS))
    },
    "--offload-params": ("state_on_host", False, True, "fsdp_offload_params: true"),
    "--checkpointing saved": ("checkpointing", "offloaded", "saved", 'checkpointed_attention="save"'),
    f"{DROPPED}--offload-params": ("state_on_host", True, False, "fsdp_offload_params: false"),
}


def advice(load: RankLoad, setup: TrainingSetup, room: Room, more_ranks: bool = True) -> str:
    """Returns what does not fit and the fewest changes that make it fit, as text; empty if everything fits.
    `more_ranks`: whether to try more ranks, too, which hold the same tokens together."""
    lacking = room.lacking(load.memory(setup), setup.num_ranks)
    if not lacking:
        return ""
    for times in (2**power for power in range(MOST_TIMES_RANKS.bit_length() if more_ranks else 1)):
        tokens, ranks = ceil_div(load.rank_tokens, times), setup.num_ranks * times
        if times > 1 and tokens < FEWEST_TOKENS:
            break
        of_ranks = load.with_tokens(tokens)
        if times > 1 and setup.num_ranks > 1:  # a rank of the same document receives all of it but its own tokens
            others = (1 - 1 / ranks) / (1 - 1 / setup.num_ranks)
            of_ranks = replace(of_ranks, received_bytes=round(load.received_bytes * others))
        for options, changed in _changed(replace(setup, num_ranks=ranks), load.size):
            memory = of_ranks.memory(changed)
            if room.fits(memory, ranks):
                given = [option for option in options if not option.startswith(DROPPED)]
                given += [f"--gpus {ranks} --tokens-per-rank {tokens}"] * (times > 1)
                dropped = [option.removeprefix(DROPPED) for option in options if option.startswith(DROPPED)]
                how = [f"with {' '.join(given)}"] * bool(given) + [f"without {' '.join(dropped)}"] * bool(dropped)
                settings = ", ".join(CHANGES[option][3] for option in options)
                node = room.node_bytes(memory, ranks)
                return (
                    f"{lacking}. It fits {' and '.join(how)}{f' ({settings})' if settings else ''}: "
                    f"{memory.total / GIB:,.1f} GiB on a GPU"
                    + (f" and {node / GIB:,.1f} on the host of a node" if node else "")
                )
    return f"{lacking}. No option makes it fit; take fewer tokens, or GPUs and nodes with more memory"


def _changed(setup: TrainingSetup, size: DecoderSize) -> Iterator[tuple[list[str], TrainingSetup]]:
    """Yields the setup with each choice of changes of different fields, the fewest first; the setup itself, too."""
    has_tiles = {"mlp_tokens": size.tiles_mlps, "attention_kv_heads": size.tiles_heads}
    able = [
        option
        for option, (name, before, after, _) in CHANGES.items()
        if getattr(setup, name) != after and before in (None, getattr(setup, name)) and has_tiles.get(name, True)
    ]
    for number in range(len(able) + 1):
        for options in combinations(able, number):
            yield list(options), replace(setup, **{CHANGES[option][0]: CHANGES[option][2] for option in options})


@dataclass(frozen=True)
class Job:
    """The training that `distca check` checks a model for. `gpu`: of every rank. `tokens_per_rank`: tokens that a rank
    holds in a micro-step. `setup`: all ways to shard weights are tried. `host_gib`, `ranks_per_node`: see `Room`."""

    gpu: Gpu
    tokens_per_rank: int
    setup: TrainingSetup
    host_gib: float | None = None
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        check_choices(("--checkpointing", self.setup.checkpointing, get_args(Checkpointing)))
        check_ranges(
            ("--gpus", self.setup.num_ranks, MAX_RANKS),
            ("--tokens-per-rank", self.tokens_per_rank, MAX_DOCUMENT_TOKENS // max(1, self.setup.num_ranks)),
            ("--micro-steps", self.setup.micro_steps, MAX_MICRO_STEPS),
            ("--ranks-per-node", self.ranks_per_node, MAX_RANKS),
        )
        check_tiles_and_host(self.setup.mlp_tokens, self.setup.attention_kv_heads, self.host_gib)

    @property
    def capacity_tokens(self) -> int:
        return self.setup.num_ranks * self.tokens_per_rank

    @property
    def room(self) -> Room:
        return Room(USABLE_SHARE * (self.gpu.gib or 0.0) * GIB, self.host_gib, self.ranks_per_node)


def job_load(job: Job, size: DecoderSize, whole_documents: bool, states: StateSize | None = None) -> RankLoad:
    """Returns what the rank with most tokens holds.

    Keys, values and states of other ranks are those of one document that all ranks hold together, planned as training
    plans it: no other batch sends more. `states`: sizes of what mixers exchange; None if they exchange nothing, or
    sizes are not known.
    """
    of_layers = [layer.heads for layer in size.layers if layer.heads]
    received = state_bytes = 0
    if of_layers and not whole_documents:
        heads = max(of_layers, key=lambda heads: heads.key_value * (heads.dim + heads.value_dim))
        config = DistCAConfig(tokens_per_rank=job.tokens_per_rank)
        planner = PlacedPlanner(config, job.setup.num_ranks, heads.groups)
        plan = planner.plan(np.array([job.capacity_tokens]))
        received = int(received_bytes(plan, heads.token_bytes()).max())
        state_bytes = 0 if states is None else states.mixers * states.most_bytes(plan.layout)
    return RankLoad(size, job.tokens_per_rank, received, state_bytes=state_bytes)
