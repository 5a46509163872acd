"""Whole: places documents without cutting them, for models with a state that cannot travel.

    longest first      | d0 ........... | d1 ....... | d2 ....... |      to the rank with least work, up to the mean
    short ones last    | d0 ........... | d1 .... s1 | d2 .... s0 |      to the rank with fewest tokens

Ranks' tokens are equal to within a short document. Their attention work is not, and tasks move afterwards
(`planning.rebalance`). A document is left over if no rank has room for it.
"""

from heapq import heapify, heapreplace

import numpy as np

from distca_hf.arrays import BoolArray, IntArray, ceil_div, offsets, sum_by
from distca_hf.cost import causal_pairs_of
from distca_hf.errors import PackingError
from distca_hf.layout import Layout, check_document_tokens


# Least attention work of a long document, as a fraction of the ranks' mean work. Shorter ones even out tokens.
LONG_SHARE = 0.01
# Marks a document that is left over.
LEFT_OVER = -1


def deal_whole(document_tokens: IntArray, num_ranks: int, tokens_per_rank: int) -> IntArray:
    """Deals whole documents to ranks.

    Args:
        document_tokens: `[documents]` lengths.
        tokens_per_rank: most tokens of a rank.

    Returns:
        `[documents]` rank of each document; `LEFT_OVER` if no rank has room. Equally long documents are dealt in
        order.
    """
    mean_tokens = ceil_div(int(document_tokens.sum()), num_ranks)
    level = _deal(document_tokens, num_ranks, tokens_per_rank, min(mean_tokens, tokens_per_rank))
    if np.all(level != LEFT_OVER):
        return level
    to_the_brim = _deal(document_tokens, num_ranks, tokens_per_rank, tokens_per_rank)
    return min(level, to_the_brim, key=lambda ranks: int(document_tokens[ranks == LEFT_OVER].sum()))


def _deal(document_tokens: IntArray, num_ranks: int, tokens_per_rank: int, level_tokens: int) -> IntArray:
    """Deals as `deal_whole` does. A long document lifts a rank above a level only if it would lift any of them."""
    ranks = np.full(len(document_tokens), LEFT_OVER, dtype=np.int64)
    longest_first = np.argsort(-document_tokens, kind="stable")
    pairs = causal_pairs_of(np.zeros_like(document_tokens), document_tokens)
    is_long = pairs[longest_first] > LONG_SHARE * pairs.sum() / num_ranks
    num_long = int(np.count_nonzero(is_long))

    # 1. Long documents, each to the rank with least work that stays below the level, else to the one with fewest
    # tokens: if that has no room, no rank has.
    tokens, work = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks)
    for document in longest_first[:num_long].tolist():
        length = int(document_tokens[document])
        below = np.flatnonzero(tokens + length <= level_tokens)
        rank = int(below[np.lexsort((tokens[below], work[below]))[0]] if len(below) else tokens.argmin())
        if tokens[rank] + length <= tokens_per_rank:
            ranks[document] = rank
            tokens[rank] += length
            work[rank] += float(pairs[document])

    # 2. Short ones, each to the rank with fewest tokens.
    fewest = [(held, rank) for rank, held in enumerate(tokens.tolist())]
    heapify(fewest)
    for document in longest_first[num_long:].tolist():
        held, rank = fewest[0]
        length = int(document_tokens[document])
        if held + length <= tokens_per_rank:
            ranks[document] = rank
            heapreplace(fewest, (held + length, rank))
    return ranks


def fit_whole(document_tokens: IntArray, num_ranks: int, tokens_per_rank: int) -> BoolArray:
    """Returns which of `[documents]` have room together on ranks if all stay whole."""
    fitting = np.arange(len(document_tokens))
    while True:
        ranks = deal_whole(document_tokens[fitting], num_ranks, tokens_per_rank)
        left_over = ranks == LEFT_OVER
        if not left_over.any():
            fits: BoolArray = np.isin(np.arange(len(document_tokens)), fitting)
            return fits
        # Without these, the others may be dealt differently.
        fitting = fitting[~left_over]


def place_whole(document_tokens: IntArray, num_ranks: int, tokens_per_rank: int) -> Layout:
    """Places whole documents.

    Args:
        document_tokens: `[documents]` lengths.
        tokens_per_rank: most tokens of a rank.

    Returns:
        A layout without padding.

    Raises:
        PackingError: a length is out of range, or no rank has room for a document.
    """
    lengths = check_document_tokens(document_tokens)
    ranks = deal_whole(lengths, num_ranks, tokens_per_rank)
    left = np.flatnonzero(ranks == LEFT_OVER)
    if len(left):
        raise PackingError(
            f"document {left[0]} of {lengths[left[0]]} tokens stays whole, and none of {num_ranks} ranks of "
            f"{tokens_per_rank} tokens has room for it; leave it for another micro-batch"
        )
    order = np.argsort(ranks, kind="stable")
    return Layout(
        document_tokens=lengths,
        segment_document=order,
        segment_start=np.zeros(len(order), dtype=np.int64),
        segment_stop=lengths[order],
        rank_segments=offsets(np.bincount(ranks, minlength=num_ranks)),
        rank_rows=sum_by(ranks, lengths, num_ranks),
    )


def surplus_work(layout: Layout) -> int:
    """Returns the attended pairs that ranks hold above the mean, which have to move."""
    work = layout.rank_work
    return int(np.maximum(work - work.mean(), 0).sum())
