"""Mixers: parts of layers that mix tokens by other means than attention, found by their structure.

A mixer is a module that a layer calls directly, that has no attention of Transformers' interface inside, and whose
class carries a state. Generation needs only that state from all earlier tokens, so no token depends on later ones.
Anything else that mixes tokens is refused by name.

    gated delta nets, KDA, Mamba, short convolutions    states travel, documents are cut as usual (`carried_mixers`)
    lightning attention, RG-LRU, unknown classes        documents stay whole, each in a separate row
                                                        (`document_rows`), and only tasks of attention layers move

Batches' offsets for kernels that know packed rows are not passed on: Transformers drops arguments that an installed
kernel lacks, and documents would see each other. The rows of a pass travel to the layers as a keyword (`mixer_calls`).

Attention may treat a row as a document by default. But a training batch for a model with mixers must say where
documents begin, and everything it says must agree (`finding.stated_lengths`).
"""

import re
from collections.abc import Hashable, Iterator
from functools import lru_cache

import numpy as np
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.arrays import exclusive_cumsum
from distca_hf.batches.batch_documents import Batch, cache_of, document_lengths, tokens_of
from distca_hf.errors import PackingError, PlanError, UnsupportedAttentionError
from distca_hf.integrations.finding import lengths_and_rows, stated_lengths
from distca_hf.integrations.models.carried_mixers import carries, halo_tokens_of
from distca_hf.integrations.models.document_rows import DocumentRows
from distca_hf.integrations.models.mixer_calls import KEYWORD, Apart, CalledFunctions, GiveDocuments, keeps_keywords
from distca_hf.integrations.models.structure import attention_layers, source_of, text_modules, transformers_model
from distca_hf.runtime.carried_states import CarriedRows
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import get_logger
from distca_hf.version import older_than


log = get_logger(__name__)

# Layer types in configurations whose tokens attend to earlier tokens, or do not see each other.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp"})
# Lowest Transformers whose mixers call functions by known names, which lets their states travel.
LOWEST_STATES = "5.15"
# Names of states in Transformers' classes, as attributes or in a cache.
STATE = re.compile(r"(conv|conv1d|recurrent|ssm|linear)_(states?|cache)\b")


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
    """Returns whether a model has attention and mixers whose states cannot travel. A model without attention is
    refused elsewhere."""
    inner = transformers_model(model)
    mixers = mixers_of(inner)
    return bool(attention_layers(inner) and mixers) and not all(map(carries, mixers.values()))


def halo_tokens_for(model: nn.Module) -> int | None:
    """Returns how many tokens before a part of a document the mixers of a model see; None if it has no mixers, or
    needs whole documents."""
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
    """Returns whether a module that is not a mixer convolves or carries a state. A module that holds attention or a
    mixer may name its states."""
    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.RNNBase):
        return True
    inside = set(part.modules())
    return attention.isdisjoint(inside) and mixers.isdisjoint(inside) and _carries_state(type(part))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _carries_state(module_class: Hashable) -> bool:
    """Returns whether the source of a class names a state; False without a source."""
    return STATE.search(source_of(module_class)) is not None  # type: ignore[arg-type]


class MixerWatch:
    """Watches the mixers of one model; does nothing if there are none."""

    def __init__(self, model: PreTrainedModel, accepts_use_cache: bool) -> None:
        self._model, self._accepts_use_cache = model, accepts_use_cache
        self.mixers = mixers_of(model)
        carry = [carries(mixer) for mixer in self.mixers.values()]
        # Whether there are mixers, and the states of all of them travel; whether some need whole documents.
        self.carry, self.need_whole = bool(carry) and all(carry), not all(carry)
        self.halo_tokens = halo_tokens_for(model)
        # Returns lengths of the documents of a batch, and checks them.
        self.lengths = stated_lengths if self.mixers else document_lengths
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
