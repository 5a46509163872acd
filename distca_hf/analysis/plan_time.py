"""Plan time: what a token and an attended pair cost a rank, from a model's size."""

from typing import Literal

from distca_hf.analysis.plan_size import ModelSize
from distca_hf.flops import H200, Rates, StepCost, StepFlops
from distca_hf.planning.heads import Heads


Checkpointing = Literal["saved", "recomputed", "none"]


def step_cost(size: ModelSize, heads: Heads, checkpointing: Checkpointing = "saved", rates: Rates = H200) -> StepCost:
    """Returns the cost of a model whose weights are all trained.

    Args:
        size: of the model; a size without vocabulary is a model without a head.
        heads: of one layer.
        checkpointing: layers are computed twice, attention not ("saved") or as well ("recomputed"), or nothing is
            ("none").
        rates: of the GPU.
    """
    weights = size.layer_parameters + size.head_parameters
    pair_forward = 2 * (heads.dim + heads.value_dim) * heads.query * size.layers
    return StepFlops.of(weights, weights, pair_forward, size.head_parameters).cost(
        recomputes_layers=checkpointing != "none", recomputes_attention=checkpointing == "recomputed", rates=rates
    )
