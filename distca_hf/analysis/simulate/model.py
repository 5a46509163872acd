"""The model of a simulation: numbers of weights, heads, and the masks of its layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca_hf.analysis.request import ModelShape, ModelSize
from distca_hf.arrays import IntArray
from distca_hf.cost import Heads, LayerMasks
from distca_hf.errors import ConfigError
from distca_hf.flops import PassCosts, StepFlops


@dataclass(frozen=True)
class SimulatedModel:
    """A decoder, as far as the time of a step depends on it.

    Attributes:
        heads: of one layer.
        masks: each mask of the attention layers, with their number.
        mixers: layers that carry a state; documents stay whole then.
        longest_document_tokens: longest document that the model takes; None if it takes any.
        limits: what a training must keep to, as `distca check` says it.
        no_stages: why training does not divide it into stages of a pipeline; empty if it does, or if that is unknown.
    """

    name: str
    heads: Heads
    size: ModelSize
    masks: LayerMasks
    mixers: int = 0
    longest_document_tokens: int | None = None
    limits: tuple[str, ...] = ()
    no_stages: str = ""

    @classmethod
    def of(cls, shape: ModelShape) -> "SimulatedModel":
        """Returns the model of a shape.

        Raises:
            ConfigError: its size is not known, or no layer attends.
        """
        if shape.size is None:
            raise ConfigError(f"model {shape.name}: its number of weights is not known, so no step can be simulated")
        if not shape.masks:
            raise ConfigError(f"model {shape.name} has no attention layer: there is nothing to balance")
        limits = shape.longest_document_tokens, shape.limits, shape.no_stages
        return cls(shape.name, shape.heads, shape.size, shape.masks, shape.mixer_layers, *limits)

    @property
    def attention_layers(self) -> int:
        return sum(count for _, count in self.masks)

    def pairs(self, document_tokens: IntArray) -> float:
        """Returns the attended pairs of documents, in all layers together."""
        starts = np.zeros_like(document_tokens)
        return float(sum(layers * int(mask.pairs_of(starts, document_tokens).sum()) for mask, layers in self.masks))

    @property
    def flops(self) -> StepFlops:
        """Operations of a step; of pairs those of a mean over attention layers."""
        weights, head = self.size.layer_parameters + self.size.head_parameters, self.size.head_parameters
        pair = 2.0 * (self.heads.dim + self.heads.value_dim) * self.heads.query * self.attention_layers
        return StepFlops.of(weights, weights, pair, head)

    @property
    def pass_costs(self) -> PassCosts:
        """Seconds of a token and of a pair by which a training shapes steps for a pipeline."""
        return self.flops.pass_costs(recomputes_layers=True, recomputes_attention=False)

    def with_layers(self, layers: int, vocabulary: int | None = None) -> "SimulatedModel":
        """Returns the first layers of a model whose layers are all alike, and another vocabulary; a part of a model
        is what benchmarks run.

        Args:
            vocabulary: words; None leaves them as they are.
        """
        size, words = self.size, self.size.vocabulary if vocabulary is None else vocabulary
        copies = self.size.embedding_parameters / (self.size.vocabulary * self.size.hidden_size)
        embedding = round(copies * words * size.hidden_size)
        part = replace(
            size,
            layers=layers,
            vocabulary=words,
            parameters=layers * size.largest_layer_parameters + embedding,
            layer_parameters=layers * (size.layer_parameters // size.layers),
            embedding_parameters=embedding,
        )
        return replace(self, size=part, masks=((self.masks[0][0], layers),))


def llama_shape(name: str, heads: Sequence[int], sizes: Sequence[int]) -> ModelShape:
    """Returns a model of gated layers.

    Args:
        heads: query heads, KV heads, dimension of a head.
        sizes: layers, hidden size, width of the MLP, words.
    """
    query, key_value, dim = heads
    of_layer = Heads.of_config({"num_attention_heads": query, "num_key_value_heads": key_value, "head_dim": dim})
    layers, hidden_size, mlp_size, vocabulary = sizes
    size = ModelSize.of_gated_layers(of_layer, layers, hidden_size, mlp_size, vocabulary)
    return ModelShape(name, of_layer, size=size)
