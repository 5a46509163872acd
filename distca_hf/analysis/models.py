"""Models: heads, bytes of a number, and numbers of weights; and a table of public models.

`find_model` reads models that are not in the table.
"""

from dataclasses import dataclass

from distca_hf.cost import Heads, TokenBytes
from distca_hf.errors import ConfigError, did_you_mean


# Number of matrices of a gated MLP (gate, up, down), as in most models. An MLP of two counts as two thirds as wide.
MLP_MATRICES = 3


@dataclass(frozen=True)
class ModelSize:
    """Numbers of weights of a model, as far as time and memory of a step depend on them.

    Attributes:
        layers: decoder layers.
        hidden_size: size of a token's vector between layers.
        vocabulary: number of words.
        parameters: number of all weights.
        layer_parameters: weights of all layers that one token passes; of experts only the ones that it is sent to.
        embedding_parameters: weights of the embedding, and of the head if it has weights of its own.
    """

    layers: int
    hidden_size: int
    vocabulary: int
    parameters: int
    layer_parameters: int
    embedding_parameters: int

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
            heads: heads of attention.
            layers, hidden_size, vocabulary: as the attributes.
            mlp_size: width of an MLP, or of an expert.
            tied: whether the head is the embedding.
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


def attention_parameters(heads: Heads, hidden_size: int) -> int:
    """Returns the number of weights of one layer's projections of queries, keys, values and outputs."""
    queries = heads.query * (heads.dim + heads.value_dim)
    keys = heads.key_value * (heads.dim + heads.value_dim)
    return hidden_size * (queries + keys)


@dataclass(frozen=True)
class ModelShape:
    """Attention of one layer, and the size of the model around it.

    Attributes:
        name: its name in output.
        heads: heads of one layer.
        number_bytes: bytes of a number.
        size: numbers of weights; None if they are not known.
    """

    name: str
    heads: Heads
    number_bytes: int = 2
    size: ModelSize | None = None

    @property
    def token_bytes(self) -> TokenBytes:
        """Bytes of one token in one layer."""
        return self.heads.token_bytes(self.number_bytes)


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
    """Returns a model of the table.

    Raises:
        ConfigError: the table has no model of this name; the message lists all names.
    """
    if name.lower() not in PRESETS:
        raise ConfigError(
            f"model {name!r} is not known; choose one of {', '.join(PRESETS)}, a model type or class of Transformers "
            f"(llama, Qwen3ForCausalLM), or the path of a config.json.{did_you_mean(name, PRESETS)}"
        )
    return PRESETS[name.lower()]
