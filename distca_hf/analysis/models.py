"""Models: heads, numbers of weights and masks of a model, public models in a table, and config.json files on disk,
read without Transformers. `find_model` reads all others."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distca_hf.analysis.decoder_size import MLP_MATRICES, DecoderSize, LayerSize, StateSize
from distca_hf.arrays import IntArray
from distca_hf.cost import CAUSAL_MASK, Heads, LayerMasks, TokenBytes
from distca_hf.errors import ConfigError
from distca_hf.flops import PassCosts, StepFlops, costs_to_place
from distca_hf.whole_file import read_at_most


# The model of all measured tables (docs/will-it-help.md).
DEFAULT_MODEL = "llama3-8b"


@dataclass(frozen=True)
class ModelSize:
    """The numbers of weights of a model that decide time and memory of a step.

    Attributes:
        hidden_size: size of a token's vector between layers.
        layer_parameters: weights of all layers that one token passes; of experts only those that it is sent to.
        embedding_parameters: weights of the embedding, and of the head if it has its own weights.
        of_layers: the same layer by layer, if layers were counted; by default all are alike.
        norms_heads: whether queries and keys pass norms before attention.
    """

    layers: int
    hidden_size: int
    vocabulary: int
    parameters: int
    layer_parameters: int
    embedding_parameters: int
    of_layers: DecoderSize | None = None
    norms_heads: bool = False

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
        """Counts the weights of a decoder of attention and gated MLPs, without norms and biases. `mlp_size`: width of
        an MLP, or of an expert. `experts`, `experts_per_token`: MLPs of a layer, and those that a token is sent to."""
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
        return self.vocabulary * self.hidden_size

    @property
    def largest_layer_parameters(self) -> int:
        """Weights of one layer, including all experts."""
        return (self.parameters - self.embedding_parameters) // self.layers

    def mlp_size(self, heads: Heads) -> float:
        """Returns the width of a gated MLP with as many weights as a token passes in a layer outside of attention."""
        mlp_weights = self.layer_parameters / self.layers - attention_parameters(heads, self.hidden_size)
        return max(0.0, mlp_weights) / (MLP_MATRICES * self.hidden_size)

    def decoder(self, heads: Heads) -> DecoderSize:
        if self.of_layers is not None:
            return self.of_layers
        of_layer = self.layers, self.largest_layer_parameters, self.mlp_size(heads), heads
        has_experts = self.layer_parameters < self.parameters - self.embedding_parameters
        layer = LayerSize(*of_layer, norms_heads=self.norms_heads, tiles_mlp=not has_experts)
        return DecoderSize(self.hidden_size, self.vocabulary, self.parameters, self.embedding_parameters, (layer,))


def attention_parameters(heads: Heads, hidden_size: int) -> int:
    """Returns the number of weights of one layer's projections of queries, keys, values and outputs."""
    queries = heads.query * (heads.dim + heads.value_dim)
    keys = heads.key_value * (heads.dim + heads.value_dim)
    return hidden_size * (queries + keys)


@dataclass(frozen=True)
class ModelShape:
    """Attention of one layer, and the size of the model around it, if it is known.

    Attributes:
        other_layers: text for layers that are not full attention; empty if there are none.
        full_layers: layers that attend to whole documents; None: all except the other two kinds.
        window_layers: masks with windows, each with the number of its layers.
        mixer_layers: layers that carry a state, in addition to attention or instead of it.
        whole_documents: whether documents stay whole on a rank, because some of these states cannot travel.
        state_size: of mixers whose states travel; None if there are none, or it is not known.
        limits: limits of a training, as `distca check` states them.
        longest_document_tokens: longest document that the model takes; None if it takes any.
        no_stages: why it cannot be divided into stages of a pipeline; empty if it can, or if that is unknown.
    """

    name: str
    heads: Heads
    number_bytes: int = 2
    size: ModelSize | None = None
    other_layers: str = ""
    full_layers: int | None = None
    window_layers: LayerMasks = ()
    mixer_layers: int = 0
    whole_documents: bool = False
    state_size: StateSize | None = None
    limits: tuple[str, ...] = ()
    longest_document_tokens: int | None = None
    no_stages: str = ""

    @property
    def masks(self) -> LayerMasks:
        windows, full = self.window_layers, self.full_layers
        if full is None:
            full = (
                1 if self.size is None else self.size.layers - self.mixer_layers - sum(count for _, count in windows)
            )
        return (*([(CAUSAL_MASK, full)] if full > 0 else []), *windows)

    @property
    def has_unknown_states(self) -> bool:
        """Whether mixers exchange states of unknown size."""
        return bool(self.mixer_layers) and not self.whole_documents and self.state_size is None

    @property
    def token_bytes(self) -> TokenBytes:
        return self.heads.token_bytes(self.number_bytes)


class SimulatedModel(ModelShape):
    """A model whose steps can be simulated: its size is known, and it attends."""

    size: ModelSize

    @classmethod
    def of(cls, shape: ModelShape) -> "SimulatedModel":
        """Returns the same model."""
        if shape.size is None:
            raise ConfigError(f"model {shape.name}: its number of weights is not known, so no step can be simulated")
        if not shape.masks:
            raise ConfigError(f"model {shape.name} has no attention layer: there is nothing to balance")
        return cls(**vars(shape))

    @property
    def attention_layers(self) -> int:
        return sum(count for _, count in self.masks)

    def pairs(self, document_tokens: IntArray) -> float:
        starts = np.zeros_like(document_tokens)
        return float(sum(layers * int(mask.pairs_of(starts, document_tokens).sum()) for mask, layers in self.masks))

    @property
    def flops(self) -> StepFlops:
        """Operations of a step; for pairs, a mean over attention layers."""
        weights, head = self.size.layer_parameters + self.size.head_parameters, self.size.head_parameters
        pair = 2.0 * (self.heads.dim + self.heads.value_dim) * self.heads.query * self.attention_layers
        return StepFlops.of(weights, weights, pair, head)

    @property
    def pass_costs(self) -> PassCosts:
        """Seconds of a token and of a pair with which a training places rows, and shapes steps for a pipeline."""
        return costs_to_place(self.flops)


