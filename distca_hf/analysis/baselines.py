"""Baseline: work, tokens and bytes of the ranks in one micro-step, and figures of an optimizer step of them.

Plans and baselines are counted alike. Groups of ranks, where a baseline has them, are filled in order. The baselines
here are ordinary ways to train, without a planner: a group of ranks shares every document, or packing alone balances.
They are written from their papers.

| function | owner ranks of tokens | ranks that compute |
|---|---|---|
| context_parallel | every document on all ranks of a group, zigzag | every rank its tokens, all keys gathered |
| ulysses | ranks filled in order | every rank of a group some heads of all its tokens |
| whole_documents | longest document first to the least loaded rank | every rank its documents |
| sorted_packs | packs filled in order, sorted by cost over an optimizer step | every rank its pack |

Each is one pure function from lengths to a `Baseline` (the last: one for each micro-step).

**Context parallelism** (Llama 3, arXiv 2407.21783, section 3.3.2; for each document separately as in WLB-LLM, arXiv
2503.17924). A document is cut into two chunks per rank. Rank r has the r-th chunk and the r-th from the end, so that
all ranks have its mean cost. Before attention each rank gathers keys and values of all tokens of the group, needed or
not. Balance is perfect, and bytes grow with the group.

    document    | 0 | 1 | 2 | 2 | 1 | 0 |      ranks of its chunks, in a group of three

**Ulysses** (arXiv 2309.14509, section 3). Tokens are divided among a group of ranks; for attention the heads are
divided instead. One all-to-all gives every rank some heads of all tokens of the group, another one returns outputs.
All ranks of a group have equal work if they can have equally many heads. Work differs between groups, because their
documents do. A key and value head is sent to every rank that has one of its query heads.

**Whole documents**: longest processing time first (Graham 1969), the reference for packing without cuts. Documents,
the longest first, each go to the rank with the least work so far. Some rank has the work of the longest document.
Ranks hold unequal tokens, possibly more than they have room for.

**Sorted packs**: the order of packs within one optimizer step changes no gradient, so packs of equal cost run at the
same time. Documents fill packs in order; a document cut at a pack's border continues as a new one. Packs are sorted by
attention work and assigned micro-step by micro-step.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from distca_hf.arrays import IntArray, ceil_div
from distca_hf.cost import TokenBytes, causal_pairs, causal_pairs_of, imbalance
from distca_hf.errors import ConfigError
from distca_hf.layout import check_document_tokens
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import bytes_between
from distca_hf.topology import Topology


@dataclass(frozen=True, eq=False)
class Baseline:
    """One global micro-batch, as a baseline would run it.

    Attributes:
        name: its short name, a key of the JSON output.
        work: `[ranks]` attended pairs each rank computes, times `head_parts`.
        tokens: `[ranks]` tokens each rank holds.
        bytes_between: `[source, destination]` bytes sent in the forward pass of one layer; nothing to oneself.
        head_parts: parts that heads are divided into, of which a rank may compute some; 1 if it computes all heads.
    """

    name: str
    work: IntArray
    tokens: IntArray
    bytes_between: IntArray
    head_parts: int = 1

    @classmethod
    def of_plan(cls, name: str, plan: Plan, token_bytes: TokenBytes) -> "Baseline":
        """Returns work, tokens and bytes of a plan.

        Queries and outputs of tasks that move are sent once. Keys and values are sent once per document and server.
        """
        sent = bytes_between(plan, token_bytes)
        return cls(name, plan.work, plan.layout.rank_tokens, sent, plan.tasks.head_groups)

    @cached_property
    def imbalance(self) -> float:
        """Max/mean of `work`; 1.0 is perfect."""
        return imbalance(self.work)


def nothing_sent(num_ranks: int) -> IntArray:
    """Returns `[source, destination]` zeros: the bytes of a baseline that sends nothing."""
    return np.zeros((num_ranks, num_ranks), dtype=np.int64)


@dataclass(frozen=True)
class Figures:
    """Balance and bytes of all micro-steps of an optimizer step together.

    Attributes:
        tokens_min, tokens_max: tokens of the emptiest and the fullest rank in any micro-step.
        imbalance: max/mean work, 1.0 is perfect. For several micro-steps it is the sum of the heaviest ranks over the
            sum of the means.
        bytes_total: bytes between ranks in the forward pass of one layer.
        bytes_max_rank: the most of these bytes that one rank sends or receives; summed over micro-steps.
        bytes_internode_max: the same for bytes between nodes.
    """

    tokens_min: int
    tokens_max: int
    imbalance: float
    bytes_total: int
    bytes_max_rank: int
    bytes_internode_max: int


def figures_of(micro_steps: Sequence[Baseline], topology: Topology) -> Figures:
    """Returns the figures of the micro-steps of one optimizer step."""
    # In pairs, exactly: micro-steps of one plan may divide heads into other numbers of parts.
    total_pairs = sum(Fraction(int(step.work.sum()), step.head_parts) for step in micro_steps)
    heaviest_pairs = sum(Fraction(int(step.work.max()), step.head_parts) for step in micro_steps)
    crosses = topology.node_of[:, None] != topology.node_of[None, :]
    return Figures(
        tokens_min=min(int(step.tokens.min()) for step in micro_steps),
        tokens_max=max(int(step.tokens.max()) for step in micro_steps),
        imbalance=float(heaviest_pairs * topology.num_ranks / total_pairs) if total_pairs else 1.0,
        bytes_total=sum(int(step.bytes_between.sum()) for step in micro_steps),
        bytes_max_rank=sum(largest_rank_bytes(step.bytes_between) for step in micro_steps),
        bytes_internode_max=sum(largest_rank_bytes(step.bytes_between * crosses) for step in micro_steps),
    )


def largest_rank_bytes(bytes_between: np.ndarray) -> int:
    """Returns the most bytes that any rank sends or receives."""
    return int(max(bytes_between.sum(axis=1).max(), bytes_between.sum(axis=0).max()))


def fill_groups(document_tokens: IntArray, num_groups: int) -> list[IntArray]:
    """Fills groups in order with equal tokens, and returns the lengths of each group's documents.

    Groups attend separately: a document cut at the border of two groups continues as a new document. That is less
    attention work than uncut documents have, to the advantage of baselines with groups.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    layout = fill_in_order(document_tokens, num_groups)
    return np.split(layout.segment_tokens, layout.rank_segments[1:-1])


