"""Planner: what placement, reading and reports need to know about a model, read once for all loaders of its batches;
and the operations of its passes, counted from its parameters before it is wrapped."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import nn

from distca_hf.batches.placed import PlacedPlanner, StepShape
from distca_hf.batches.reported_steps import Predictable
from distca_hf.comm.grid import Grid
from distca_hf.cost import TokenBytes
from distca_hf.data.rows import Reading
from distca_hf.flops import StepFlops, costs_to_place
from distca_hf.integrations.models.decoder_layers import (
    head_groups_of,
    heads_of_layers,
    layer_masks_of,
    masks_of_layers,
    num_layers_of,
    token_bytes_of,
    whole_heads_of_layers,
)
from distca_hf.integrations.models.mixers import halo_tokens_for, needs_whole_documents
from distca_hf.integrations.models.structure import text_decoder, transformers_model, weights_outside_text
from distca_hf.parallel_context import ParallelContext
from distca_hf.planning.plan import ExtraRanks
from distca_hf.traces import HeadSizes, ModelSizes, PredictedCosts


def step_flops(model: nn.Module) -> StepFlops | None:
    """Counts the operations of a model's forward and backward pass; None if its configuration does not say enough, or
    weights are quantised. ZeRO-3 may already have divided the model."""
    try:
        heads = heads_of_layers(model)
        counted = _matrices(model)
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return None
    pair_forward = sum(2.0 * layer.query * (layer.dim + layer.value_dim) for layer in heads.values())
    weights = sum(numbers for numbers, _ in counted)
    trained = sum(numbers for numbers, is_trained in counted if is_trained)
    head = getattr(transformers_model(model).get_output_embeddings(), "weight", None)
    return StepFlops.of(weights, trained, pair_forward, 0 if head is None else prod(_shape(head)))


def predictable(model: nn.Module, flops: StepFlops | None, recomputes: tuple[bool, bool], grid: Grid) -> Predictable:
    """Returns what `distca report` needs to predict seconds of a pass (costs at rates of an H200, and sizes for a
    measured profile) and to count its work; nothing if operations are unknown. `recomputes` says whether backward
    recomputes layers, and whether it recomputes attention."""
    if flops is None:
        return Predictable()
    layers, attention = recomputes
    step = flops.cost(recomputes_layers=layers, recomputes_attention=attention)
    parts = flops.pass_costs(recomputes_layers=layers, recomputes_attention=attention)
    costs = PredictedCosts("H200", step.token_seconds, parts.forward.pair_seconds, parts.backward.pair_seconds)
    return Predictable(costs, _sizes(model, flops, recomputes, grid), flops)


def _sizes(model: nn.Module, flops: StepFlops, recomputes: tuple[bool, bool], grid: Grid) -> ModelSizes | None:
    """Returns the sizes of a model; None if its configuration does not say them. In a stage of a pipeline, counts only
    the layers that attend."""
    inner = transformers_model(model)
    hidden_size = getattr(inner.config.get_text_config(), "hidden_size", None)
    if not flops.token_forward or not isinstance(hidden_size, int):
        return None
    heads, by_window = whole_heads_of_layers(model), dict[int, HeadSizes]()
    for name, mask in masks_of_layers(model).items():
        one, window = heads[name], mask.window_tokens or 0
        sizes = HeadSizes(window, one.query, one.key_value, one.dim, one.value_dim, one.groups)
        by_window.setdefault(window, sizes)
    return ModelSizes(
        heads=tuple(by_window.values()),
        hidden_size=hidden_size,
        layers=(num_layers_of(model) if grid.shape[0] == 1 else None) or len(heads),
        layer_weights=round(flops.layers_forward / 2),
        head_weights=round(flops.head_forward / 2),
        backward_share=flops.token_backward / flops.token_forward / 2,
        liger=any(  # libraries replace forward functions
            str(getattr(module.forward, "__module__", "")).startswith("liger_kernel") for module in inner.modules()
        ),
        recomputes_layers=recomputes[0],
        recomputes_attention=recomputes[1],
        tensor_ranks=grid.shape[2],
    )


def _matrices(model: nn.Module) -> list[tuple[int, bool]]:
    """Returns the number of elements of every matrix that multiplies a token of text, and whether it is trained. An
    embedding is looked up, so it counts only if it is also the output's."""
    inner = transformers_model(model)
    head = inner.get_output_embeddings()
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    tables -= {getattr(head, "weight", None)}
    outside_text = set(weights_outside_text(inner).values())
    shares, counted = shares_of_experts(model), []
    for name, parameter in model.named_parameters():
        shape = _shape(parameter)
        if parameter in tables or parameter in outside_text or len(shape) < 2:
            continue
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is quantised")
        share = share_of(name, shares)
        if share is None:
            raise ValueError(f"{name}: no module next to it says how many experts a token takes")
        counted.append((int(prod(shape) * share), parameter.requires_grad))
    return counted


