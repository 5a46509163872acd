"""Sharing: whether documents that begin with the same tokens have the same hidden states there, so that layers may
compute them once.

They have, unless something is drawn at random for each row, or a batch has more than tokens and positions.
"""

import re

import torch
from torch import nn

from distca_hf.batches.agreement import Returning
from distca_hf.batches.batch_documents import Batch, tokens_of
from distca_hf.batches.document_gather import begin_alike, to_share
from distca_hf.batches.read_documents import DocumentReader, ReadDocuments, reading_of
from distca_hf.config import DistCAConfig
from distca_hf.integrations.models.decoder_borders import REPLACED_BY_PLAN
from distca_hf.integrations.models.mixers import MixerWatch
from distca_hf.integrations.models.structure import transformers_model
from distca_hf.integrations.models.weights_check import is_due


# Settings of models that are probabilities of dropping something, or amounts of noise; and those of heads.
RANDOM, OF_HEADS = re.compile(r"drop|jitter"), re.compile(r"^(summary|classifier)")
# Columns of tokens that layers compute from, or that only a loss reads.
KNOWN_COLUMNS = REPLACED_BY_PLAN | {"input_ids", "position_ids", "labels", "shift_labels"}


class Sharing:
    """Decides whether documents of a model's batches may share prefixes.

    Args:
        mixers: layers of the model that carry a state.
        is_multimodal: whether the decoder is part of a model with towers.
    """

    def __init__(self, root: nn.Module, config: DistCAConfig, mixers: MixerWatch, is_multimodal: bool) -> None:
        of_modules = [
            (name, module, {"p", "drop_prob"} & vars(module).keys()) for name, module in root.named_modules()
        ]
        self._drops = [
            (name, module, share)
            for name, module, shares in of_modules
            for share in shares
            if "drop" in type(module).__name__.lower()
        ]
        self._config, self._refusal = transformers_model(root).config.get_text_config(), ""
        self._least_tokens, self._looks, self._found = config.shared_prefix_tokens, 0, False
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
        return self._refusal or _of_batch(batch) or (self._randomness(is_noisy) if is_training else "")

    def found_on_one_rank(
        self, batch: Batch, reader: DocumentReader, is_noisy: bool, returning: Returning
    ) -> ReadDocuments | None:
        """Returns what was read of a batch that trains on one rank; None as long as no batch had prefixes to share.

        Reading a batch without a reading waits for the device. So before the first batch with shared prefixes it is
        done only in passes 1, 2, 4, 8 ...

        Args:
            returning: what the pass returns.
        """
        if self.refusal(batch, True, is_noisy):
            return None
        reading = reading_of(batch)
        read = None if reading is None else reading.documents
        if read is None:
            self._looks += 1
            if not self._found and not is_due(self._looks):
                return None
            read = reader.read(batch)
        if read.lengths is None:
            return None
        shared = to_share(read, True, returning is not Returning.STATES, self._least_tokens)
        self._found |= begin_alike(shared, self._least_tokens)
        return read if self._found else None

    def _randomness(self, is_noisy: bool) -> str:
        """Returns what is drawn at random for each row in training."""
        if is_noisy:
            return "embeddings get noise (NEFTune)"
        for name, module, share in self._drops:
            if module.training and getattr(module, share) > 0:
                return f"{name} drops {getattr(module, share):g} of its values at random"
        for name, value in vars(self._config).items():
            is_random = RANDOM.search(name) and not OF_HEADS.search(name)
            if is_random and isinstance(value, float | int) and not isinstance(value, bool) and value > 0:
                return f"{name}={value:g} in the model's config makes rows random"
        return ""


def _of_batch(batch: Batch) -> str:
    """Returns that a batch has numbers of tokens that layers may compute from; empty if it has none."""
    tokens = tokens_of(batch)
    for name, value in batch.items():
        is_of_tokens = isinstance(value, torch.Tensor) and value.shape[:2] == tokens.shape and value.numel() > 1
        if is_of_tokens and name not in KNOWN_COLUMNS:
            return f"the batch has {name}, which may differ for equal tokens"
    return ""
