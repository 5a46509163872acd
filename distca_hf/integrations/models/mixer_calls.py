"""Calls of mixers in an enabled model: documents do not see each other.

The rows of a pass are a keyword of the model, which layers get and pass on to their mixers. Checkpointing keeps the
arguments of a layer, so recomputation has the rows of its pass, even if other passes have run meanwhile. It calls no
hooks of the layer. Some layers do not pass the keyword on (Jamba): there it takes the place of the mask, which a plan
makes unnecessary. Batches' offsets for kernels that know packed rows are not passed on: Transformers drops arguments
that an installed kernel lacks, and documents would see each other.

Rows are `CarriedRows` if states travel. Otherwise a whole mixer runs on batches of documents (`DocumentRows`). That is
exact for every mixer and needs no kernel.

Attention may treat a row as a document by default. But a training batch for a model with mixers must say where
documents begin, and everything it says must agree (`finding.stated_lengths`).
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from distca_hf.arrays import IntArray, exclusive_cumsum
from distca_hf.batches.batch_documents import Batch, cache_of, tokens_of
from distca_hf.errors import PackingError, PlanError, UnsupportedAttentionError
from distca_hf.integrations.finding import agreed_lengths, lengths_and_rows, stated_lengths
from distca_hf.integrations.models.carried_mixers import CalledFunctions, carried_forward
from distca_hf.integrations.models.mixers import LOWEST_STATES, halo_tokens_for, mixers_of
from distca_hf.integrations.models.structure import source_of
from distca_hf.runtime.buckets import Buckets
from distca_hf.runtime.carried_states import CarriedRows
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import get_logger
from distca_hf.torch_private import hidden_from_dynamo
from distca_hf.version import older_than


log = get_logger(__name__)

# Keyword of models and layers that holds the `CarriedRows` or `DocumentRows` of a pass.
KEYWORD = "distca_documents"
MASK = "attention_mask"
# Arguments of mixers for padding and documents, which the plan knows.
NOT_CARRIED = frozenset({MASK, "seq_idx"})


class DocumentRows:
    """Rows of the documents in `[batch_size, row_tokens]` tokens.

    This is not a tuple, mapping or dataclass: wrappers look into those in a model's arguments, and copy them. `rows`
    are places of the documents' tokens in the flattened batch; None: one after the other.
    """

    def __init__(
        self,
        document_tokens: IntArray,
        batch_size: int,
        row_tokens: int,
        device: torch.device,
        rows: IntArray | None = None,
    ) -> None:
        self.batch_size, self.row_tokens = batch_size, row_tokens
        self._buckets = Buckets(document_tokens, device, rows)

    @hidden_from_dynamo
    def mix(self, mixer: Callable[..., object], args: tuple[object, ...], keywords: Mapping[str, object]) -> object:
        """Runs a mixer on every document separately, outside compiled graphs: numbers of documents and tokens differ
        between batches, and mixers of Transformers fail in graphs with these dynamic shapes.

        Args:
            mixer: returns a tensor of its tokens, or a tuple that begins with one.
            args, keywords: its arguments. Gathers tensors with one row per token, counts `position_ids` in each
                document, drops a cache, which has one state for every row of the batch, and passes others unchanged.

        Returns:
            `[batch_size, row_tokens, ...]` the mixer's output, 0 for tokens of no document. In a tuple, Nones follow:
            the layer cannot use states of single documents.
        """
        of_names = {
            # Given positions may count over the whole row, if only offsets tell its documents.
            name: self._buckets.positions if name == "position_ids" and value is not None else self._gathered(value)
            for name, value in keywords.items()
        }
        given = zip(*map(self._gathered, args), *of_names.values(), strict=True)
        mixed: list[Any] = []
        for of_batch in given:
            named = dict(zip(keywords, of_batch[len(args) :], strict=True))
            mixed.append(mixer(*of_batch[: len(args)], **named))
        in_tuple = len(mixed[0]) if isinstance(mixed[0], tuple) else 0
        outputs = [batch[0] if in_tuple else batch for batch in mixed]
        joined = self._buckets.joined(outputs, self.batch_size * self.row_tokens)
        whole = joined.unflatten(0, (self.batch_size, self.row_tokens))
        return (whole, *[None] * (in_tuple - 1)) if in_tuple else whole

    def _gathered(self, value: Any) -> Sequence[object]:
        """Returns, for each batch of documents, its tokens; None for a cache; other values unchanged."""
        num_batches = len(self._buckets.numbers)
        if isinstance(value, Cache):
            return [None] * num_batches
        if isinstance(value, tuple):
            return list(zip(*(self._gathered(part) for part in value), strict=True)) if value else [()] * num_batches
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[1] != self.row_tokens:
            return [value] * num_batches
        if value.shape[0] not in (1, self.batch_size):
            return [value] * num_batches
        return self._buckets.gathered(value.expand(self.batch_size, *value.shape[1:]).flatten(0, 1))


@lru_cache(maxsize=256)
def keeps_keywords(forward: Callable[..., Any], mixer: str) -> bool:
    """Returns whether a layer does not pass further keywords on to its mixer, according to the source of its forward
    function; False without a source."""
    calls_it = re.search(rf"self\.{mixer}\((?:[^()]|\([^()]*\))*\)", source_of(forward))
    return calls_it is not None and "**" not in calls_it.group()


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


class MixerWatch:
    """Watches the mixers of one model; does nothing if there are none."""

    def __init__(self, model: PreTrainedModel, accepts_use_cache: bool) -> None:
        self._model, self._accepts_use_cache = model, accepts_use_cache
        self.mixers = mixers_of(model)
        self.halo_tokens = halo_tokens_for(model)
        # Whether there are mixers, and the states of all of them travel; whether some need whole documents.
        self.carry = self.halo_tokens is not None
        self.need_whole = bool(self.mixers) and not self.carry
        # Returns lengths of the documents of a batch, and checks them.
        self.lengths = stated_lengths if self.mixers else agreed_lengths
        classes = {type(mixer): mixer for mixer in self.mixers.values()}
        named = ", ".join(sorted(one.__name__ for one in classes))
        self._named = f"{len(self.mixers)} parts of {type(model).__name__} ({named})"
        self._called = [CalledFunctions(mixer) for mixer in classes.values()] if self.carry else []
        self._apart: list[Apart] = []
        self._rows: CarriedRows | DocumentRows | None = None  # rows of the present pass

    def enter(self) -> None:
        """Makes mixers keep documents apart, and logs it."""
        of_layers: dict[str, list[Apart]] = {}
        for name, mixer in self.mixers.items():
            apart = Apart(mixer, name)
            mixer.forward = apart
            self._apart.append(apart)
            of_layers.setdefault(name.rpartition(".")[0], []).append(apart)
        for name, of_layer in of_layers.items():
            layer = self._model.get_submodule(name)
            by_mask = any(keeps_keywords(type(layer).forward, apart.name.rpartition(".")[2]) for apart in of_layer)
            layer.register_forward_pre_hook(GiveDocuments(name, of_layer, by_mask), with_kwargs=True)
        if self.carry:
            log.info("%s carry a state from token to token, which travels with cut documents", self._named)
        elif self.mixers:
            log.info(
                "%s carry a state from token to token that cannot travel, so no document is cut, and each is a "
                "separate row there. Attention is balanced by computing parts of it on other ranks. Tokens of your "
                "own batches stay: give every rank about as many",
                self._named,
            )
            if older_than("transformers", LOWEST_STATES):
                log.info(
                    "From Transformers %s on, states of known families travel (pip install --upgrade transformers)",
                    LOWEST_STATES,
                )

    def leave(self, module: nn.Module) -> None:
        """Undoes `enter` in the model or a copy."""
        for part in module.modules() if self.mixers else ():
            for number, hook in list(part._forward_pre_hooks.items()):
                if isinstance(hook, GiveDocuments):
                    del part._forward_pre_hooks[number]
                    part._forward_pre_hooks_with_kwargs.pop(number, None)
            apart = vars(part).get("forward")
            if isinstance(apart, Apart):
                del part.forward
                if apart.before is not None:
                    part.forward = apart.before

    def with_plan(self, batch: Batch, plan: LivePlan) -> dict[str, object]:
        """Returns further keywords for a pass with a plan.

        Raises:
            UnsupportedAttentionError: ZeRO-3 divides the weights of mixers, or their forward function was replaced.
            PlanError: the plan cuts documents that must stay whole.
            PackingError: the batch asks for a cache.
        """
        self._rows = None
        if not self.mixers:
            return {}
        facts, transport = plan.facts, plan.transport
        if self.carry:
            self._follow_functions()
        elif facts.cut_documents:
            raise PlanError(
                f"{transport.grid.name}, micro-batch {plan.micro_batch}: {facts.cut_documents} of "
                f"{facts.num_documents} documents are cut, and {self._named} need whole ones, because they carry a "
                "state from token to token. Make batches with plugin.dataloader(model=...)"
            )
        else:
            self._check_weights()
        assert plan.document_tokens is not None
        batch_size, row_tokens = tokens_of(batch).shape
        lengths = plan.document_tokens
        is_apart = not len(lengths) or (len(lengths) == batch_size and np.all(lengths == row_tokens))
        if is_apart and not facts.cut_documents and (not self.carry or self._asks_for_cache(batch)):
            return {KEYWORD: None}
        self._check_no_cache(batch)
        device = tokens_of(batch).device
        self._rows = CarriedRows(plan) if self.carry else DocumentRows(lengths, batch_size, row_tokens, device)
        return {KEYWORD: self._rows}

    def take_states(self) -> bool:
        """Returns whether mixers can begin from a state, with the functions that they call now."""
        try:
            self._follow_functions()
            for apart in self._apart:
                apart.carried()
        except UnsupportedAttentionError as error:
            log.debug("documents share nothing: %s", error)
            return False
        return True

    def keywords_of_local_pass(self, batch: Batch, trains: bool) -> dict[str, object]:
        """Returns further keywords for a local pass of this rank. Raises UnsupportedAttentionError if ZeRO-3 divides
        the weights of mixers; PackingError if nothing says where documents begin, sources disagree, or the batch asks
        for a cache."""
        self._rows = None
        if not self.mixers:
            return {}
        tokens, cached = tokens_of(batch), cache_of(batch)
        # A cache asks its first layer, which carries a state in MiniMax and counts no tokens.
        counts = [x.get_seq_length() for x in (cached, *getattr(cached, "layers", ())) if hasattr(x, "get_seq_length")]
        if any(counts) or not tokens.numel():
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
        self._rows = DocumentRows(lengths, batch_size, row_tokens, tokens.device, rows)
        return {KEYWORD: self._rows} | ({"use_cache": False} if self._accepts_use_cache else {})

    def check_ran(self) -> None:
        """Checks after a pass that the mixers of each layer that ran kept documents apart. Raises
        UnsupportedAttentionError if a layer called something else instead of its mixer."""
        rows, self._rows = self._rows, None
        for apart in self._apart if rows is not None else ():
            if apart.documents is rows and apart.mixed is not rows:
                raise UnsupportedAttentionError(
                    f"{apart.name}, or its forward function, was replaced after distca_hf.enable, so documents saw "
                    "each other there, or parts of them began without their state; no step was taken. Replace it "
                    "before enable, or let the new function call the old one"
                )

    def _follow_functions(self) -> None:
        """Makes mixers call the functions that their modules have now: someone may have installed a kernel."""
        if any([called.has_changed() for called in self._called]):  # a list: all must be checked
            for apart in self._apart:
                apart.forget_functions()
            log.info("%s call other functions than in the pass before; states travel through these", self._named)

    def _check_weights(self) -> None:
        """Checks that the weights of mixers are available while a layer runs. Raises UnsupportedAttentionError if
        ZeRO-3 gathers them for each part of a mixer. Parts run once for documents of about one length, so a different
        number of times on each rank, and ranks would wait for each other."""
        # ds_id: DeepSpeed's mark of a parameter that ZeRO-3 divides.
        if any(hasattr(parameter, "ds_id") for mixer in self.mixers.values() for parameter in mixer.parameters()):
            raise UnsupportedAttentionError(
                f"{self._named} run once for documents of about one length, unequally often on every rank, and ZeRO-3 "
                "gathers their weights in every run: ranks would wait for each other. Train with ZeRO-1, ZeRO-2, FSDP "
                "or DDP"
            )

    def _asks_for_cache(self, batch: Batch) -> bool:
        return cache_of(batch) is not None or bool(batch.get("use_cache"))

    def _check_no_cache(self, batch: Batch) -> None:
        """Checks that packed documents, or parts of them, do not fill a cache."""
        if self._asks_for_cache(batch):
            raise PackingError(
                f"rows hold several documents, or parts of them, and {self._named} would leave the state of one of "
                "them in a cache; set use_cache=False, or give every document a separate row"
            )