def _shape(parameter: nn.Parameter) -> Sequence[int]:
    """Returns the shape of a parameter before ZeRO-3 divided it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def shares_of_experts(model: nn.Module) -> dict[str, float | None]:
    """Returns which part of its weights a token uses, for every module of experts by its name; None if unknown. Layers
    may have different numbers of experts, and of experts that a token uses."""
    modules, shares = dict(model.named_modules()), dict[str, float | None]()
    for name, module in modules.items():
        stacked = {_shape(weight)[0] for weight in module.parameters(recurse=False) if len(_shape(weight)) == 3}
        number = getattr(module, "num_experts", None)
        if name.endswith(".experts"):
            number = number or max(stacked, default=len(list(module.children())))
        elif number not in stacked:
            continue
        block = modules[name.rpartition(".")[0]]
        taken = [getattr(part, "top_k", None) for part in (block, *block.children())]
        shares[name] = next((one / number for one in taken if isinstance(one, int) and number), None)
    return shares


def share_of(weight: str, shares: Mapping[str, float | None]) -> float | None:
    """Returns which part of a weight, given by name, a token uses: the share of the innermost experts around it."""
    module = weight.rpartition(".")[0]
    while module and module not in shares:
        module = module.rpartition(".")[0]
    return shares[module] if module else 1.0


def planner_for(
    model: nn.Module | None,
    context: ParallelContext,
    extra_ranks: ExtraRanks | None = None,
    step_shape: StepShape | None = None,
) -> PlacedPlanner:
    """Returns a planner for batches of a model, which the ranks of a context share. `model` is None for any model with
    full causal attention, whose heads are not divided. Raises AttributeError, KeyError, RuntimeError or ValueError if
    the size of a token is needed, and neither the model's config nor its layers say how many heads there are, or how
    wide they are."""
    members = context.members
    planner = PlacedPlanner(context, len(members.token_ranks), extra_ranks=extra_ranks, step_shape=step_shape)
    if model is None:
        return planner
    whole_documents = needs_whole_documents(model)
    needs_bytes = extra_ranks is not None or whole_documents
    return replace(
        planner,
        head_groups=head_groups_of(model, members.grid.shape[2], context.attention_kv_heads),
        token_bytes=token_bytes_of(model) if needs_bytes else TokenBytes(),
        layer_masks=layer_masks_of(model),
        whole_documents=whole_documents,
        halo_tokens=halo_tokens_for(model),
        costs=costs_to_place(None if step_shape is None else step_flops(model)),
    )


def reading_for(model: nn.Module | None, unlearnt_token: int | None = None, in_stages: bool = False) -> Reading:
    """Returns what to read from rows for batches of a model. Stages of a pipeline (`in_stages`) pass only tokens."""
    if model is None:
        return Reading(unlearnt_token=unlearnt_token)
    inner = transformers_model(model)
    return Reading(
        inputs=frozenset() if in_stages else frozenset(inspect.signature(inner.forward).parameters),
        vocabulary_tokens=vocabulary_tokens_of(model),
        unlearnt_token=unlearnt_token,
    )


def vocabulary_tokens_of(model: nn.Module) -> int | None:
    """Returns the number of tokens that a model has embeddings for; None if its embeddings do not say."""
    return getattr(text_decoder(transformers_model(model)).get_input_embeddings(), "num_embeddings", None)