def groups_of_ranks(document_tokens: IntArray, num_ranks: int, group_ranks: int) -> Iterator[tuple[slice, IntArray]]:
    """Yields the ranks of each group of neighbours, and the lengths of its documents.

    The last group may have fewer ranks.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    first_ranks = range(0, num_ranks, group_ranks)
    for first, documents in zip(first_ranks, fill_groups(document_tokens, len(first_ranks)), strict=True):
        yield slice(first, min(first + group_ranks, num_ranks)), documents


def context_parallel(
    document_tokens: IntArray, num_ranks: int, token_bytes: TokenBytes, group_ranks: int | None = None
) -> Baseline:
    """Runs documents under zigzag context parallelism in groups of `group_ranks` neighbours, or over all ranks.

    Args:
        document_tokens: `[documents]` lengths, in tokens.
        num_ranks: ranks; the last group may have fewer than the others.
        token_bytes: bytes of a token.
        group_ranks: ranks that share their documents.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    group = min(group_ranks or num_ranks, num_ranks)
    work, tokens = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    sent = nothing_sent(num_ranks)
    for ranks, documents in groups_of_ranks(document_tokens, num_ranks, group):
        work[ranks], tokens[ranks] = _zigzag(documents, ranks.stop - ranks.start)
        sent[ranks, ranks] = tokens[ranks, None] * token_bytes.key_value
    np.fill_diagonal(sent, 0)
    return Baseline("zigzag_cp" if group == num_ranks else f"zigzag_cp_{group}", work, tokens, sent)


def _zigzag(document_tokens: IntArray, num_ranks: int) -> tuple[IntArray, IntArray]:
    """Returns `[ranks]` work and tokens of the ranks of one group.

    If chunks do not divide a length, some chunks are a token longer. Implementations pad; here every document starts
    one rank further than the document before, so that the longer chunks spread over all ranks.
    """
    chunks = 2 * num_ranks
    work, tokens = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    turn = np.arange(len(document_tokens))
    for chunk in range(chunks):
        start, stop = document_tokens * chunk // chunks, document_tokens * (chunk + 1) // chunks
        rank = (min(chunk, chunks - 1 - chunk) + turn) % num_ranks
        np.add.at(work, rank, causal_pairs_of(start, stop))
        np.add.at(tokens, rank, stop - start)
    return work, tokens


