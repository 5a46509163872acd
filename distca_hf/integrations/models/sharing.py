"""Sharing: whether documents that begin with the same tokens have the same hidden states there, so that layers may
compute them once.

They have, unless something is drawn at random for each row, a batch has more than tokens and positions, or functions
that are not known run on rows.
"""

import inspect
import re
from collections.abc import Hashable, Sequence
from functools import lru_cache

import torch
from torch import nn

from distca_hf.batches.agreement import Returning
from distca_hf.batches.batch_documents import Batch, tokens_of
from distca_hf.batches.document_gather import begin_alike, saved_share, to_share
from distca_hf.batches.read_documents import DocumentReader, ReadDocuments, Reading, reading_of
from distca_hf.config import DistCAConfig
from distca_hf.errors import PackingError
from distca_hf.integrations.models.decoder_borders import REPLACED_BY_PLAN
from distca_hf.integrations.models.mixers import MixerWatch
from distca_hf.integrations.models.placed_loss import KNOWN_HOOKS, unknown_hook
from distca_hf.integrations.models.structure import backbone_of, transformers_model
from distca_hf.integrations.models.weights_check import is_due
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Settings of models that are probabilities of dropping something, or amounts of noise; and those of heads.
RANDOM, OF_HEADS = re.compile(r"drop|jitter"), re.compile(r"^(summary|classifier)")
# Columns of tokens that layers compute from, or that only a loss reads.
KNOWN_COLUMNS = REPLACED_BY_PLAN | {"input_ids", "position_ids", "labels", "shift_labels"}
# Share of the tokens of a batch that one rank must save: its rows do not move otherwise.
LEAST_SAVED = 0.1
# Packages whose forward functions give layers the tokens of the batch.
KNOWN_FORWARDS = KNOWN_HOOKS | {"liger_kernel"}


class Sharing:
    """Decides whether documents of a model's batches may share prefixes.

    Args:
        mixers: layers of the model that carry a state.
        is_multimodal: whether the decoder is part of a model with towers.

    Attributes:
        has_paid: whether documents of a batch have shared prefixes on a single rank.
        following: readings of the batches that are known when a step begins.
    """

    def __init__(self, root: nn.Module, config: DistCAConfig, mixers: MixerWatch, is_multimodal: bool) -> None:
        self._root, model = root, transformers_model(root)
        self._before_layers = dict.fromkeys((model, backbone_of(model), model.get_input_embeddings()))
        self._config, self._refusal = model.config.get_text_config(), ""
        self.following: Sequence[Reading | None] = ()
        self._least_tokens, self._looks, self.has_paid = config.shared_prefix_tokens, 0, False
        self._modules, self._children = list[nn.Module](), list[nn.Module | None]()
        if not config.shared_prefix_tokens:
            self._refusal = "shared_prefix_tokens is 0"
        elif mixers.need_whole or mixers.halo_tokens is not None:
            self._refusal = "layers carry a state from token to token"
        elif is_multimodal:
            self._refusal = "the model may put features of images among the tokens"

    def refusal(self, batch: Batch, is_training: bool, is_noisy: bool) -> str:
        """Returns why documents of a batch must not share prefixes; empty if they may.

        Args:
            is_noisy: whether embeddings get noise.
        """
        return self._refusal or _of_batch(batch) or self._of_modules(is_noisy, is_training)

    def read_ahead(self) -> None:
        """Reads the batches that follow, if their documents may share prefixes."""
        following, self.following = self.following, ()
        for reading in following:
            if reading is not None and not self._refusal:
                reading.documents  # noqa: B018 (remembered from here on)

    def found_on_one_rank(
        self, batch: Batch, reader: DocumentReader, is_noisy: bool, returning: Returning
    ) -> ReadDocuments | None:
        """Returns what was read of a batch that trains on one rank; None if sharing saves less than a tenth of its
        tokens: rows move for it, which takes memory.

        Reading a batch without a reading waits for the device. So before the first batch that pays it is done only in
        passes 1, 2, 4, 8 ...

        Args:
            returning: what the pass returns.
        """
        if batch.get("use_cache") or self.refusal(batch, True, is_noisy):
            return None
        reading = reading_of(batch)
        read = None if reading is None else reading.documents
        if read is None:
            self._looks += 1
            if not self.has_paid and not is_due(self._looks):
                return None
            try:
                read = reader.read(batch)
            except PackingError as error:  # one rank attends to more kinds of batches, and says what is wrong
                log.debug("documents of this batch share nothing: %s", error)
                return None
        if read.lengths is None:
            return None
        shared = to_share(read, True, returning is not Returning.STATES, self._least_tokens)
        pays = begin_alike(shared, self._least_tokens) and saved_share(shared, self._least_tokens) >= LEAST_SAVED
        self.has_paid |= pays
        return read if pays else None

    def _of_modules(self, is_noisy: bool, is_training: bool) -> str:
        """Returns what may compute other numbers for equal tokens. Modules may have changed since the last pass."""
        children = [child for module in self._modules for child in module._modules.values()]
        if not self._modules or children != self._children:  # quicker than listing all in every pass
            self._modules = list(self._root.modules())
            self._children = [child for module in self._modules for child in module._modules.values()]
        for part in self._before_layers:
            runs = inspect.unwrap(vars(part).get("forward", type(part).forward))
            runs = getattr(runs, "__func__", runs)
            written = getattr(runs, "__module__", None) or type(runs).__module__
            if written.partition(".")[0] not in KNOWN_FORWARDS:
                return f"forward of {type(part).__name__}, of {written}, may change tokens before layers see them"
        for module in self._modules:
            if (module._forward_hooks or module._forward_pre_hooks) and (written := unknown_hook(module)):
                return f"a hook of {written} on a {type(module).__name__} may compute something of each row"
            if not is_training or not module.training or not _is_dropout(type(module)):  # type: ignore[arg-type]
                continue
            share = max(vars(module).get(name, 0.0) for name in ("p", "drop_prob"))
            if share > 0:
                name = next(name for name, one in self._root.named_modules() if one is module)
                return f"{name} drops {share:g} of its values at random"
        if not is_training:
            return ""
        if is_noisy:
            return "embeddings get noise (NEFTune)"
        for name, value in vars(self._config).items():
            is_random = RANDOM.search(name) and not OF_HEADS.search(name)
            if is_random and isinstance(value, float | int) and not isinstance(value, bool) and value > 0:
                return f"{name}={value:g} in the model's config makes rows random"
        return ""


@lru_cache(maxsize=1024)
def _is_dropout(of: Hashable) -> bool:
    return "drop" in of.__name__.lower()  # type: ignore[attr-defined]


def _of_batch(batch: Batch) -> str:
    """Returns that a batch has numbers of tokens that layers may compute from; empty if it has none."""
    tokens = tokens_of(batch)
    for name, value in batch.items():
        is_of_tokens = isinstance(value, torch.Tensor) and value.shape[:2] == tokens.shape and value.numel() > 1
        if is_of_tokens and name not in KNOWN_COLUMNS:
            return f"the batch has {name}, which may differ for equal tokens"
    return ""
