"""States: sizes of the states that mixers exchange for cut documents."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distca_hf.analysis.decoder_size import HALF_BYTES, SINGLE_BYTES
from distca_hf.layout import Layout
from distca_hf.planning.folds import MOST_HEADS, Fold, cheaper
from distca_hf.planning.fragments import Fragments


if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StateSize:
    """What every mixer of a model exchanges for cut documents in a forward pass.

    Attributes:
        mixers: number of mixers.
        heads: of a state, which ranks of a document may divide.
        head_bytes: of a head's summary (M, B) of a fragment; 0 for a convolution, which has no other state.
        halo_tokens, halo_bytes: tokens before a fragment that convolutions read, and bytes of each.
    """

    mixers: int
    heads: int
    head_bytes: int
    halo_tokens: int
    halo_bytes: int

    def most_bytes(self, layout: Layout) -> int:
        """Returns the most bytes that a rank sends or receives in a mixer. Adds up several exchanges even if their
        busiest ranks differ, and assumes that fragments are longer than a halo."""
        cut = Fragments.of(layout, 0, self.halo_tokens).cut
        if not len(cut.rank):
            return 0
        sends, receives = cut.rank[cut.summary_number >= 0], cut.rank[cut.state_number >= 0]
        halos = max(int(np.bincount(ranks).max()) for ranks in (sends, receives)) * self.halo_tokens * self.halo_bytes
        fold = cheaper(Fold.of(cut, 0), lambda: Fold.of(cut, 0, self.heads), self.heads, self.head_bytes)
        return fold.busiest * self.head_bytes * (self.heads if fold.heads is None else 1) + halos


# Heads, and numbers of a head's summary (`integrations.models.state_rules`), of a mixer whose code calls a function.
SUMMARIES: dict[str, Callable[[Any], tuple[int, int]]] = {
    "torch_chunk_gated_delta_rule": lambda of: (of.num_v_heads, of.head_k_dim * (of.head_k_dim + of.head_v_dim)),
    "chunk_kimi_delta_attention": lambda of: (of.num_heads, of.head_dim * 2 * of.head_dim),
    "mamba2_chunk_scan": lambda of: (of.num_heads, of.head_dim * of.ssm_state_size + 1),
    "mamba_selective_scan": lambda of: _of_channels(of.intermediate_size, 2 * of.ssm_state_size),
}


def _of_channels(channels: int, numbers: int) -> tuple[int, int]:
    """Returns heads that are groups of channels, and numbers of each."""
    heads = math.gcd(channels, MOST_HEADS)
    return heads, channels // heads * numbers


def state_size_of(model: "PreTrainedModel") -> StateSize | None:
    """Returns what mixers exchange, taking all as the largest, in bf16, with states in fp32. None if there are no
    mixers, documents stay whole, or a mixer has other names for its sizes."""
    from distca_hf.integrations.models.carried_mixers import CONVOLUTION, REPLACED
    from distca_hf.integrations.models.mixers import halo_tokens_for, mixers_of

    halo_tokens, mixers, sizes = halo_tokens_for(model), mixers_of(model).values(), []
    if halo_tokens is None:
        return None
    for mixer in mixers:
        called = (REPLACED.keys() - {CONVOLUTION}) & inspect.unwrap(type(mixer).forward).__globals__.keys()
        try:
            heads, numbers = next(SUMMARIES[name](mixer) for name in SUMMARIES if name in called) if called else (1, 0)
        except (AttributeError, StopIteration):
            return None
        channels = sum(getattr(part, "in_channels", 0) for part in mixer.modules())
        sizes.append(StateSize(len(mixers), heads, SINGLE_BYTES * numbers, halo_tokens, HALF_BYTES * channels))
    return max(sizes, key=lambda size: size.heads * size.head_bytes + size.halo_bytes)