def ulysses(
    document_tokens: IntArray,
    num_ranks: int,
    token_bytes: TokenBytes,
    heads: int,
    key_value_heads: int,
    group_ranks: int | None = None,
) -> Baseline:
    """Runs documents under Ulysses in groups of `group_ranks` neighbours, or over all ranks.

    Ranks beyond the number of heads are idle.

    Args:
        document_tokens: `[documents]` lengths, in tokens.
        num_ranks: ranks; the last group may have fewer than the others.
        token_bytes: bytes of a token, of all heads together.
        heads, key_value_heads: query heads, and heads of keys and values.
        group_ranks: ranks that share their documents.

    Raises:
        ConfigError: query heads are not a multiple of key and value heads.
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    if min(heads, key_value_heads) < 1 or heads % key_value_heads:
        raise ConfigError(f"{heads} query heads are not a multiple of {key_value_heads} key and value heads")
    group = min(group_ranks or num_ranks, num_ranks)
    work, tokens = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    sent = nothing_sent(num_ranks)
    for ranks, documents in groups_of_ranks(document_tokens, num_ranks, group):
        # 1. Heads of each rank, as equally many as possible.
        borders = np.arange(ranks.stop - ranks.start + 1)
        of_query = np.diff(heads * borders // borders[-1])
        of_key_value = _key_value_heads(heads * borders // borders[-1], heads // key_value_heads)
        # 2. Work: all pairs of the group, times heads. Tokens: equal.
        pairs = int(causal_pairs_of(np.zeros_like(documents), documents).sum())
        work[ranks] = pairs * of_query
        tokens[ranks] = np.diff(int(documents.sum()) * borders // borders[-1])
        # 3. Bytes of one token to each rank, and of its outputs back.
        there = of_query * token_bytes.query // heads + of_key_value * token_bytes.key_value // key_value_heads
        back = of_query * token_bytes.output // heads
        sent[ranks, ranks] = np.outer(tokens[ranks], there) + np.outer(back, tokens[ranks])
    np.fill_diagonal(sent, 0)
    return Baseline("ulysses" if group == num_ranks else f"ulysses_{group}", work, tokens, sent, head_parts=heads)


def _key_value_heads(borders: IntArray, queries_per_key: int) -> IntArray:
    """Returns `[ranks]` numbers of key and value heads that query heads [borders[r], borders[r + 1]) attend."""
    begin, end = borders[:-1], borders[1:]
    return np.where(end > begin, ceil_div(end, queries_per_key) - begin // queries_per_key, 0)


def whole_documents(document_tokens: IntArray, num_ranks: int, token_bytes: TokenBytes) -> Baseline:
    """Assigns whole documents to the least loaded rank, the longest first; of equally loaded ranks to the first.

    Args:
        document_tokens: `[documents]` lengths, in tokens.
        num_ranks: ranks, without a limit of tokens.
        token_bytes: unused: nothing is sent. All baselines have this argument.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    document_tokens = check_document_tokens(document_tokens)
    held = [document_tokens[numbers] for numbers in assign_whole_documents(document_tokens, num_ranks)]
    work = np.array([causal_pairs_of(np.zeros_like(lengths), lengths).sum() for lengths in held])
    return Baseline("lpt", work, np.array([lengths.sum() for lengths in held]), nothing_sent(num_ranks))


def assign_whole_documents(document_tokens: IntArray, num_ranks: int) -> list[IntArray]:
    """Returns the numbers of the documents of each rank, the longest first; documents of one length stay in order.

    Args:
        document_tokens: `[documents]` lengths, in tokens.
        num_ranks: ranks, without a limit of tokens.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    least = [(0, rank) for rank in range(num_ranks)]  # a heap: the least loaded rank is first
    numbers: list[list[int]] = [[] for _ in range(num_ranks)]
    for number in np.argsort(-check_document_tokens(document_tokens), kind="stable").tolist():
        load, rank = least[0]
        heapq.heapreplace(least, (load + causal_pairs(0, int(document_tokens[number])), rank))
        numbers[rank].append(number)
    return [np.array(held, dtype=np.int64) for held in numbers]


def sorted_packs(document_tokens: IntArray, num_ranks: int, micro_steps: int) -> list[Baseline]:
    """Returns the micro-steps of one optimizer step, packs of most work first.

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
