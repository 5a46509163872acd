"""Mixers: parts of layers that mix tokens by other means than attention, found by their structure.

A mixer is a module that a layer calls directly, that has no attention of Transformers' interface inside, and whose
class carries a state. Generation needs only that state of all tokens before, so no token depends on later ones.
Anything else that mixes tokens is refused by name.

    gated delta nets, KDA, Mamba, short convolutions    states travel, documents are cut as anywhere (`carried_mixers`)
    lightning attention, RG-LRU, classes not known      documents stay whole, each in a separate row
                                                        (`document_rows`), and only tasks of attention layers move

Offsets for kernels that know packed rows are not passed on from batches: Transformers leaves an argument out that an
installed kernel does not have, and documents would see each other. The rows of a pass travel to the layers as a
keyword, so that a recomputed layer has the rows of its pass.

Attention may take a row for a document if nothing else is said, but a batch that a model with mixers trains on must
say where documents begin, and all that it says must agree (`finding.stated_lengths`).
"""

import inspect
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.arrays import exclusive_cumsum
from distca_hf.batches.batch_documents import Batch, cache_of, document_lengths, tokens_of
from distca_hf.errors import PackingError, PlanError, UnsupportedAttentionError
from distca_hf.integrations.finding import lengths_and_rows, stated_lengths
from distca_hf.integrations.models.carried_mixers import carried_forward, carries, halo_tokens_of
from distca_hf.integrations.models.document_rows import DocumentRows
from distca_hf.integrations.models.structure import attention_layers, source_of, text_modules, transformers_model
from distca_hf.runtime.carried_states import CarriedRows
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import get_logger
from distca_hf.torch_private import hidden_from_dynamo


log = get_logger(__name__)

# Layer types of configurations whose tokens attend to tokens before them, or do not see each other.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp"})
# Names that Transformers' classes have for a state, as an attribute or in a cache.
STATE = re.compile(r"(conv|conv1d|recurrent|ssm|linear)_(states?|cache)\b")
# Keyword of models and layers that holds the `CarriedRows` or `DocumentRows` of a pass.
KEYWORD = "distca_documents"
# Arguments of mixers that are about padding, which the plan knows.
NOT_CARRIED = frozenset({"attention_mask", "seq_idx"})


def mixers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the mixers of a model's text part by name; none in a model whose layers only attend."""
    attention = set(attention_layers(model).values())
    layers = {name: part for name, part in text_modules(model).items() if isinstance(part, GradientCheckpointingLayer)}
    return {
        f"{name}.{child_name}": child
        for name, layer in layers.items()
        for child_name, child in layer.named_children()
        if not isinstance(child, GradientCheckpointingLayer)
        and attention.isdisjoint(child.modules())
        and any(_carries_state(type(part)) for part in child.modules())  # type: ignore[arg-type]
    }


def needs_whole_documents(model: nn.Module) -> bool:
    """Returns whether a model has mixers, besides attention, whose states cannot travel. A model without attention is
    refused.

    Args:
        model: a Transformers model, or a PEFT model around one.
    """
    inner = transformers_model(model)
    mixers = mixers_of(inner)
    return bool(attention_layers(inner) and mixers) and not all(map(carries, mixers.values()))


def halo_tokens_for(model: nn.Module) -> int | None:
    """Returns how many tokens before a part of a document the mixers of a model see; None if it has none, or needs
    whole documents."""
    mixers = mixers_of(transformers_model(model)).values()
    return max(map(halo_tokens_of, mixers)) if mixers and all(map(carries, mixers)) else None


def unknown_mixers(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[str]:
    """Yields layers that mix tokens in a way that is neither attention nor a mixer."""
    mixers = mixers_of(model)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    with_mixer = {next((int(part) for part in name.split(".") if part.isdigit()), None) for name in mixers}
    for kind in sorted({str(kind) for kind in kinds} - LAYER_TYPES):
        layers = [index for index, name in enumerate(kinds) if name == kind and index not in with_mixer]
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        if layers:
            yield f"layers {layers[:3]}{more} are of type {kind!r}, which is not computed"
    inside = {part for mixer in mixers.values() for part in mixer.modules()}
    attention = set(attention_layers(model).values())
    others = [
        name
        for name, part in text_modules(model).items()
        if part not in inside and not isinstance(part, PreTrainedModel) and _mixes_tokens(part, attention, inside)
    ]
    if others:
        yield f"{others[0]} (and {len(others) - 1} more) mixes neighbouring tokens"


def _mixes_tokens(part: nn.Module, attention: set[nn.Module], mixers: set[nn.Module]) -> bool:
    """Returns whether a module that is not a mixer convolves or carries a state. Modules that hold attention or a
    mixer may name the states of these."""
    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.RNNBase):
        return True
    inside = set(part.modules())
    return attention.isdisjoint(inside) and mixers.isdisjoint(inside) and _carries_state(type(part))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _carries_state(module_class: Hashable) -> bool:
    """Returns whether the source of a class names a state; False if there is no source."""
    return STATE.search(source_of(module_class)) is not None  # type: ignore[arg-type]


