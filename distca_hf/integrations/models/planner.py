"""Planner: what placement and reading have to know of a model is read once, for all loaders of its batches."""

import inspect
from dataclasses import replace

from torch import nn

from distca_hf.batches.placed import PlacedPlanner, StepShape
from distca_hf.cost import TokenBytes
from distca_hf.data.rows import Reading
from distca_hf.flops import LLAMA_8B_COSTS
from distca_hf.integrations.models.heads import head_groups_of, token_bytes_of
from distca_hf.integrations.models.layer_masks import layer_masks_of
from distca_hf.integrations.models.mixers import needs_whole_documents
from distca_hf.integrations.models.operations import pass_costs_of
from distca_hf.integrations.models.structure import text_decoder, transformers_model
from distca_hf.parallel_context import ParallelContext
from distca_hf.planning.extra_ranks import ExtraRanks


def planner_for(
    model: nn.Module | None,
    context: ParallelContext,
    extra_ranks: ExtraRanks | None = None,
    step_shape: StepShape | None = None,
) -> PlacedPlanner:
    """Returns a planner for batches of a model, which the ranks of a context share.

    Args:
        model: None: any model of full causal attention, whose heads are not divided.
        extra_ranks, step_shape: see `PlacedPlanner`.

    Raises:
        AttributeError, KeyError, RuntimeError, ValueError: the size of a token is needed, and neither the model's
            config nor its layers say how many heads there are, or how wide they are.
    """
    members = context.members
    planner = PlacedPlanner(context, len(members.token_ranks), extra_ranks=extra_ranks, step_shape=step_shape)
    if model is None:
        return planner
    whole_documents = needs_whole_documents(model)
    needs_bytes = extra_ranks is not None or whole_documents
    return replace(
        planner,
        head_groups=head_groups_of(model, members.grid.shape[2]),
        token_bytes=token_bytes_of(model) if needs_bytes else TokenBytes(),
        layer_masks=layer_masks_of(model),
        whole_documents=whole_documents,
        costs=LLAMA_8B_COSTS if step_shape is None else pass_costs_of(model),
    )


def reading_for(model: nn.Module | None, unlearnt_token: int | None = None, in_stages: bool = False) -> Reading:
    """Returns what is read of rows for batches of a model.

    Args:
        model: None: any model.
        unlearnt_token: a token that is never a label.
        in_stages: whether stages run it, which pass tokens alone.
    """
    if model is None:
        return Reading(unlearnt_token=unlearnt_token)
    inner = transformers_model(model)
    return Reading(
        inputs=frozenset() if in_stages else frozenset(inspect.signature(inner.forward).parameters),
        vocabulary_tokens=vocabulary_tokens_of(model),
        unlearnt_token=unlearnt_token,
    )


def vocabulary_tokens_of(model: nn.Module) -> int | None:
    """Returns the tokens that a model has embeddings for; None if its embeddings do not say."""
    return getattr(text_decoder(transformers_model(model)).get_input_embeddings(), "num_embeddings", None)
