"""Request: ranks, tokens, model and layout of `distca plan`, and plans for them.

A model is its heads, the bytes of a number, and numbers of weights. Public models are in a table; `find_model` reads
all others.

The planners are those of training: `PlacedPlanner` for documents that are placed, `plan_by_moving` for packs of
hybrids, whose tokens stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np

from distca_hf.analysis.memory import DecoderSize, LayerSize
from distca_hf.arrays import IntArray
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig, OverlongPolicy
from distca_hf.cost import CAUSAL_LAYERS, CAUSAL_MASK, Heads, LayerMasks, TokenBytes
from distca_hf.data.epochs import Epoch
from distca_hf.errors import ConfigError
from distca_hf.flops import LLAMA_8B_COSTS, PassCosts, StepFlops
from distca_hf.layout import MAX_DOCUMENT_TOKENS, Topology
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.plan import Plan
from distca_hf.planning.rebalance import plan_by_moving


# Number of matrices of a gated MLP (gate, up, down), as in most models. An MLP of two counts as two thirds as wide.
MLP_MATRICES = 3


@dataclass(frozen=True)
class ModelSize:
    """Numbers of weights of a model, as far as time and memory of a step depend on them.

    Attributes:
        hidden_size: size of a token's vector between layers.
        layer_parameters: weights of all layers that one token passes; of experts only the ones that it is sent to.
        embedding_parameters: weights of the embedding, and of the head if it has its own weights.
        of_layers: the same layer by layer, where layers were counted; by default all are alike.
    """

    layers: int
    hidden_size: int
    vocabulary: int
    parameters: int
    layer_parameters: int
    embedding_parameters: int
    of_layers: DecoderSize | None = None

    @classmethod
    def of_gated_layers(
        cls,
        heads: Heads,
        layers: int,
        hidden_size: int,
        mlp_size: int,
        vocabulary: int,
        tied: bool = False,
        experts: int = 1,
        experts_per_token: int = 1,
    ) -> "ModelSize":
        """Counts the weights of a decoder of attention and gated MLPs, without norms and biases.

        Args:
            mlp_size: width of an MLP, or of an expert.
            experts, experts_per_token: number of MLPs of a layer, and of the ones that a token is sent to.
        """
        mlp, router = MLP_MATRICES * hidden_size * mlp_size, hidden_size * experts if experts > 1 else 0
        rest = attention_parameters(heads, hidden_size) + router
        embedding = vocabulary * hidden_size * (1 if tied else 2)
        return cls(
            layers=layers,
            hidden_size=hidden_size,
            vocabulary=vocabulary,
            parameters=layers * (rest + experts * mlp) + embedding,
            layer_parameters=layers * (rest + experts_per_token * mlp),
            embedding_parameters=embedding,
        )

    @property
    def head_parameters(self) -> int:
        """Weights of the last matrix product."""
        return self.vocabulary * self.hidden_size

    @property
    def largest_layer_parameters(self) -> int:
        """Weights of one layer, all experts included."""
        return (self.parameters - self.embedding_parameters) // self.layers

    def mlp_size(self, heads: Heads) -> float:
        """Returns the width of a gated MLP with as many weights as a token passes in a layer besides attention."""
        beside = self.layer_parameters / self.layers - attention_parameters(heads, self.hidden_size)
        return max(0.0, beside) / (MLP_MATRICES * self.hidden_size)

    def decoder(self, heads: Heads) -> DecoderSize:
        """Returns the sizes that memory depends on."""
        if self.of_layers is not None:
            return self.of_layers
        layer = LayerSize(self.layers, self.largest_layer_parameters, self.mlp_size(heads), heads)
        return DecoderSize(self.hidden_size, self.vocabulary, self.parameters, self.embedding_parameters, (layer,))


def attention_parameters(heads: Heads, hidden_size: int) -> int:
    """Returns the number of weights of one layer's projections of queries, keys, values and outputs."""
    queries = heads.query * (heads.dim + heads.value_dim)
    keys = heads.key_value * (heads.dim + heads.value_dim)
    return hidden_size * (queries + keys)