def llama_shape(
    name: str,
    heads: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    tied: bool = False,
    experts: tuple[int, int] = (1, 1),
    norms_heads: bool = False,
) -> ModelShape:
    """Returns the shape of a model of gated layers in bfloat16, from values of its config.json. `heads`:
    num_attention_heads, num_key_value_heads, head_dim. `sizes`: num_hidden_layers, hidden_size, intermediate_size (of
    an expert), vocab_size. `tied`: tie_word_embeddings. `experts`: of a layer, and those that a token is sent to."""
    query, key_value, dim = heads
    shape = Heads.of_config({"num_attention_heads": query, "num_key_value_heads": key_value, "head_dim": dim})
    size = ModelSize.of_gated_layers(shape, *sizes, tied, *experts)
    return ModelShape(name, shape, size=replace(size, norms_heads=norms_heads))


# Public models, by the numbers of their config.json: model type; query heads, KV heads and head dimension; layers,
# hidden size, size of the MLP and vocabulary; further arguments of `llama_shape`. So `distca plan` needs neither
# Transformers nor a connection for them.
CONFIGS: dict[str, tuple[str, tuple[int, int, int], tuple[int, int, int, int], dict[str, Any]]] = {
    "llama3-8b": ("llama", (32, 8, 128), (32, 4096, 14336, 128256), {}),
    "llama3-70b": ("llama", (64, 8, 128), (80, 8192, 28672, 128256), {}),
    "llama3-405b": ("llama", (128, 8, 128), (126, 16384, 53248, 128256), {}),
    "llama3.2-1b": ("llama", (32, 8, 64), (16, 2048, 8192, 128256), {"tied": True}),
    "llama3.2-3b": ("llama", (24, 8, 128), (28, 3072, 8192, 128256), {"tied": True}),
    "mistral-7b": ("mistral", (32, 8, 128), (32, 4096, 14336, 32768), {}),
    "mixtral-8x7b": ("mixtral", (32, 8, 128), (32, 4096, 14336, 32000), {"experts": (8, 2)}),
    "qwen2.5-7b": ("qwen2", (28, 4, 128), (28, 3584, 18944, 152064), {}),
    "qwen2.5-72b": ("qwen2", (64, 8, 128), (80, 8192, 29568, 152064), {}),
    "qwen3-0.6b": ("qwen3", (16, 8, 128), (28, 1024, 3072, 151936), {"tied": True}),
    "qwen3-1.7b": ("qwen3", (16, 8, 128), (28, 2048, 6144, 151936), {"tied": True}),
    "qwen3-4b": ("qwen3", (32, 8, 128), (36, 2560, 9728, 151936), {"tied": True}),
    "qwen3-8b": ("qwen3", (32, 8, 128), (36, 4096, 12288, 151936), {}),
    "qwen3-14b": ("qwen3", (40, 8, 128), (40, 5120, 17408, 151936), {}),
    "qwen3-32b": ("qwen3", (64, 8, 128), (64, 5120, 25600, 151936), {}),
    "qwen3-30b-a3b": ("qwen3_moe", (32, 4, 128), (48, 2048, 768, 151936), {"experts": (128, 8)}),
    "qwen3-235b-a22b": ("qwen3_moe", (64, 4, 128), (94, 4096, 1536, 151936), {"experts": (128, 8)}),
}
PRESETS = {
    name: llama_shape(name, heads, sizes, **more, norms_heads=model_type.startswith("qwen3"))
    for name, (model_type, heads, sizes, more) in CONFIGS.items()
}


def preset(name: str) -> ModelShape:
    """Returns a model of the table."""
    return PRESETS[name.lower()]


CONFIG_FILE, MOST_CONFIG_BYTES = "config.json", 2**26


def read_config(path: Path) -> dict[str, object]:
    """Reads a config.json."""
    try:
        with path.open("rb") as file:
            config = json.loads(read_at_most(file, MOST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model config {path} must be a JSON object, as Transformers' config.json is")
    return config


def content_of(path: Path) -> str:
    """Describes a path that holds no Transformers configuration, and says what to give instead."""
    if not path.is_dir():
        return f"give its folder, or its {CONFIG_FILE}; {path.suffix or 'such a file'} is not read"
    if (path / "adapter_config.json").is_file():
        base = read_config(path / "adapter_config.json").get("base_model_name_or_path")
        return f"it holds an adapter of PEFT, give its base model {base}"
    if (path / "params.json").is_file():
        return "it is in the format of Meta or Mistral (params.json), give a version that was converted"
    return f"the folder has no {CONFIG_FILE}"


@contextmanager
def without_hub() -> Iterator[None]:
    """Keeps Transformers off the network; it may use its cache. A configuration may name kernels, code and backbones
    on the Hub, and planning needs none of them."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    except OfflineModeIsEnabled as error:
        address = str(error).removeprefix("Cannot reach ").partition(": ")[0]
        raise ConfigError(f"it needs {address}, and nothing is fetched that a configuration names") from error
    finally:
        constants.HF_HUB_OFFLINE = before
