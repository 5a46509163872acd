"""Sorted packs: within one optimizer step it changes no gradient which pack runs when, so packs of equal cost run at
the same time.

Documents fill packs one after the other, as many as ranks and micro-steps hold; a document cut at a pack's border goes
on as a new one. Packs are sorted by attention work and dealt out micro-step by micro-step. No token and no task moves.
"""

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline, nothing_sent
from distca_hf.analysis.baselines.sequential_fill import fill_groups
from distca_hf.cost import IntArray, causal_pairs_of


def sorted_packs(document_tokens: IntArray, num_ranks: int, micro_steps: int) -> list[Baseline]:
    """The micro-steps of one optimizer step, packs of most work first.

    Args:
        document_tokens: `[documents]` lengths of all micro-steps together, in tokens.
        num_ranks: ranks; each runs one pack per micro-step.
        micro_steps: micro-steps of an optimizer step. With one there is nothing to sort.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    packs = fill_groups(document_tokens, num_ranks * micro_steps)
    tokens = np.array([int(pack.sum()) for pack in packs], dtype=np.int64)
    work = np.array([int(causal_pairs_of(np.zeros_like(pack), pack).sum()) for pack in packs], dtype=np.int64)
    order = np.argsort(-work, kind="stable").reshape(micro_steps, num_ranks)
    return [Baseline("sorted_packs", work[packs], tokens[packs], nothing_sent(num_ranks)) for packs in order]