class MixerWatch:
    """Watches the mixers of one model; does nothing if there are none.

    Attributes:
        lengths: returns lengths of the documents of a batch, and checks them.
        carry: whether there are mixers, and states of all of them travel.
        need_whole: whether there are mixers that need whole documents.
        halo_tokens: see `halo_tokens_for`.
    """

    def __init__(self, model: PreTrainedModel, accepts_use_cache: bool) -> None:
        self._model, self._accepts_use_cache = model, accepts_use_cache
        self.mixers = mixers_of(model)
        carry = [carries(mixer) for mixer in self.mixers.values()]
        self.carry, self.need_whole = bool(carry) and all(carry), not all(carry)
        self.halo_tokens = halo_tokens_for(model)
        self.lengths = stated_lengths if self.mixers else document_lengths
        classes = sorted({type(mixer).__name__ for mixer in self.mixers.values()})
        self._named = f"{len(self.mixers)} parts of {type(model).__name__} ({', '.join(classes)})"

    def enter(self) -> None:
        """Lets mixers keep documents apart, and logs it."""
        of_layers: dict[str, list[_Apart]] = {}
        for name, mixer in self.mixers.items():
            apart = _Apart(mixer, name)
            mixer.forward = apart
            of_layers.setdefault(name.rpartition(".")[0], []).append(apart)
        for name, of_layer in of_layers.items():
            self._model.get_submodule(name).register_forward_pre_hook(_GiveDocuments(name, of_layer), with_kwargs=True)
        if self.carry:
            log.info("%s carry a state from token to token, which travels with cut documents", self._named)
        elif self.mixers:
            log.info(
                "%s carry a state from token to token that cannot travel, so no document is cut, and each is a "
                "separate row there. Attention is balanced by computing parts of it on other ranks. Tokens of your "
                "own batches stay: give every rank about as many",
                self._named,
            )

    def leave(self, module: nn.Module) -> None:
        """Undoes `enter`, in the model or in a copy."""
        for part in module.modules() if self.mixers else ():
            for number, hook in list(part._forward_pre_hooks.items()):
                if isinstance(hook, _GiveDocuments):
                    del part._forward_pre_hooks[number]
                    part._forward_pre_hooks_with_kwargs.pop(number, None)
            apart = vars(part).get("forward")
            if isinstance(apart, _Apart):
                del part.forward
                if apart.before is not None:
                    part.forward = apart.before

    def with_plan(self, batch: Batch, plan: LivePlan) -> dict[str, object]:
        """Returns further keywords for a pass with a plan.

        Raises:
            UnsupportedAttentionError: ZeRO-3 divides the weights of mixers.
            PlanError: the plan cuts documents that must be whole.
            PackingError: a cache is asked for.
        """
        if not self.mixers:
            return {}
        if self.carry:
            self._check_no_cache(batch)
            return {KEYWORD: CarriedRows(plan)}
        self._check_weights()
        facts, transport = plan.facts, plan.transport
        if facts.cut_documents:
            raise PlanError(
                f"{transport.grid.name}, micro-batch {plan.micro_batch}: {facts.cut_documents} of "
                f"{facts.num_documents} documents are cut, and {self._named} need whole ones, because they carry a "
                "state from token to token. Make batches with plugin.dataloader(model=...)"
            )
        assert plan.document_tokens is not None
        batch_size, row_tokens = tokens_of(batch).shape
        lengths = plan.document_tokens
        if not len(lengths) or (len(lengths) == batch_size and np.all(lengths == row_tokens)):
            return {KEYWORD: None}
        self._check_no_cache(batch)
        return {KEYWORD: DocumentRows(lengths, batch_size, row_tokens, tokens_of(batch).device)}

    def alone(self, batch: Batch, trains: bool) -> dict[str, object]:
        """Returns further keywords for a pass of this rank alone.

        Raises:
            UnsupportedAttentionError: ZeRO-3 divides the weights of mixers.
            PackingError: nothing says where documents begin, sources disagree, or a cache is asked for.
        """
        if not self.mixers:
            return {}
        tokens, cached = tokens_of(batch), cache_of(batch)
        goes_on = cached is not None and cached.get_seq_length() > 0
        if goes_on or not tokens.numel():
            return {KEYWORD: None}
        if trains:
            self._check_weights()
            stated_lengths(batch)
        batch_size, row_tokens = tokens.shape
        lengths, rows = lengths_and_rows(batch)
        starts = exclusive_cumsum(lengths)
        row_of_document = (starts if rows is None else rows[starts]) // row_tokens
        if len(np.unique(row_of_document)) == len(lengths):  # Transformers masks the padding of rows
            return {KEYWORD: None}
        self._check_no_cache(batch)
        found = DocumentRows(lengths, batch_size, row_tokens, tokens.device, rows)
        return {KEYWORD: found} | ({"use_cache": False} if self._accepts_use_cache else {})

    def _check_weights(self) -> None:
        """Checks that the weights of mixers are there as long as a layer runs.

        Raises:
            UnsupportedAttentionError: ZeRO-3 gathers them for each part of a mixer. Ranks run the parts unequally
                often, once for documents of about one length, and would wait for each other.
        """
        # ds_id: DeepSpeed's mark of a parameter that ZeRO-3 divides.
        if any(hasattr(parameter, "ds_id") for mixer in self.mixers.values() for parameter in mixer.parameters()):
            raise UnsupportedAttentionError(
                f"{self._named} run once for documents of about one length, unequally often on every rank, and ZeRO-3 "
                "gathers their weights in every run: ranks would wait for each other. Train with ZeRO-1, ZeRO-2, FSDP "
                "or DDP"
            )

    def _check_no_cache(self, batch: Batch) -> None:
        """Checks that no cache is to be filled by packed documents."""
        if cache_of(batch) is not None or batch.get("use_cache"):
            raise PackingError(
                f"rows hold several documents, and {self._named} would leave the state of one of them in a cache; set "
                "use_cache=False, or give every document a row of its own"
            )


