"""Request: ranks, tokens, model and layout of `distca plan`, and plans for them.

The planners come from training: `PlacedPlanner` for documents that are placed, `plan_by_moving` for packs whose
tokens stay, as in models whose documents stay whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, get_args

import numpy as np

from distca_hf.analysis.models import ModelShape, SimulatedModel
from distca_hf.analysis.options import PlanOptions, SimulateOptions
from distca_hf.analysis.profiles.cluster_profile import DEFAULT_PROFILE, ClusterProfile, gpu_gib_of
from distca_hf.analysis.training_setup import Checkpointing
from distca_hf.arrays import IntArray, ceil_div, offsets
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig, OverlongPolicy
from distca_hf.cost import CAUSAL_LAYERS, CAUSAL_MASK
from distca_hf.data.documents import fit_documents
from distca_hf.data.epochs import Epoch
from distca_hf.errors import ConfigError, PackingError, and_more
from distca_hf.flops import H200_GIB, LLAMA_8B_COSTS
from distca_hf.layout import MAX_DOCUMENT_TOKENS, Topology
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.plan import Plan
from distca_hf.planning.rebalance import plan_by_moving


# Documents are placed; or documents in order represent given batches, whose tokens stay and whose tasks move.
LAYOUTS = ("placed", "fixed")
# Maximum number of ranks: the table of bytes between any two of them has 64M entries.
MAX_RANKS = 8192
# Maximum number of micro-steps of an optimizer step, all of which are planned; far more than trainings use.
MAX_MICRO_STEPS = 1024
# Most KV heads of a tile that options accept.
MOST_TILE_HEADS = 4096
# Most memory of a node, in GiB.
MOST_HOST_GIB = 1_000_000
# Most memory of a GPU, in GiB: all GPUs of a large cluster together have less.
MOST_GPU_GIB = 1_000_000


def check_ranges(*options: tuple[str, int, int]) -> None:
    """Refuses options whose value is not from 1 to their maximum."""
    for option, value, most in options:
        if not 1 <= value <= most:
            raise ConfigError(f"{option} {value} must be between 1 and {most}")


def check_choices(*options: tuple[str, str, Sequence[str]]) -> None:
    """Refuses options whose value is not one of their choices."""
    for option, name, names in options:
        if name not in names:
            raise ConfigError(f"{option} {name} must be one of {', '.join(names)}")


def check_tiles_and_host(mlp_tokens: int, attention_kv_heads: int, host_gib: float | None) -> None:
    """Raises ConfigError if tokens or heads of a tile, or the memory of a node, are out of range."""
    for option, value, most in (
        ("--mlp-tokens", mlp_tokens, MAX_DOCUMENT_TOKENS),
        ("--attention-kv-heads", attention_kv_heads, MOST_TILE_HEADS),
    ):
        if not 0 <= value <= most:
            raise ConfigError(f"{option} {value} must be between 0 and {most}")
    if host_gib is not None and not 0 < host_gib <= MOST_HOST_GIB:
        raise ConfigError(f"--host-gib {host_gib:g} must be above 0, and at most {MOST_HOST_GIB:,}")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """How a model is trained (see `TrainingSetup`), and on which GPUs and nodes (see `Room`). Tiles and the host
    change memory, but no time. `seed`: of the order of documents.

    Raises:
        ConfigError: a value is out of range; names its option.
    """

    checkpointing: Checkpointing = "saved"
    liger: bool = False
    gpu_gib: float = H200_GIB
    seed: int = 0
    mlp_tokens: int = 0
    attention_kv_heads: int = 0
    state_on_host: bool = False
    host_gib: float | None = None

    def __post_init__(self) -> None:
        check_choices(("--checkpointing", self.checkpointing, get_args(Checkpointing)))
        check_tiles_and_host(self.mlp_tokens, self.attention_kv_heads, self.host_gib)
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed} must be at least 0")
        if not 0 < self.gpu_gib <= MOST_GPU_GIB:
            raise ConfigError(f"--gpu-gib {self.gpu_gib:g} must be above 0, and at most {MOST_GPU_GIB:,}")


def assumed(options: PlanOptions | SimulateOptions, profile: ClusterProfile) -> dict[str, Any]:
    """Returns the fields of `Assumptions` that options of a command give."""
    given = {field.name: getattr(options, field.name) for field in fields(Assumptions) if hasattr(options, field.name)}
    on_host = getattr(options, "offload_params", False)
    return given | {"gpu_gib": gpu_gib_of(profile, options.gpu_gib), "state_on_host": on_host}


@dataclass(frozen=True)
class PlanRequest(Assumptions):
    """Ranks, model and layout of a training.

    Attributes:
        tokens_per_rank: most tokens that a rank holds in a micro-step.
        layout: "placed" (distca chooses the owner rank of every token) or "fixed" (documents in order, tasks
            move).
        overlong: policy for documents longer than all ranks hold.
        bytes_limit: most bytes that a rank may send, and receive, in one layer's forward pass.
        pipeline: stages, each of which has `num_ranks` ranks; None without a pipeline.
        cluster: name or file of the profile with the measured times.
    """

    num_ranks: int
    tokens_per_rank: int
    ranks_per_node: int
    micro_steps: int
    model: ModelShape
    layout: str = "placed"
    overlong: OverlongPolicy = "error"
    bytes_limit: int | None = None
    pipeline: Pipeline | None = None
    cluster: str = DEFAULT_PROFILE

    def __post_init__(self) -> None:
        check_ranges(
            ("--gpus", self.num_ranks, MAX_RANKS),
            ("--tokens-per-rank", self.tokens_per_rank, MAX_DOCUMENT_TOKENS),
            ("--ranks-per-node", self.ranks_per_node, MAX_DOCUMENT_TOKENS),
            ("--micro-steps", self.micro_steps, MAX_MICRO_STEPS),
        )
        if self.bytes_limit is not None and self.bytes_limit < 0:
            raise ConfigError(f"--bytes-limit {self.bytes_limit} must be at least 0")
        check_choices(("--layout", self.layout, LAYOUTS), ("--overlong", self.overlong, get_args(OverlongPolicy)))
        super().__post_init__()
        if self.pipeline is not None:
            self._check_pipeline(self.pipeline)
        self.planner  # noqa: B018  raises if a variable of the environment has an invalid value

    def _check_pipeline(self, pipeline: Pipeline) -> None:
        if self.model.no_stages:
            raise ConfigError(f"--pipeline {pipeline.num_stages}: {self.model.no_stages}")
        if self.layout == "fixed":
            raise ConfigError(
                f"--pipeline {pipeline.num_stages} divides whole documents among micro-batches, and --layout fixed "
                "keeps packs as they are; leave one of the two out"
            )
        if self.num_gpus > MAX_RANKS:
            raise ConfigError(
                f"--pipeline {pipeline.num_stages} of --gpus {self.num_ranks} each are {self.num_gpus} GPUs; give at "
                f"most {MAX_RANKS}"
            )
        try:
            pipeline.check(self.micro_steps, None if self.model.size is None else self.model.size.layers)
        except ConfigError as error:
            options = f"--pipeline {pipeline.num_stages} --chunks {pipeline.chunks} --micro-steps {self.micro_steps}"
            raise ConfigError(f"{options}: {error}") from error

    @property
    def num_gpus(self) -> int:
        return self.num_ranks * (1 if self.pipeline is None else self.pipeline.num_stages)

    @property
    def capacity_tokens(self) -> int:
        return self.planner.capacity_tokens

    @property
    def topology(self) -> Topology:
        return self.planner.config.topology(self.num_ranks)

    @cached_property
    def planner(self) -> PlacedPlanner:
        """The planner of a training with these numbers. Other settings come from the environment, as in training."""
        config = DistCAConfig(
            tokens_per_rank=self.tokens_per_rank, overlong=self.overlong, ranks_per_node=self.ranks_per_node
        )
        model = self.model
        planner = PlacedPlanner(
            config,
            self.num_ranks,
            model.heads.groups,
            token_bytes=model.token_bytes,
            # Figures are from full layers, even if a model has none.
            layer_masks=model.masks if CAUSAL_MASK in dict(model.masks) else CAUSAL_LAYERS,
            whole_documents=model.whole_documents,
            step_shape=self.pipeline,
            costs=LLAMA_8B_COSTS if model.size is None else SimulatedModel.of(model).pass_costs,
        )
        planner.kernel_times  # noqa: B018  read before anything is timed
        return planner


def plan_micro_steps(request: PlanRequest, micro_batches: Sequence[IntArray]) -> list[Plan]:
    """Plans every micro-step. `micro_batches`: for each `[documents]` lengths in the order of packing, of at most as
    many tokens as all ranks hold.

    Raises:
        PackingError: lengths are out of range.
        PlanError: the layout is fixed, and no plan meets the limit of bytes.
    """
    if request.layout != "fixed":
        return plan_step(request.planner, micro_batches)
    # In training another packer decides which documents each rank holds, and each of its packs holds whole documents.
    return [
        plan_by_moving(
            fill_in_order(batch, request.num_ranks),
            request.model.heads.groups,
            topology=request.topology,
            token_bytes=request.model.token_bytes,
            bytes_limit=request.bytes_limit,
        )
        for batch in micro_batches
    ]


def plan_step(planner: PlacedPlanner, micro_batches: Sequence[IntArray]) -> list[Plan]:
    """Returns a plan for each micro-batch of an optimizer step. Its documents are regrouped as in training: long ones
    together, or by work for a pipeline."""
    lengths = np.concatenate(micro_batches)
    step = planner.regroup(epoch_of(micro_batches), lengths, len(micro_batches))
    numbers = range(step.num_micro_batches)
    return [planner.plan(lengths[step.micro_batch(number)], step.layout(number)) for number in numbers]


def fit_lengths(document_tokens: IntArray, request: PlanRequest) -> IntArray:
    """Returns lengths after the policy for documents that are longer than a micro-batch, or, if documents stay whole,
    than a rank holds."""
    longest, most_tokens, model = int(document_tokens.max()), request.planner.longest_tokens, request.model
    if request.overlong == "error" and longest > most_tokens:
        others = int((document_tokens > most_tokens).sum()) - 1
        if model.whole_documents:
            where = f"one rank, where documents of {model.name} stay whole: it holds {most_tokens} tokens"
            remedy = f"{longest} tokens per rank would hold it"
        else:
            where = f"{request.num_ranks} ranks x {request.tokens_per_rank} tokens = {most_tokens}"
            tokens, ranks = ceil_div(longest, request.num_ranks), ceil_div(longest, request.tokens_per_rank)
            remedy = f"{tokens} tokens per rank or {ranks} ranks would hold it"
        raise PackingError(
            f"a document of {longest} tokens{and_more(others)} does not fit on {where}; {remedy}, or --overlong split "
            "or truncate cuts it"
        )
    document_tokens = fit_documents(document_tokens, most_tokens, request.overlong)[2]
    longest, limit = int(document_tokens.max()), model.longest_document_tokens
    if limit is not None and longest > limit:
        raise PackingError(
            f"a document of {longest} tokens is longer than the {limit} that {model.name} takes (`distca check` says "
            "why); split documents before, or remove longer ones"
        )
    return document_tokens


def epoch_of(micro_batches: Sequence[IntArray]) -> Epoch:
    """Returns the epoch that consists of these micro-batches, in their order."""
    counts = np.array([len(batch) for batch in micro_batches])
    return Epoch(np.arange(counts.sum()), offsets(counts))


def pipeline_of(stages: int | None, chunks: int | None) -> Pipeline | None:
    """Returns the pipeline that was asked for."""
    if stages is None:
        if chunks is not None:
            raise ConfigError(f"--chunks {chunks} needs --pipeline, which is not given")
        return None
    try:
        return Pipeline(stages, 1 if chunks is None else chunks)
    except ConfigError as error:
        raise ConfigError(f"--pipeline {stages}{'' if chunks is None else f' --chunks {chunks}'}: {error}") from error
