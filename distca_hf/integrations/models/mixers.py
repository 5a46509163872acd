"""Mixers: parts of layers that mix tokens by other means than attention, found by their structure.

Gated delta nets, Mamba, lightning attention, RG-LRU and short convolutions carry a state from token to token. They are
not computed here. A model that has them trains with whole documents on every rank, and `documents_apart` keeps these
apart. Only tasks of its attention layers move.

A mixer is a module that a layer calls directly, that has no attention of Transformers' interface inside, and whose
class carries a state. Generation needs only that state of all tokens before, so no token depends on later ones.
Anything else that mixes tokens is refused by name.

The state at the first token of a document is that of nothing before. So a plan that cuts documents is refused.
Attention may take a row for a document if nothing else is said, but a batch that a model with mixers trains on must
say where documents begin, and all that it says must agree.
"""

import re
from collections.abc import Hashable, Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.arrays import IntArray, exclusive_cumsum
from distca_hf.batches.batch_documents import (
    POSITIONS_WITH_TEXT,
    Batch,
    cache_of,
    document_lengths,
    documents_at,
    padded_rows,
    tokens_of,
)
from distca_hf.errors import PackingError, PlanError, UnsupportedAttentionError
from distca_hf.integrations.models.documents_apart import KEYWORD, DocumentRows, keep_apart, mix_rows_again
from distca_hf.integrations.models.structure import attention_layers, source_of, text_modules, transformers_model
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import get_logger


# Layer types of configurations whose tokens attend to tokens before them, or do not see each other.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp"})
# Names that Transformers' classes have for a state, as an attribute or in a cache.
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
    """Returns whether a model has mixers besides attention. One without attention is refused.

    Args:
        model: a Transformers model, or a PEFT model around one.
    """
    inner = transformers_model(model)
    return bool(attention_layers(inner) and mixers_of(inner))


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


log = get_logger(__name__)


class MixerWatch:
    """Watches the mixers of one model; does nothing where there are none.

    Attributes:
        lengths: returns lengths of the documents of a batch, and checks them.
    """

    def __init__(self, model: PreTrainedModel, accepts_use_cache: bool) -> None:
        self._model, self._accepts_use_cache = model, accepts_use_cache
        self.mixers = mixers_of(model)
        self.lengths = stated_lengths if self.mixers else document_lengths
        classes = sorted({type(mixer).__name__ for mixer in self.mixers.values()})
        self._named = f"{len(self.mixers)} parts of {type(model).__name__} ({', '.join(classes)})"

    def enter(self) -> None:
        """Lets mixers keep documents apart, and logs it."""
        if self.mixers:
            keep_apart(self._model, self.mixers)
            log.info(
                "%s carry a state from token to token, so no document is cut, and each is a row of its own there. "
                "Attention is balanced by computing parts of it on other ranks. Tokens of your own batches stay: give "
                "every rank about as many",
                self._named,
            )

    def leave(self, module: nn.Module) -> None:
        """Undoes `enter`, in the model or in a copy."""
        if self.mixers:
            mix_rows_again(module)

    def with_plan(self, batch: Batch, plan: LivePlan) -> dict[str, object]:
        """Returns further keywords for a pass with a plan.

        Raises:
            UnsupportedAttentionError: ZeRO-3 divides the weights of mixers.
            PlanError: the plan cuts documents.
            PackingError: a cache is asked for.
        """
        if not self.mixers:
            return {}
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


def stated_lengths(batch: Batch) -> IntArray | None:
    """Returns lengths of the documents of a batch that is trained on, row after row; None if the batch is padded.

    Raises:
        PackingError: nothing says where documents begin, or offsets, positions and `seq_idx` disagree.
    """
    lengths = document_lengths(batch)
    if lengths is None:
        return None
    if len(lengths) and all(batch.get(name) is None for name in ("cu_seq_lens_q", "position_ids", "attention_mask")):
        raise PackingError(
            "nothing says where documents begin, and layers of this model carry a state from token to token: one "
            "document would run into the next. Give position_ids or cu_seq_lens_q (DataCollatorWithFlattening does), "
            "or an attention_mask if every row is a document"
        )
    _check_seq_idx(batch, lengths)
    return lengths


def lengths_and_rows(batch: Batch) -> tuple[IntArray, IntArray | None]:
    """Returns lengths of the documents of any batch, and the row of each of their tokens, counted over the batch; None
    if documents fill all rows, one after the other.

    Raises:
        PackingError: offsets, positions, `seq_idx` and mask disagree, or a document does not begin at position 0.
    """
    lengths = document_lengths(batch)
    if lengths is not None:
        _check_seq_idx(batch, lengths)
        return lengths, None
    tokens, mask, positions = tokens_of(batch), batch["attention_mask"], batch.get("position_ids")
    if mask.shape != tokens.shape:
        raise PackingError(
            f"attention_mask of shape {tuple(mask.shape)} does not fit tokens of shape {tuple(tokens.shape)}; give "
            "zeros and ones of shape [batch, tokens]"
        )
    if positions is not None and positions.ndim == 3:  # several positions per token, as of images
        positions = positions[0] if len(positions) == POSITIONS_WITH_TEXT else None
    is_token = mask != 0
    if positions is None:
        found = padded_rows(is_token, is_token)
    else:
        found = documents_at(positions.expand(tokens.shape), is_token)
    assert found.query_rows is not None
    return found.cu_seqlens_q.diff().cpu().numpy().astype(np.int64), found.query_rows.cpu().numpy()


def _check_seq_idx(batch: Batch, lengths: IntArray) -> None:
    """Checks that `seq_idx`, where a batch has it, changes at the first token of every document and nowhere else."""
    seq_idx = batch.get("seq_idx")
    if not isinstance(seq_idx, torch.Tensor):
        return
    numbers, tokens = seq_idx.flatten().cpu().numpy(), int(lengths.sum())
    if len(numbers) != tokens:
        raise PackingError(f"seq_idx numbers {len(numbers)} tokens, the batch has {tokens}")
    begins = np.zeros(tokens, dtype=bool)
    begins[np.cumsum(lengths)[:-1]] = True
    changes = np.diff(numbers, prepend=numbers[:1]) != 0
    rows = seq_idx.shape[-1]
    changes[::rows] = begins[::rows]  # numbers may begin anew in every row, or go on
    wrong = np.flatnonzero(begins != changes)
    if len(wrong):
        at = int(wrong[0])
        one, other = ("begins", "goes on") if begins[at] else ("goes on", "begins")
        raise PackingError(
            f"token {at}: a document {one} there by cu_seq_lens_q or position_ids, and {other} by seq_idx "
            f"({numbers[at - 1]} is followed by {numbers[at]}); leave seq_idx out of the batch, or make them agree"
        )
