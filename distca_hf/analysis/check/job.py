"""Job: the training that a model is checked for, and its memory."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca_hf.analysis.decoder_size import DecoderSize
from distca_hf.analysis.fit import RankLoad, Room, advice, check_tiles_and_host, largest_tokens
from distca_hf.analysis.memory import (
    GIB,
    USABLE_SHARE,
    Memory,
    Sharding,
    TrainingSetup,
    check_checkpointing,
    shardings,
)
from distca_hf.analysis.request import MAX_MICRO_STEPS, MAX_RANKS, check_ranges
from distca_hf.analysis.states import StateSize
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.flops import Gpu
from distca_hf.layout import MAX_DOCUMENT_TOKENS
from distca_hf.planning.transfers import received_bytes


# Step and maximum of the numbers of tokens per rank to try.
TOKENS_STEP, MOST_TOKENS = 1024, 1 << 20


@dataclass(frozen=True)
class Job:
    """The training that a model is checked for.

    Attributes:
        gpu: kind of every rank's GPU.
        num_ranks: GPUs that share weights.
        tokens_per_rank: tokens that each holds in a micro-step.
        checkpointing, liger, micro_steps, mlp_tokens, attention_kv_heads, state_on_host: see `memory.TrainingSetup`.
        host_gib, ranks_per_node: see `fit.Room`.

    Raises:
        ConfigError: a number is out of range.
    """

    gpu: Gpu
    num_ranks: int
    tokens_per_rank: int
    checkpointing: Any = "saved"
    liger: bool = False
    micro_steps: int = 1
    mlp_tokens: int = 0
    attention_kv_heads: int = 0
    state_on_host: bool = False
    host_gib: float | None = None
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        check_checkpointing(self.checkpointing)
        check_ranges(
            ("--gpus", self.num_ranks, MAX_RANKS),
            ("--tokens-per-rank", self.tokens_per_rank, MAX_DOCUMENT_TOKENS // max(1, self.num_ranks)),
            ("--micro-steps", self.micro_steps, MAX_MICRO_STEPS),
            ("--ranks-per-node", self.ranks_per_node, MAX_RANKS),
        )
        check_tiles_and_host(self.mlp_tokens, self.attention_kv_heads, self.host_gib)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all ranks hold together, which is the longest document."""
        return self.num_ranks * self.tokens_per_rank

    @property
    def room_bytes(self) -> float | None:
        """Bytes that torch may allocate on a GPU; None on a CPU."""
        return None if self.gpu.gib is None else USABLE_SHARE * self.gpu.gib * GIB

    @property
    def room(self) -> Room:
        """Memory of a GPU and of its node."""
        return Room(self.room_bytes or 0.0, self.host_gib, self.ranks_per_node)

    def setup(self, sharding: Sharding, liger: bool) -> TrainingSetup:
        """Returns what memory depends on."""
        return TrainingSetup(
            self.num_ranks,
            sharding,
            self.checkpointing,
            liger,
            micro_steps=self.micro_steps,
            mlp_tokens=self.mlp_tokens,
            attention_kv_heads=self.attention_kv_heads,
            state_on_host=self.state_on_host,
        )


@dataclass(frozen=True)
class JobMemory:
    """The memory of a job.

    Attributes:
        of_ways: memory per way to shard weights; empty if it is not known.
        largest_tokens, with_liger_tokens: most tokens per rank that fit, and with Liger's fused loss, per way.
        advice: what does not fit under FSDP2, and what makes it fit; empty if any way fits.
    """

    of_ways: dict[Sharding, Memory]
    largest_tokens: dict[Sharding, int]
    with_liger_tokens: dict[Sharding, int]
    advice: str = ""


def memory_of(job: Job, size: DecoderSize, whole_documents: bool, states: StateSize | None = None) -> JobMemory:
    """Estimates memory for each way to shard weights that can train the model, and finds the tokens per rank that fit.

    Keys, values and states of other ranks are from one document that all ranks hold together, planned as training
    plans it: these are the most that are sent.

    Args:
        states: sizes of states that mixers exchange; None if there are none, or they are not known.
    """
    found = JobMemory({}, {}, {})
    if job.room_bytes is None:
        return found
    of_layers = [layer.heads for layer in size.layers if layer.heads]
    received = state_bytes = 0
    if of_layers and not whole_documents:
        heads = max(of_layers, key=lambda heads: heads.key_value * (heads.dim + heads.value_dim))
        planner = PlacedPlanner(DistCAConfig(tokens_per_rank=job.tokens_per_rank), job.num_ranks, heads.groups)
        plan = planner.plan(np.array([job.capacity_tokens]))
        received = int(received_bytes(plan, heads.token_bytes()).max())
        state_bytes = 0 if states is None else states.mixers * states.most_bytes(plan.layout)
    load = RankLoad(size, job.tokens_per_rank, received, state_bytes=state_bytes)
    ways = shardings(job.micro_steps, whole_documents, job.state_on_host)
    choices = range(TOKENS_STEP, MOST_TOKENS + 1, TOKENS_STEP)
    for sharding in ways:
        setup = job.setup(sharding, job.liger)
        found.of_ways[sharding] = load.memory(setup)
        most = found.largest_tokens[sharding] = largest_tokens(load, setup, job.room, choices)
        if not job.liger:
            most = largest_tokens(load, job.setup(sharding, liger=True), job.room, choices)
        found.with_liger_tokens[sharding] = most
    if any(job.room.fits(memory, job.num_ranks) for memory in found.of_ways.values()):
        return found
    return replace(found, advice=advice(load, job.setup("fsdp2", job.liger), job.room))
