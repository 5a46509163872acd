"""Positions: how long documents a model can take."""

import re

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from distca_hf.errors import UnsupportedAttentionError
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Names of modules that look positions up in a table.
TABLE = re.compile(r"(^|\.)(wpe|embed_positions?|position_embeddings?|positions?_embed|pos_emb(ed)?)$")


def longest_rotary_tokens(config: PreTrainedConfig) -> int | None:
    """Returns the longest document whose rotary frequencies do not depend on how long the longest one of a batch is;
    None if they never do. Transformers picks them by the largest position that a rank holds: ranks would not agree.

    Args:
        config: of the text model.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    limits = []
    for parameters in (rotary, *(part for part in rotary.values() if isinstance(part, dict))):
        if parameters.get("rope_type") == "dynamic":
            limits.append(0)
        elif parameters.get("rope_type") == "longrope":
            original = parameters.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None) or 0)
    return min(limits, default=None)


def rotary_refusal(limit: int, longest_document_tokens: int) -> str:
    """Returns why documents of this length cannot be trained with rotary embeddings that have this limit."""
    if limit == 0:
        return (
            "its rotary frequencies (rope_type 'dynamic') change with the longest document of a batch, and ranks see "
            "parts of it; use 'yarn' or 'default'"
        )
    return (
        f"its rotary frequencies (rope_type 'longrope') change with a document of more than {limit} tokens, and they "
        f"have up to {longest_document_tokens}; use 'yarn' or 'default', or split them"
    )


class PositionLimits:
    """Longest documents that a model can take, and that it was trained with.

    Args:
        model: a Transformers model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        tables = [
            module.num_embeddings - int(getattr(module, "offset", 0))
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and TABLE.search(name)
        ]
        self._table = min(tables, default=None)
        self._rotary = longest_rotary_tokens(config)
        self._trained: int | None = getattr(config, "max_position_embeddings", None)
        self._warned = False

    def check(self, longest_document_tokens: int, where: str) -> None:
        """Checks the length of a document; one that is longer than the model was trained with is a warning, once.

        Raises:
            UnsupportedAttentionError: it has positions that the model does not have, or that depend on its batch.
        """
        longest = longest_document_tokens
        if self._rotary is not None and longest > self._rotary:
            raise UnsupportedAttentionError(f"{where}: {rotary_refusal(self._rotary, longest)}")
        if self._table is not None and longest > self._table:
            raise UnsupportedAttentionError(
                f"{where}: a document has {longest} tokens, and the model's table of position embeddings ends at "
                f"{self._table}; split documents (overlong='split' with fewer tokens_per_rank), or remove longer ones"
            )
        if self._trained is not None and longest > self._trained and not self._warned:
            self._warned = True
            log.warning(
                "%s: a document has %d tokens, and the model was made for %d (max_position_embeddings): its rotary "
                "embeddings have not seen such positions. Scale them (rope_parameters, 'yarn'), or split documents",
                where,
                longest,
                self._trained,
            )