class _Apart:
    """The forward function of a mixer, in which documents do not see each other.

    Attributes:
        documents: rows of the layer's present call; None if every row of the batch is a document.
        before: the forward function that was set on the module before; None if that of its class counts.
    """

    def __init__(self, mixer: nn.Module, name: str) -> None:
        self.documents: CarriedRows | DocumentRows | None = None
        self._name = name
        self._carried: Callable[..., object] | None = None
        self.before = vars(mixer).get("forward")
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(mixer.forward).parameters.values()
        self._mixer, self._known = mixer, {one.name for one in parameters if one.kind in kinds}

    def __getstate__(self) -> dict[str, object]:
        """Returns what copies have. They make their own functions anew, and rows of a pass are bound to its plan."""
        return vars(self) | {"_carried": None, "documents": None}

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: object, **keywords: object) -> object:
        """Runs the mixer. Keywords that it does not name are left out: they are meant for attention, or say where
        documents begin in a way that it may not follow."""
        known = {name: value for name, value in keywords.items() if name in self._known}
        if isinstance(self.documents, CarriedRows):
            return self._carry(args, known)
        forward = self.before or type(self._mixer).forward.__get__(self._mixer)
        return forward(*args, **known) if self.documents is None else self.documents.mix(forward, args, known)

    @hidden_from_dynamo
    def _carry(self, args: tuple[object, ...], keywords: dict[str, object]) -> object:
        """Runs the mixer on rows whose states travel. A cache is left out: it has one state for the whole row. So are
        masks: padding is known from the plan. A batch of several rows becomes one: the plan tells documents apart."""
        if self._carried is None:
            self._carried = carried_forward(self._mixer, self._rows, self._name)
        given = {name: None if name in NOT_CARRIED else value for name, value in keywords.items()}
        shape = next(x.shape[:2] for x in (*args, *given.values()) if isinstance(x, torch.Tensor))

        def as_one_row(value: object) -> object:
            if isinstance(value, Cache):
                return None
            if not isinstance(value, torch.Tensor) or value.shape[:2] != shape:
                return value
            return value.flatten(0, 1)[None]

        mixed: Any = self._carried(*map(as_one_row, args), **{name: as_one_row(x) for name, x in given.items()})
        if isinstance(mixed, tuple):
            return (mixed[0][0].unflatten(0, shape), *mixed[1:])
        return mixed[0].unflatten(0, shape)

    def _rows(self) -> CarriedRows:
        assert isinstance(self.documents, CarriedRows)
        return self.documents


class _GiveDocuments:
    """A hook of a layer: gives the documents of the pass to the layer's mixers."""

    def __init__(self, layer_name: str, mixers: list[_Apart]) -> None:
        self._layer_name, self._mixers = layer_name, mixers

    @hidden_from_dynamo
    def __call__(self, layer: nn.Module, args: tuple[object, ...], keywords: dict[str, Any]) -> None:
        if KEYWORD not in keywords:
            self._check_rows(layer, keywords)
        for mixer in self._mixers:
            mixer.documents = keywords.get(KEYWORD)

    def _check_rows(self, layer: nn.Module, keywords: Mapping[str, Any]) -> None:
        """Checks that a layer which runs outside of its enabled model has one document in every row."""
        positions, mask = keywords.get("position_ids"), keywords.get("attention_mask")
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
