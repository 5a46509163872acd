"""Operations of a model's forward and backward pass, counted from its parameters before it is wrapped."""

from collections.abc import Iterator, Sequence
from math import prod

from torch import nn
from transformers import PreTrainedConfig

from distca_hf.flops import LLAMA_8B_COSTS, PassCosts, StepFlops
from distca_hf.integrations.models.heads import heads_of_layers
from distca_hf.integrations.models.structure import transformers_model, weights_beside_text
from distca_hf.traces import PredictedCosts


# Names that configurations have for the experts of a layer, and for the experts of one token.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


def step_flops(model: nn.Module) -> StepFlops | None:
    """Counts the operations of a model's forward and backward pass; None where its configuration does not say enough,
    or weights are quantised.

    Args:
        model: a Transformers model, or a PEFT model around one; ZeRO-3 may have divided it already.
    """
    try:
        heads = heads_of_layers(model)
        counted = list(_matrices(model))
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return None
    pair_forward = sum(2.0 * layer.query * (layer.dim + layer.value_dim) for layer in heads.values())
    weights = sum(numbers for numbers, _ in counted)
    trained = sum(numbers for numbers, is_trained in counted if is_trained)
    head = getattr(transformers_model(model).get_output_embeddings(), "weight", None)
    return StepFlops.of(weights, trained, pair_forward, 0 if head is None else prod(_shape(head)))


def pass_costs_of(model: nn.Module) -> PassCosts:
    """Returns the costs of a model's layers under activation checkpointing, with attention's outputs saved; those of
    an 8B Llama where its operations are not known."""
    flops = step_flops(model)
    if flops is None or not flops.pair_forward:
        return LLAMA_8B_COSTS
    return flops.pass_costs(recomputes_layers=True, recomputes_attention=False)


def predicted_costs(
    flops: StepFlops | None, recomputes_layers: bool, recomputes_attention: bool
) -> PredictedCosts | None:
    """Returns the costs that `distca report` compares a step with, at rates of an H200; None if operations are not
    known.

    Args:
        flops: operations of the model.
        recomputes_layers, recomputes_attention: whether layers and attention run forward again in backward.
    """
    if flops is None:
        return None
    step = flops.cost(recomputes_layers=recomputes_layers, recomputes_attention=recomputes_attention)
    parts = flops.pass_costs(recomputes_layers=recomputes_layers, recomputes_attention=recomputes_attention)
    return PredictedCosts("H200", step.token_seconds, parts.forward.pair_seconds, parts.backward.pair_seconds)


def _matrices(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yields the numbers of every matrix that a token of text is multiplied with, and whether it is trained. An
    embedding is looked up, unless it is the output's as well.

    Raises:
        ValueError: weights are quantised, or it is not known how many experts a token takes.
    """
    inner = transformers_model(model)
    head = inner.get_output_embeddings()
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    tables -= {getattr(head, "weight", None)}
    beside_text = set(weights_beside_text(inner).values())
    share = share_of_experts(inner.config.get_text_config())
    for name, parameter in model.named_parameters():
        shape = _shape(parameter)
        if parameter in tables or parameter in beside_text or len(shape) < 2:
            continue
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is quantised")
        numbers = prod(shape)
        if ".experts." in name:
            if share is None:
                raise ValueError(f"{name}: the configuration does not say how many experts a token takes")
            numbers = int(numbers * share)
        yield numbers, parameter.requires_grad


def _shape(parameter: nn.Parameter) -> Sequence[int]:
    """Returns the shape of a parameter as it was before ZeRO-3 divided it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def share_of_experts(config: PreTrainedConfig) -> float | None:
    """Returns which part of its experts a token takes; None if the configuration does not say."""
    total, taken = (
        next((getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)), None)
        for names in (EXPERTS, EXPERTS_OF_A_TOKEN)
    )
    return taken / total if total and taken else None