@dataclass(frozen=True)
class ModelShape:
    """Attention of one layer, and the size of the model around it.

    Attributes:
        heads: heads of one layer.
        size: numbers of weights; None if they are not known.
        other_layers: words for layers that are not full attention; empty if there are none.
        full_layers: layers that attend to whole documents; None: all that are in none of the other two.
        window_layers: masks with windows, each with the number of its layers.
        mixer_layers: layers that carry a state, besides attention or in its place.
        limits: what a training must keep to, as `distca check` says it.
        longest_document_tokens: longest document that the model takes; None if it takes any.
        no_stages: why training does not divide it into stages of a pipeline; empty if it does, or if that is unknown.
    """

    name: str
    heads: Heads
    number_bytes: int = 2
    size: ModelSize | None = None
    other_layers: str = ""
    full_layers: int | None = None
    window_layers: LayerMasks = ()
    mixer_layers: int = 0
    limits: tuple[str, ...] = ()
    longest_document_tokens: int | None = None
    no_stages: str = ""

    @property
    def masks(self) -> LayerMasks:
        """Each mask of its attention layers, with their number."""
        windows, full = self.window_layers, self.full_layers
        if full is None:
            full = (
                1 if self.size is None else self.size.layers - self.mixer_layers - sum(count for _, count in windows)
            )
        return (*([(CAUSAL_MASK, full)] if full > 0 else []), *windows)

    @property
    def token_bytes(self) -> TokenBytes:
        """Bytes of one token in one layer."""
        return self.heads.token_bytes(self.number_bytes)

    def pass_costs(self) -> PassCosts | None:
        """Returns the costs of the layers, all of them trained and checkpointed; None if the model's size is not
        known."""
        if self.size is None:
            return None
        weights = self.size.layer_parameters
        pair_forward = 2 * (self.heads.dim + self.heads.value_dim) * self.heads.query * self.size.layers
        flops = StepFlops.of(weights, weights, pair_forward)
        return flops.pass_costs(recomputes_layers=True, recomputes_attention=False)


def _public(
    name: str,
    heads: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    tied: bool = False,
    experts: tuple[int, int] = (1, 1),
) -> ModelShape:
    """Returns the shape of a model from the values of its public config.json; all are in bfloat16.

    Args:
        heads: num_attention_heads, num_key_value_heads, head_dim.
        sizes: num_hidden_layers, hidden_size, intermediate_size (that of an expert), vocab_size.
        tied: tie_word_embeddings.
        experts: number of experts of a layer, and of the ones that a token is sent to.
    """
    query, key_value, dim = heads
    shape = Heads.of_config({"num_attention_heads": query, "num_key_value_heads": key_value, "head_dim": dim})
    return ModelShape(name, shape, size=ModelSize.of_gated_layers(shape, *sizes, tied, *experts))


# Public models, by the numbers of their config.json: query heads, KV heads and head dimension; layers, hidden size,
# size of the MLP and vocabulary. So `distca plan` needs neither Transformers nor a connection for them.
PRESETS = {
    shape.name: shape
    for shape in (
        _public("llama3-8b", (32, 8, 128), (32, 4096, 14336, 128256)),
        _public("llama3-70b", (64, 8, 128), (80, 8192, 28672, 128256)),
        _public("llama3-405b", (128, 8, 128), (126, 16384, 53248, 128256)),
        _public("llama3.2-1b", (32, 8, 64), (16, 2048, 8192, 128256), tied=True),
        _public("llama3.2-3b", (24, 8, 128), (28, 3072, 8192, 128256), tied=True),
        _public("mistral-7b", (32, 8, 128), (32, 4096, 14336, 32768)),
        _public("mixtral-8x7b", (32, 8, 128), (32, 4096, 14336, 32000), experts=(8, 2)),
        _public("qwen2.5-7b", (28, 4, 128), (28, 3584, 18944, 152064)),
        _public("qwen2.5-72b", (64, 8, 128), (80, 8192, 29568, 152064)),
        _public("qwen3-0.6b", (16, 8, 128), (28, 1024, 3072, 151936), tied=True),
        _public("qwen3-1.7b", (16, 8, 128), (28, 2048, 6144, 151936), tied=True),
        _public("qwen3-4b", (32, 8, 128), (36, 2560, 9728, 151936), tied=True),
        _public("qwen3-8b", (32, 8, 128), (36, 4096, 12288, 151936)),
        _public("qwen3-14b", (40, 8, 128), (40, 5120, 17408, 151936)),
        _public("qwen3-32b", (64, 8, 128), (64, 5120, 25600, 151936)),
        _public("qwen3-30b-a3b", (32, 4, 128), (48, 2048, 768, 151936), experts=(128, 8)),
        _public("qwen3-235b-a22b", (64, 4, 128), (94, 4096, 1536, 151936), experts=(128, 8)),
    )
}


def preset(name: str) -> ModelShape:
    """Returns a model of the table."""
    return PRESETS[name.lower()]


# Documents are placed, or documents in order stand for given batches of hybrids, whose tasks move.
LAYOUTS = ("placed", "fixed")
OVERLONG = get_args(OverlongPolicy)
# Maximum number of ranks: the table of bytes between each two of them has 64M entries.
MAX_RANKS = 8192
# Maximum number of micro-steps of an optimizer step, all of which are planned; far more than trainings use.
MAX_MICRO_STEPS = 1024


