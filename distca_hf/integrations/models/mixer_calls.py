"""Calls of mixers in an enabled model: documents do not see each other.

The rows of a pass are a keyword of the model, which layers get and pass on to their mixers. Checkpointing keeps the
arguments of a layer, so recomputation has the rows of its pass, even if other passes have run meanwhile. It calls no
hooks of the layer. Some layers do not pass the keyword on (Jamba): there it takes the place of the mask, which a plan
makes unnecessary.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import is_
from typing import Any

import torch
from torch import nn
from transformers import Cache

from distca_hf.errors import PlanError, UnsupportedAttentionError
from distca_hf.integrations.models.carried_mixers import carried_forward
from distca_hf.integrations.models.document_rows import DocumentRows
from distca_hf.integrations.models.structure import source_of
from distca_hf.runtime.carried_states import CarriedRows
from distca_hf.torch_private import hidden_from_dynamo


# Keyword of models and layers that holds the `CarriedRows` or `DocumentRows` of a pass.
KEYWORD = "distca_documents"
MASK = "attention_mask"
# Arguments of mixers for padding and documents, which the plan knows.
NOT_CARRIED = frozenset({MASK, "seq_idx"})


@lru_cache(maxsize=256)
def keeps_keywords(forward: Callable[..., Any], mixer: str) -> bool:
    """Returns whether a layer does not pass further keywords on to its mixer, according to the source of its forward
    function; False without a source."""
    calls_it = re.search(rf"self\.{mixer}\((?:[^()]|\([^()]*\))*\)", source_of(forward))
    return calls_it is not None and "**" not in calls_it.group()


class CalledFunctions:
    """The functions that mixers of one class call: their forward function, and what it finds in its module. Raises
    UnsupportedAttentionError if someone has wrapped the forward function. Functions are replaced inside it, so the
    wrapper would not run."""

    def __init__(self, mixer: nn.Module) -> None:
        self._class = type(mixer)
        self._forward: Any = self._class.forward
        function = inspect.unwrap(self._forward, stop=_is_foreign)
        if _is_foreign(function):
            raise UnsupportedAttentionError(
                f"{self._class.__name__}.forward is wrapped by a function of {_module_of(function)}, which would not "
                "run: states of cut documents travel inside the function of Transformers. Use hooks of the modules "
                "(register_forward_pre_hook, register_forward_hook) in place of the wrapper"
            )
        self._names, self._of_module = function.__code__.co_names, function.__globals__
        self._found = self._look()

    def _look(self) -> list[object]:
        return [*map(self._of_module.get, self._names)]

    def has_changed(self) -> bool:
        """Returns whether a function of the module has changed since the last call. Compares objects, in 2 µs for all
        mixers of a class. Raises UnsupportedAttentionError if the forward function has changed."""
        if self._class.forward is not self._forward:
            raise UnsupportedAttentionError(
                f"{self._class.__name__}.forward was replaced after distca_hf.enable, which replaces functions that "
                "the old one calls. Replace it before enable and before plugin.dataloader(model=...), so that both "
                "know whether states can travel through it"
            )
        before, self._found = self._found, self._look()
        return not all(map(is_, before, self._found))


def _module_of(function: Any) -> str:
    """Returns the module that defines a function. Its `__module__` may be of another function, copied by `wraps`."""
    return str(getattr(function, "__globals__", {}).get("__name__", type(function).__name__))


def _is_foreign(function: Any) -> bool:
    return not _module_of(function).startswith("transformers.")


class Apart:
    """The forward function of a mixer, in which documents do not see each other."""

    def __init__(self, mixer: nn.Module, name: str) -> None:
        # Rows of the layer's latest call; None if every row of the batch is a document.
        self.documents: CarriedRows | DocumentRows | None = None
        # Rows of the mixer's latest call, which may be a recomputation.
        self.mixed: CarriedRows | DocumentRows | None = None
        self.name = name
        self._carried: Callable[..., object] | None = None
        # The forward function that was set on the module before; None if it had only its class's.
        self.before = vars(mixer).get("forward")
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(mixer.forward).parameters.values()
        self._mixer, self._known = mixer, {one.name for one in parameters if one.kind in kinds}

    def __getstate__(self) -> dict[str, object]:
        """Returns what copies get: they make their own functions, and rows of a pass are bound to its plan."""
        return vars(self) | {"_carried": None, "documents": None, "mixed": None}

    def forget_functions(self) -> None:
        """Makes the next call look up the functions that the mixer calls."""
        self._carried = None

    def carried(self) -> Callable[..., object]:
        """Returns the forward function for rows whose states travel. Raises UnsupportedAttentionError if a function
        that the mixer calls takes no states."""
        if self._carried is None:
            self._carried = carried_forward(self._mixer, self._rows, self.name)
        return self._carried

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: object, **keywords: object) -> object:
        """Runs the mixer. Drops keywords that it does not name: they are for attention, or say where documents begin
        in a way that it may not follow."""
        rows: Any = keywords.get(KEYWORD, self.documents)
        if isinstance(keywords.get(MASK), CarriedRows):
            rows, keywords = keywords[MASK], {**keywords, MASK: None}
        self.mixed = rows
        known = {name: value for name, value in keywords.items() if name in self._known}
        if isinstance(rows, CarriedRows):
            return self._carry(args, known)
        forward = self.before or type(self._mixer).forward.__get__(self._mixer)
        if rows is None:
            return forward(*args, **known)
        known.pop("seq_idx", None)  # numbers documents of a row; each has a row now, and not every function takes it
        return rows.mix(forward, args, known)

    @hidden_from_dynamo
    def _carry(self, args: tuple[object, ...], keywords: dict[str, object]) -> object:
        """Runs the mixer on rows whose states travel. Drops a cache, which has one state for the whole row, and masks,
        because the plan knows the padding. Joins several rows into one: the plan tells documents apart."""
        given = {name: None if name in NOT_CARRIED else value for name, value in keywords.items()}
        shape = next(x.shape[:2] for x in (*args, *given.values()) if isinstance(x, torch.Tensor))

        def as_one_row(value: object) -> object:
            if isinstance(value, Cache):
                return None
            if not isinstance(value, torch.Tensor) or value.shape[:2] != shape:
                return value
            return value.flatten(0, 1)[None]

        mixed: Any = self.carried()(*map(as_one_row, args), **{name: as_one_row(x) for name, x in given.items()})
        if isinstance(mixed, tuple):
            return (mixed[0][0].unflatten(0, shape), *mixed[1:])
        return mixed[0].unflatten(0, shape)

    def _rows(self) -> CarriedRows:
        assert isinstance(self.mixed, CarriedRows)
        return self.mixed


class GiveDocuments:
    """A hook of a layer: gives the documents of the pass to the layer's mixers. With `by_mask` they take the place of
    the mask, because the layer does not pass keywords on."""

    def __init__(self, layer_name: str, mixers: list[Apart], by_mask: bool) -> None:
        self._layer_name, self._mixers, self._by_mask = layer_name, mixers, by_mask

    @hidden_from_dynamo
    def __call__(
        self, layer: nn.Module, args: tuple[object, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]] | None:
        if KEYWORD not in keywords:
            self._check_rows(layer, keywords)
        rows = keywords.get(KEYWORD)
        for mixer in self._mixers:
            mixer.documents = rows
        if self._by_mask and MASK in keywords and isinstance(rows, CarriedRows):
            return args, {**keywords, MASK: rows}
        return None

    def _check_rows(self, layer: nn.Module, keywords: Mapping[str, Any]) -> None:
        """Checks that a layer that runs outside its enabled model has one document in every row."""
        positions, mask = keywords.get("position_ids"), keywords.get(MASK)
        is_padded = isinstance(mask, torch.Tensor) and mask.ndim == 2
        is_packed = keywords.get("cu_seq_lens_q") is not None or (
            not is_padded
            and isinstance(positions, torch.Tensor)
            and positions.ndim == 2
            and bool((positions[:, 1:] < positions[:, :-1]).any())
        )
        if is_packed or (layer.training and torch.is_grad_enabled()):
            raise PlanError(
                f"{self._layer_name} was called without {KEYWORD}, by which its mixers keep documents apart: call the "
                "model that was given to distca_hf.enable, not a part of it; it must pass its keywords on to layers"
            )
