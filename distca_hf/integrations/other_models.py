"""Other models: refuses passes of models that were not enabled on tokens of placed batches and packs.

A Transformers model asks for its attention mask once in a pass, and finds the mask function in a public registry. The
mask functions look through their callers for entries of a known batch. So a teacher with any attention is noticed,
wherever a program keeps it. Nothing is looked at while no known batch is in use, nor in a compiled pass.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from distca_hf.batches.batch_documents import Batch, documents_at
from distca_hf.batches.known_batch import (
    LEADING,
    TOKENS,
    KnownBatch,
    any_known,
    copied_batch,
    known_batch,
    placed_in_another_model,
)
from distca_hf.integrations.models.hooks import WATCH
from distca_hf.runtime.live_plan import LivePlan


OURS = "distca"
# Module of Transformers' functions that ask for masks.
ASKING = "transformers.masking_utils"
# Arguments of models, and names of their other keywords, that tell which batch they were given.
ARGUMENTS = (*LEADING, "cu_seq_lens_q", "distca_plan")
KEYWORDS = ("kwargs", "flash_attn_kwargs")


def checked_mask(implementation: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Checks which tokens a model was given, then calls its mask function.

    Args:
        original: Transformers' mask function of this name; it gets all other arguments.
    """
    if not torch.compiler.is_compiling():
        check_callers(implementation, sys._getframe(1), "allow_is_bidirectional_skip" not in kwargs)
    return original(*args, **kwargs)


def check_callers(implementation: str, asking: FrameType, is_causal: bool) -> None:
    """Checks that a model that asks for a mask knows the documents of its tokens. Passes of enabled models are left
    out: their hooks have checked them.

    Args:
        asking: frame of Transformers' function that asks for the mask.

    Raises:
        PlanError: the tokens are of a placed batch.
        PackingError: they are of a pack, and nothing tells the documents apart.
    """
    if not any_known() or asking.f_globals.get("__name__") != ASKING:
        return
    frames: list[FrameType] = []
    frame = asking.f_back
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            model = frame.f_locals.get("self")
            if isinstance(model, nn.Module):
                watch = vars(model).get(WATCH)
                if watch is not None and watch.is_running():
                    return
                frames.append(frame)
        frame = frame.f_back
    given: dict[str, Any] = {}
    model_name = "a model"
    for frame in frames:
        around = dict(reversed([*_arguments_of(frame)]))
        if _have_other_tokens(given, around):  # a program's module calls a model on other texts
            break
        given = around | given
        model = frame.f_locals["self"]
        model_name = type(model).__name__ if hasattr(model, "config") else model_name
    model_name = f"{model_name} with attn_implementation={implementation!r}"
    if isinstance(plan := given.get("distca_plan"), LivePlan):
        if implementation == OURS:
            return  # its layers say what is wrong
        raise placed_in_another_model(plan, model_name)
    if not is_causal:  # embeddings of images, for example
        given.pop("inputs_embeds", None)
    found = known_batch(given)
    known = copied_batch(given) if found is None else found
    if known is None:
        return
    is_pack = known.plan is None or found is None
    if not is_pack or not _separates_documents(implementation, asking, given, known):
        raise known.refusal(model_name)
    positions = given.get("position_ids")
    if known.plan is not None and positions is not None and positions.ndim == 2:
        documents_at(positions)  # of a copy, which may begin with the end of a document


def _arguments_of(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yields names and values of the arguments of a model's function that tell which batch it was given."""
    variables = frame.f_locals
    for arguments in (variables, *(variables.get(name) for name in KEYWORDS)):
        if isinstance(arguments, dict):
            yield from ((name, arguments[name]) for name in ARGUMENTS if arguments.get(name) is not None)


def _have_other_tokens(given: Batch, around: Batch) -> bool:
    """Returns whether a module and one around it were both given tokens, and not equally many."""
    shapes = [
        next((tokens.shape[:2] for name in TOKENS if isinstance(tokens := batch.get(name), torch.Tensor)), None)
        for batch in (given, around)
    ]
    return None not in shapes and shapes[0] != shapes[1]


def _separates_documents(implementation: str, asking: FrameType, given: Batch, pack: KnownBatch) -> bool:
    """Returns whether a model keeps the documents of a pack apart, by what it was given."""
    if not pack.is_packed(given) or asking.f_locals.get("packed_sequence_mask") is not None:
        return True
    # These read documents in positions. For others Transformers does, if there is neither a mask nor a cache.
    return (implementation == OURS or "flash" in implementation) and pack.tells_documents(given)