@dataclass(frozen=True)
class PlanRequest:
    """Ranks, model and layout of a training.

    Attributes:
        num_ranks, tokens_per_rank: number of ranks, and most tokens that each of them holds in a micro-step.
        micro_steps: micro-steps of an optimizer step, planned together.
        layout: "placed" (distca chooses the owner rank of every token) or "fixed" (documents in order, tasks move).
        overlong: policy for documents longer than all ranks hold: "error", "split" or "truncate".
        bytes_limit: most bytes that a rank may send, and receive, in one layer's forward pass.
        pipeline: stages, each of which has `num_ranks` ranks; None without a pipeline.

    Raises:
        ConfigError: a number is out of range, the layout or policy is unknown, or a variable of the environment has an
            invalid value.
        PackingError: the environment names a table of kernel times that cannot be read.
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

    def __post_init__(self) -> None:
        for option, value, most in (
            ("--gpus", self.num_ranks, MAX_RANKS),
            ("--tokens-per-rank", self.tokens_per_rank, MAX_DOCUMENT_TOKENS),
            ("--ranks-per-node", self.ranks_per_node, MAX_DOCUMENT_TOKENS),
            ("--micro-steps", self.micro_steps, MAX_MICRO_STEPS),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{option} {value} must be between 1 and {most}")
        if self.bytes_limit is not None and self.bytes_limit < 0:
            raise ConfigError(f"--bytes-limit {self.bytes_limit} must be at least 0")
        for option, name, names in (("--layout", self.layout, LAYOUTS), ("--overlong", self.overlong, OVERLONG)):
            if name not in names:
                raise ConfigError(f"{option} {name} must be one of {', '.join(names)}")
        if self.pipeline is not None:
            self._check_pipeline(self.pipeline)
        self.planner  # noqa: B018  raises if a variable of the environment has an invalid value

    def _check_pipeline(self, pipeline: Pipeline) -> None:
        """Refuses a pipeline that cannot run, or packs that cannot be shaped for it."""
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
        """Ranks of all stages."""
        return self.num_ranks * (1 if self.pipeline is None else self.pipeline.num_stages)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all ranks together hold in a micro-step."""
        return self.planner.capacity_tokens

    @property
    def topology(self) -> Topology:
        """Nodes of the ranks."""
        return self.planner.config.topology(self.num_ranks)

    @cached_property
    def planner(self) -> PlacedPlanner:
        """Planner of a training with these numbers. All other settings come from the environment, as in training."""
        config = DistCAConfig(
            tokens_per_rank=self.tokens_per_rank, overlong=self.overlong, ranks_per_node=self.ranks_per_node
        )
        model = self.model
        planner = PlacedPlanner(
            config,
            self.num_ranks,
            model.heads.groups,
            token_bytes=model.token_bytes,
            # Figures are those of full layers, also where a model has none.
            layer_masks=model.masks if CAUSAL_MASK in dict(model.masks) else CAUSAL_LAYERS,
            whole_documents=model.mixer_layers > 0,
            step_shape=self.pipeline,
            costs=model.pass_costs() or LLAMA_8B_COSTS,
        )
        planner.kernel_times  # noqa: B018  read before anything is timed
        return planner


def plan_micro_steps(request: PlanRequest, micro_batches: Sequence[IntArray]) -> list[Plan]:
    """Plans every micro-step.

    Args:
        micro_batches: for each `[documents]` lengths in the order of packing; at most as many tokens as all ranks
            hold.

    Raises:
        PackingError: lengths are out of range.
        PlanError: the layout is fixed, and no plan meets the limit of bytes.
    """
    if request.layout == "fixed":
        return [_plan_fixed(request, batch) for batch in micro_batches]
    planner = request.planner
    lengths = np.concatenate(micro_batches)
    as_packed = Epoch(np.arange(len(lengths)), np.cumsum([0] + [len(batch) for batch in micro_batches]))
    step = planner.regroup(as_packed, lengths, len(micro_batches))
    numbers = range(step.num_micro_batches)
    return [planner.plan(lengths[step.micro_batch(number)], step.layout(number)) for number in numbers]


def _plan_fixed(request: PlanRequest, document_tokens: IntArray) -> Plan:
    """Plans documents in order, and moves tasks.

    In training another packer decides which documents each rank holds, and each of its packs holds whole documents.
    """
    return plan_by_moving(
        fill_in_order(document_tokens, request.num_ranks),
        request.model.heads.groups,
        topology=request.topology,
        token_bytes=request.model.token_bytes,
        bytes_limit=request.bytes_limit,
    )
