"""Plan size: weights of a model, as far as a step's time and memory depend on them."""

from dataclasses import dataclass

from distca_hf.planning.heads import Heads


# Gate, up and down: the matrices of an MLP as most models have it. One of two matrices counts as two thirds as wide.
MLP_MATRICES = 3


@dataclass(frozen=True)
class ModelSize:
    """Numbers of weights.

    Attributes:
        layers: decoder layers.
        hidden_size: numbers that represent a token between layers.
        vocabulary: words.
        parameters: all weights.
        layer_parameters: weights of all layers that one token meets; of many experts only those that it is sent to.
        embedding_parameters: weights of the embedding, and of the head where that has its own.
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
        """Counts a decoder whose layers are attention and gated MLPs of that width, norms and biases left out.

        Args:
            heads: of attention.
            layers, hidden_size, vocabulary: as the attributes.
            mlp_size: width of an MLP, or of an expert.
            tied: the head is the embedding.
            experts, experts_per_token: MLPs of a layer, and how many a token is sent to.
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
        """Returns the width of a gated MLP with as many weights as a token meets in a layer beside attention."""
        beside = self.layer_parameters / self.layers - attention_parameters(heads, self.hidden_size)
        return max(0.0, beside) / (MLP_MATRICES * self.hidden_size)


def attention_parameters(heads: Heads, hidden_size: int) -> int:
    """Returns weights of the projections of queries, keys, values and outputs of one layer."""
    queries = heads.query * (heads.dim + heads.value_dim)
    keys = heads.key_value * (heads.dim + heads.value_dim)
    return hidden_size * (queries + keys)
