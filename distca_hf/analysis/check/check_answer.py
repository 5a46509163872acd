"""Answer: the answer of `distca check`: the verdict on a model, its memory on some GPUs, and its numerics."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from distca_hf.analysis.check.find import Candidate
from distca_hf.analysis.check.layers import KernelChoice
from distca_hf.analysis.check.verdict import Verdict
from distca_hf.analysis.memory import GIB, USABLE_SHARE, DecoderSize, Fit, Sharding, TrainingSetup, shardings
from distca_hf.analysis.request import MAX_MICRO_STEPS, MAX_RANKS
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.cost import Heads
from distca_hf.errors import ConfigError
from distca_hf.gpus import Gpu
from distca_hf.integrations.models.decoder_layers import grouped
from distca_hf.layout import MAX_DOCUMENT_TOKENS
from distca_hf.planning.transfers import received_bytes


# Numbers of tokens per rank that are tried.
TOKENS_STEP, MOST_TOKENS = 1024, 1 << 20


@dataclass(frozen=True)
class Job:
    """The training that a model is checked for.

    Attributes:
        gpu: of each rank.
        num_ranks: GPUs that share weights.
        tokens_per_rank: tokens that each holds in a micro-step.
        checkpointing, liger, micro_steps: see `memory.TrainingSetup`.

    Raises:
        ConfigError: a number is out of range.
    """

    gpu: Gpu
    num_ranks: int
    tokens_per_rank: int
    checkpointing: Any = "saved"
    liger: bool = False
    micro_steps: int = 1

    def __post_init__(self) -> None:
        for option, value, most in (
            ("--gpus", self.num_ranks, MAX_RANKS),
            ("--tokens-per-rank", self.tokens_per_rank, MAX_DOCUMENT_TOKENS // max(1, self.num_ranks)),
            ("--micro-steps", self.micro_steps, MAX_MICRO_STEPS),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{option} {value} must be between 1 and {most}")

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all ranks hold together: those of the longest document."""
        return self.num_ranks * self.tokens_per_rank

    @property
    def room_bytes(self) -> float | None:
        """Bytes that torch may allocate on a GPU; None on a CPU."""
        return None if self.gpu.gib is None else USABLE_SHARE * self.gpu.gib * GIB


@dataclass(frozen=True)
class CheckAnswer:
    """The answer.

    Attributes:
        size: numbers of weights; None if they could not be counted.
        fits: memory by way to shard weights; empty if it is not known.
        with_liger_tokens: most tokens per rank that fit with Liger's fused loss, by way to shard weights.
    """

    candidate: Candidate
    job: Job
    verdict: Verdict
    size: DecoderSize | None
    fits: dict[Sharding, Fit]
    with_liger_tokens: dict[Sharding, int]

    @property
    def works(self) -> bool:
        """Whether the model can train."""
        return self.verdict.status != "refused"

    def as_json(self) -> dict[str, Any]:
        """Returns everything, with bytes and tokens as whole numbers."""
        job, verdict = self.job, self.verdict
        return {
            "model": self.candidate.name,
            "class": self.candidate.class_name,
            "model_type": self.candidate.config.model_type,
            "status": verdict.status,
            "reasons": list(verdict.reasons),
            "limits": list(verdict.limits),
            "notes": list(verdict.notes),
            "cuts_documents": verdict.cuts_documents,
            "longest_document_tokens": verdict.longest_document_tokens,
            "layers": [
                {"layers": [*numbers], **asdict(kind), "cuts_documents": kind.cuts_documents, "words": kind.in_words()}
                for numbers, kind in grouped(verdict.kinds)
            ],
            "kernels": [_kernel_as_json(choice) for choice in verdict.kernels],
            "gpu": asdict(job.gpu),
            "gpus": job.num_ranks,
            "tokens_per_rank": job.tokens_per_rank,
            "micro_steps": job.micro_steps,
            "checkpointing": job.checkpointing,
            "liger": job.liger,
            "parameters": None if self.size is None else self.size.parameters,
            "room_bytes": None if job.room_bytes is None else round(job.room_bytes),
            "memory_bytes": {sharding: fit.memory.as_json() for sharding, fit in self.fits.items()},
            "fits": {sharding: fit.fits for sharding, fit in self.fits.items()},
            "largest_tokens_per_rank": {sharding: fit.largest_tokens for sharding, fit in self.fits.items()},
            "largest_tokens_per_rank_with_liger": self.with_liger_tokens,
            "numerics": None if verdict.numerics is None else verdict.numerics.as_json(),
        }


def _kernel_as_json(choice: KernelChoice) -> dict[str, Any]:
    return {
        "layers": list(choice.layers),
        "heads": asdict(choice.need.heads),
        "window_tokens": choice.need.window_tokens or None,
        "softcap": choice.need.softcap,
        "able": list(choice.able),
        "unable": choice.unable,
        "install": choice.needs_package,
    }


def memory_of(job: Job, size: DecoderSize, whole_documents: bool) -> tuple[dict[Sharding, Fit], dict[Sharding, int]]:
    """Estimates memory for each way to shard weights that can train the model, and finds the tokens per rank that fit.

    Keys and values of other ranks are those of one document that all ranks hold together, planned as training plans
    it: the most that are sent.

    Returns:
        Memory as the job says, and the tokens per rank that fit with Liger's fused loss.
    """
    fits: dict[Sharding, Fit] = {}
    with_liger: dict[Sharding, int] = {}
    if job.room_bytes is None:
        return fits, with_liger
    heads = max((layer.heads for layer in size.layers if layer.heads), key=_width, default=None)
    received = 0 if heads is None or whole_documents else _received_bytes(job, heads)
    for sharding in shardings(job.micro_steps, whole_documents):
        for liger in {job.liger, True}:
            trained = job.num_ranks, sharding, job.checkpointing, liger
            setup = TrainingSetup(*trained, micro_steps=job.micro_steps)
            steps = range(TOKENS_STEP, MOST_TOKENS + 1, TOKENS_STEP)
            fit = Fit.of(size, setup, job.tokens_per_rank, received, job.room_bytes, steps)
            if liger == job.liger:
                fits[sharding] = fit
            if liger:
                with_liger[sharding] = fit.largest_tokens
    return fits, with_liger


def _width(heads: Heads) -> int:
    return heads.key_value * (heads.dim + heads.value_dim)


def _received_bytes(job: Job, heads: Heads) -> int:
    """Returns bytes of keys and values that the rank that receives most receives in a layer."""
    planner = PlacedPlanner(DistCAConfig(tokens_per_rank=job.tokens_per_rank), job.num_ranks, heads.groups)
    plan = planner.plan(np.array([job.capacity_tokens]))
    return int(received_bytes(plan, heads.token_bytes()).max())
