"""Kernel calls: tasks that one varlen attention call computes together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.planning.own import OwnParts
from distca_hf.planning.ranges import line_keys, rows_per_token
from distca_hf.planning.store import Store
from distca_hf.planning.task import ALL_HEADS, Tasks


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One varlen attention call: consecutive query rows against consecutive key rows.

    Attributes:
        query_start, query_stop: own tokens, or guest rows.
        key_start, key_stop: own tokens, or store rows.
        cu_seqlens_q, cu_seqlens_k: `[tasks + 1]` offsets of each task in tokens, relative to the starts above.
        heads: groups [first, last) that the call computes, of own queries; None if queries are guests.
        stored_rows_per_token: groups of heads side by side in guest rows and in the store; 0 if keys are own.
        causal: aligned bottom-right; otherwise every query attends to all keys of its task.
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray
    heads: tuple[int, int] | None = None
    stored_rows_per_token: int = 0
    causal: bool = True

    @property
    def groups(self) -> int:
        """Groups of heads that the call computes."""
        return self.stored_rows_per_token if self.heads is None else self.heads[1] - self.heads[0]

    @property
    def pairs_of_tasks(self) -> IntArray:
        """`[tasks]` attended pairs x groups of heads."""
        queries, keys = np.diff(self.cu_seqlens_q), np.diff(self.cu_seqlens_k)
        pairs = queries * (2 * keys - queries + 1) // 2 if self.causal else queries * keys
        return pairs * self.groups

    @property
    def pairs(self) -> int:
        """Attended pairs x groups of heads of the call."""
        return int(self.pairs_of_tasks.sum())

    def part(self, first: int, stop: int) -> "KernelCall":
        """Some of the tasks. Queries and keys are the same own rows."""
        offsets = self.cu_seqlens_q[first : stop + 1]
        begin, end = self.query_start + int(offsets[0]), self.query_start + int(offsets[-1])
        offsets = offsets - offsets[0]
        return replace(
            self,
            query_start=begin,
            query_stop=end,
            key_start=begin,
            key_stop=end,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
        )


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
        calls.append(KernelCall(at, stop, at, stop, offsets, offsets, (int(first[begin]), int(last[begin]))))
    return tuple(calls)


def far_calls(own: OwnParts, store: Store) -> tuple[KernelCall, ...]:
    """Own parts against their stored prefixes, without a mask."""
    groups, chosen = own.head_groups, own.continued
    chosen = chosen[np.argsort(own.head[chosen] != ALL_HEADS, kind="stable")]
    document, head, prefix = own.document[chosen], own.head[chosen], own.start[chosen]
    row, tokens, per_token = own.token_row[chosen], own.tokens[chosen], rows_per_token(head, groups)
    first_key = store.row(document, head, np.zeros_like(prefix))
    apart = np.ones(len(chosen), dtype=bool)
    apart[1:] = (row[1:] - row[:-1] != tokens[:-1]) | (head[1:] != head[:-1])
    opens = apart | _opens(line_keys(document, head, groups), per_token, prefix, store)
    calls = []
    for begin, end in pairwise([*np.flatnonzero(opens).tolist(), len(chosen)]):
        queries, keys = _offsets(tokens[begin:end]), _offsets(prefix[begin:end])
        query, key, rows = int(row[begin]), int(first_key[begin]), int(per_token[begin])
        group = int(head[begin])
        calls.append(
            KernelCall(
                query,
                query + int(queries[-1]),
                key,
                key + int(keys[-1]) * rows,
                queries,
                keys,
                heads=(0, groups) if group == ALL_HEADS else (group, group + 1),
                stored_rows_per_token=rows,
                causal=False,
            )
        )
    return tuple(calls)


def guest_calls(tasks: Tasks, guests: IntArray, guest_row: IntArray, store: Store) -> tuple[KernelCall, ...]:
    """Tasks with queries of other ranks, in the order of their guest rows, against their stored causal prefixes."""
    groups = tasks.head_groups
    document, head, start, stop = (x[guests] for x in (tasks.document, tasks.head, tasks.start, tasks.stop))
    per_token = rows_per_token(head, groups)
    first_key = store.row(document, head, np.zeros_like(start))
    opens = _opens(line_keys(document, head, groups), per_token, stop, store)
    calls = []
    for begin, end in pairwise([*np.flatnonzero(opens).tolist(), len(guests)]):
        queries, keys = _offsets((stop - start)[begin:end]), _offsets(stop[begin:end])
        query, key, rows = int(guest_row[begin]), int(first_key[begin]), int(per_token[begin])
        query_stop, key_stop = query + int(queries[-1]) * rows, key + int(keys[-1]) * rows
        calls.append(KernelCall(query, query_stop, key, key_stop, queries, keys, stored_rows_per_token=rows))
    return tuple(calls)


def halves(calls: Sequence[KernelCall]) -> tuple[tuple[KernelCall, ...], tuple[KernelCall, ...]]:
    """Own calls in two parts of about equal work; a task stays whole."""
    total, done = sum(call.pairs for call in calls), 0
    for number, call in enumerate(calls):
        upto = done + np.concatenate([[0], np.cumsum(call.pairs_of_tasks)])
        done = int(upto[-1])
        if 2 * done < total:
            continue
        cut = int(np.argmin(np.abs(2 * upto - total)))
        early = [*calls[:number], *([call.part(0, cut)] if cut else [])]
        late = [*([call.part(cut, len(upto) - 1)] if cut < len(upto) - 1 else []), *calls[number + 1 :]]
        return tuple(early), tuple(late)
    return (), tuple(calls)


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


def _opens(line: IntArray, per_token: IntArray, prefix: IntArray, store: Store) -> np.ndarray:
    """Which readers of stored prefixes need a new call: keys of a call follow each other, so all but its last task
    read whole stored prefixes, each of another document. An earlier reader of a document that has several gets a call
    of its own, on the beginning of the same prefix."""
    opens = np.ones(len(line), dtype=bool)
    whole = prefix == store.prefix_of(line)
    opens[1:] = (per_token[1:] != per_token[:-1]) | ~whole[:-1] | (line[1:] == line[:-1]) | ~_follows(line, store)
    return opens


def _follows(line: IntArray, store: Store) -> np.ndarray:
    """Whether the stored prefix of each line but the first begins where that of the one before ends."""
    at = np.searchsorted(store.lines, line)
    rows = store.prefix[at] * rows_per_token(line % (store.head_groups + 1) + ALL_HEADS, store.head_groups)
    return store.offset[at][1:] == store.offset[at][:-1] + rows[:-1]


def _offsets(lengths: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)])
