"""Kernel calls: tasks that one varlen attention call computes together."""

from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.planning.own import OwnParts
from distca_hf.planning.ranges import line_keys, rows_per_token
from distca_hf.planning.store import Store
from distca_hf.planning.task import ALL_HEADS, Tasks


class CallKind(Enum):
    """Where a call reads its queries and its keys, and how it masks.

                    queries              keys               mask
    LOCAL           tokens held here     tokens held here   causal
    PREFIX          tokens held here     store rows         none: all keys come before all queries
    REMOTE_QUERIES  guest rows           store rows         causal
    """

    LOCAL = auto()
    PREFIX = auto()
    REMOTE_QUERIES = auto()

    @property
    def is_causal(self) -> bool:
        """Whether masks are causal, aligned bottom-right; otherwise every query attends to all keys of its task."""
        return self is not CallKind.PREFIX


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One varlen attention call: consecutive query rows against consecutive key rows.

    Attributes:
        query_start, query_stop, key_start, key_stop: tokens or rows, see `CallKind`.
        cu_seqlens_q, cu_seqlens_k: `[tasks + 1]` offsets of each task in tokens, relative to the starts above.
        heads: head groups [first, last) that the call computes: of all groups of a token that is held here, of those
            side by side in a token's guest rows. Store rows hold these groups side by side, token after token.
    """

    kind: CallKind
    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray
    heads: tuple[int, int]

    @property
    def groups(self) -> int:
        """Head groups that the call computes: rows of a token in the store and among guests."""
        return self.heads[1] - self.heads[0]

    @property
    def pairs_of_tasks(self) -> IntArray:
        """`[tasks]` attended pairs x groups of heads."""
        queries, keys = np.diff(self.cu_seqlens_q), np.diff(self.cu_seqlens_k)
        pairs = queries * (2 * keys - queries + 1) // 2 if self.kind.is_causal else queries * keys
        return pairs * self.groups

    @property
    def pairs(self) -> int:
        """Attended pairs x groups of heads of the call."""
        return int(self.pairs_of_tasks.sum())


def own_calls(own: OwnParts) -> tuple[KernelCall, ...]:
    """Squares of own rows: one call for all neighbours of which the same heads are computed."""
    row, tokens, first, last = _heads_joined(own)
    order = np.lexsort((row, last, first))
    row, tokens, first, last = row[order], tokens[order], first[order], last[order]
    opens = np.ones(len(row), dtype=bool)
    opens[1:] = (first[1:] != first[:-1]) | (last[1:] != last[:-1]) | (row[1:] - row[:-1] != tokens[:-1])
    calls = []
    for begin, end in pairwise([*np.flatnonzero(opens).tolist(), len(row)]):
        offsets, at = _offsets(tokens[begin:end]), int(row[begin])
        stop = at + int(offsets[-1])
        heads = int(first[begin]), int(last[begin])
        calls.append(KernelCall(CallKind.LOCAL, at, stop, at, stop, offsets, offsets, heads))
    return tuple(calls)


def far_calls(own: OwnParts, store: Store, leg: int) -> tuple[KernelCall, ...]:
    """Own parts against what one leg brings of their prefixes, without a mask."""
    groups, chosen = own.head_groups, own.continued
    line = store.index_of(own.prefix_lines)
    first, stop = store.starts[line, leg], np.minimum(store.stops[line, leg], own.prefixes)
    some = np.flatnonzero(first < stop)
    some = some[np.argsort(own.head[chosen[some]] != ALL_HEADS, kind="stable")]
    chosen, line, first, stop = chosen[some], line[some], first[some], stop[some]
    head, row, tokens = own.head[chosen], own.token_row[chosen], own.tokens[chosen]
    per_token, first_key = rows_per_token(head, groups), store.offset[line, leg]
    opens = _opens(line, per_token, stop, store, leg)
    opens[1:] |= (row[1:] - row[:-1] != tokens[:-1]) | (head[1:] != head[:-1])
    calls = []
    for begin, end in pairwise([*np.flatnonzero(opens).tolist(), len(chosen)]):
        queries, keys = _offsets(tokens[begin:end]), _offsets((stop - first)[begin:end])
        query, key, rows, group = (int(x[begin]) for x in (row, first_key, per_token, head))
        calls.append(
            KernelCall(
                CallKind.PREFIX,
                query,
                query + int(queries[-1]),
                key,
                key + int(keys[-1]) * rows,
                queries,
                keys,
                heads=(0, groups) if group == ALL_HEADS else (group, group + 1),
            )
        )
    return tuple(calls)


def guest_calls(tasks: Tasks, guests: IntArray, guest_row: IntArray, store: Store, leg: int) -> tuple[KernelCall, ...]:
    """Tasks of one leg with queries of other ranks, in the order of their guest rows, against their stored causal
    prefixes."""
    groups = tasks.head_groups
    document, head, start, stop = (x[guests] for x in (tasks.document, tasks.head, tasks.start, tasks.stop))
    line, per_token = store.index_of(line_keys(document, head, groups)), rows_per_token(head, groups)
    first_key = store.offset[line, leg]
    opens = _opens(line, per_token, stop, store, leg)
    calls = []
    for begin, end in pairwise([*np.flatnonzero(opens).tolist(), len(guests)]):
        queries, keys = _offsets((stop - start)[begin:end]), _offsets(stop[begin:end])
        query, key, rows = (int(x[begin]) for x in (guest_row, first_key, per_token))
        query_stop, key_stop = query + int(queries[-1]) * rows, key + int(keys[-1]) * rows
        bounds = query, query_stop, key, key_stop
        calls.append(KernelCall(CallKind.REMOTE_QUERIES, *bounds, queries, keys, heads=(0, rows)))
    return tuple(calls)


def _heads_joined(own: OwnParts) -> tuple[IntArray, ...]:
    """Row, tokens, and groups [first, last) of parts that differ in their groups alone, which follow each other."""
    groups = own.head_groups
    order = np.lexsort((own.head, own.token_row, own.tokens))
    row, tokens, head = own.token_row[order], own.tokens[order], own.head[order]
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = (row[1:] != row[:-1]) | (tokens[1:] != tokens[:-1]) | (head[1:] != head[:-1] + 1)
    closes = np.append(opens[1:], True)[: len(order)]
    whole = head[opens] == ALL_HEADS
    first = np.where(whole, 0, head[opens])
    last = np.where(whole, groups, head[closes] + 1)
    return row[opens], tokens[opens], first, last


def _opens(line: IntArray, per_token: IntArray, stop: IntArray, store: Store, leg: int) -> np.ndarray:
    """Which readers of a leg need a new call: keys of a call follow each other, so all but its last task read all that
    the leg brings, each of another line. An earlier reader of a line that has several gets a call of its own, on the
    beginning of the same keys."""
    reads_all = stop == store.stops[line, leg]
    after = store.offset[line, leg] + (store.stops - store.starts)[line, leg] * per_token
    follows = store.offset[line, leg][1:] == after[:-1]
    opens = np.ones(len(line), dtype=bool)
    opens[1:] = (per_token[1:] != per_token[:-1]) | ~reads_all[:-1] | (line[1:] == line[:-1]) | ~follows
    return opens


def _offsets(lengths: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)])
