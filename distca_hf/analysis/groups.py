"""Groups: documents that begin with the same tokens, such as the completions of a prompt, in a file of lengths.

| length | group | prefix_tokens | |
|---|---|---|---|
| 17408 | a | 16384 | |
| 16900 | a | 16384 | begins with the same 16,384 tokens |
| 800 | | | begins like no other |

Groups are nested if documents are branches of a tree. Then both columns have lists, from the root on:

| length | group | prefix_tokens | |
|---|---|---|---|
| 9000 | [t, x] | [4096, 7000] | |
| 9500 | [t, x] | [4096, 7000] | begins with the same 7,000 tokens |
| 8000 | [t] | [4096] | begins with the first 4,096 of these |

Batches are dealt as TRL's GRPO and RLOO trainers deal them: groups in random order, and in an optimizer step each rank
gets consecutive rows, which it shuffles before it divides them into micro-batches. So a group may be on two ranks.
Trainers that keep the order of rows share at least as much.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.errors import PackingError
from distca_hf.prefixes import LEAST_SAVED, SharedPrefixes, num_hashes


# Columns of a group's name, and of the tokens with which its documents begin.
GROUP_COLUMN, PREFIX_COLUMN = GROUP_COLUMNS = "group", "prefix_tokens"
# Why placed batches share nothing.
UNSHARED = "placed batches compute every prefix again, and your own batches (--batch-size) would not"
# Low bits of a hash: which of its document's hashes it is. Higher bits number the group or document.
TOKEN_BITS = 32


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of some documents.

    Attributes:
        paths: `[documents]` names of the groups of each document, from the root on; empty for a document that
            begins like no other. Names of nested groups may be used again in other groups.
        prefix_tokens: `[documents]` tokens with which all documents of each of these groups begin.
    """

    paths: Sequence[tuple[str, ...]]
    prefix_tokens: Sequence[tuple[int, ...]]

    @classmethod
    def of_columns(cls, columns: Mapping[str, Sequence[object]], tokens: IntArray, source: str) -> Self | None:
        """Returns the groups of documents, from values of the `GROUP_COLUMNS` that their file has; None if no
        document has a prefix. `tokens`: `[documents]` lengths. `source`: the file, for errors.

        Raises:
            PackingError: a row has a prefix and no group, a group and no prefix, a prefix longer than its
                document, another prefix than its group, or a nested group with no longer prefix than the group
                around it.
        """
        if not any(map(_cells, columns.get(PREFIX_COLUMN, ()))):  # a list of cells for each row would take 64 bytes
            return None
        given_prefixes = map(_cells, columns[PREFIX_COLUMN])
        given_groups = map(_cells, columns.get(GROUP_COLUMN, [None] * len(tokens)))
        first: dict[tuple[str, ...], tuple[int, int]] = {}
        paths, prefixes = list[tuple[str, ...]](), list[tuple[int, ...]]()
        for row, (groups, counts, length) in enumerate(
            zip(given_groups, given_prefixes, tokens.tolist(), strict=True)
        ):
            path, prefix = _row(groups, counts, length, f"{source}: row {row}")
            for depth, count in enumerate(prefix, start=1):
                before, of_group = first.setdefault(path[:depth], (row, count))
                if count != of_group:
                    raise PackingError(
                        f"{source}: row {row} of {GROUP_COLUMN} {_named(path[:depth])} has {PREFIX_COLUMN} {count}, "
                        f"and row {before} of the same {GROUP_COLUMN} {of_group}; documents of a group have one "
                        "prefix, the one that all of them begin with (training shares longer ones, too)"
                    )
            paths.append(path)
            prefixes.append(prefix)
        return cls(paths, prefixes)

    def of(self, rows: IntArray) -> "Groups":
        paths, prefixes = ([of_all[row] for row in rows.tolist()] for of_all in (self.paths, self.prefix_tokens))
        return Groups(paths, prefixes)

    @property
    def counts(self) -> Counter[str]:
        """Documents of each group with several of them, nested ones included."""
        return Counter(
            {name: count for name, count in Counter(path[0] for path in self.paths if path).items() if count > 1}
        )

    def in_words(self, unshared: str) -> str:
        """Returns a sentence: how many documents begin alike, and whether layers compute that once.
        `unshared`: why not; empty if they do."""
        counts = self.counts
        ending = (
            f", but share no prefixes: {unshared}"
            if unshared
            else "; distca's ways compute their prefixes once (placed loss: if these have no labels to learn)"
        )
        return f"{counts.total():,} documents in {len(counts):,} groups begin alike{ending}."

    def as_json(self, unshared: str) -> dict[str, object]:
        counts = self.counts
        return {"groups": len(counts), "documents": counts.total(), "unshared": unshared or None}

    def dealt(self, rng: np.random.Generator, num_ranks: int, micro_steps: int, batch_size: int) -> IntArray:
        """Deals the documents of an epoch as TRL's GRPO trainer does. Returns int64 `[rows]` documents of all whole
        optimizer steps: micro-batch after micro-batch, rank after rank, `batch_size` of each."""
        first: dict[str, int] = {}
        of_group = [first.setdefault(path[0], row) if path else row for row, path in enumerate(self.paths)]
        groups, number = np.unique(of_group, return_inverse=True)
        order = np.argsort(rng.permutation(len(groups))[number], kind="stable")
        of_rank = micro_steps * batch_size
        steps = order[: len(order) // (num_ranks * of_rank) * num_ranks * of_rank].reshape(-1, num_ranks, of_rank)
        divided = rng.permuted(steps, axis=2).reshape(-1, num_ranks, micro_steps, batch_size)
        return divided.swapaxes(1, 2).ravel()

    def hashes(self, tokens: IntArray, num_ranks: int, least_tokens: int, has_one_label: bool) -> list[IntArray]:
        """Returns `[documents]` of int64 hashes for `SharedPrefixes.find`, as if documents had tokens: equal for equal
        beginnings. Returns no hashes if training would share nothing.

        Args:
            tokens: `[documents]` lengths of the documents of a micro-batch.
            num_ranks: ranks of the training; on one, sharing must save a tenth of the tokens.
            least_tokens: shortest prefix that is shared; 0: none is.
            has_one_label: see `to_share`. The last token of a prefix predicts a label to learn.
        """
        if not least_tokens:
            return []
        counts, depths = num_hashes(tokens, least_tokens), [len(path) for path in self.paths]
        prefix = np.array([count for of_row in self.prefix_tokens for count in of_row], dtype=np.int64)
        prefix = np.minimum(prefix, np.repeat(tokens, depths)) + 1
        if has_one_label:  # the next token after the innermost prefix is learnt
            prefix[np.cumsum(depths)[np.flatnonzero(depths)] - 1] -= 1
        common = np.minimum(num_hashes(prefix, least_tokens), np.repeat(counts, depths))
        # Groups of each document, and which of its hashes are of each of them.
        parts = [
            [
                (path[:depth], first, stop)
                for depth, (first, stop) in enumerate(pairwise([0, *stops]), 1)
                if first < stop
            ]
            for path, stops in zip(self.paths, np.split(common, np.cumsum(depths)[:-1]), strict=True)
        ]
        alike = Counter(of_row[0][0] for of_row in parts if of_row)
        numbers: dict[tuple[str, ...], int] = {}
        hashes = []
        for row, (of_row, count) in enumerate(zip(parts, counts.tolist(), strict=True)):
            if not of_row or alike[of_row[0][0]] < 2:
                hashes.append(np.zeros(0, dtype=np.int64))
                continue
            at = 1 + np.arange(count)
            # Beyond the prefix: 0 must not be shared; with bit 62 a hash equals no other one.
            of_document = np.zeros_like(at) if has_one_label else at + (row << TOKEN_BITS) + 2**62
            for group, first, stop in of_row:
                of_document[first:stop] = at[first:stop] + (numbers.setdefault(group, len(numbers)) << TOKEN_BITS)
            hashes.append(of_document)
        shared_prefixes = SharedPrefixes.find(tokens, hashes, least_tokens)
        if shared_prefixes is None:
            return []
        few = num_ranks == 1 and shared_prefixes.first_own.sum() < LEAST_SAVED * tokens.sum()
        return [] if few else hashes


def _row(
    groups: list[object], counts: list[object], length: int, where: str
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns names and prefixes of the groups of a row, from the cells of both columns. `length`: tokens of the row.
    `where`: the row, for errors. Raises PackingError as `Groups.of_columns` does."""
    path, prefix = list[str](), list[int]()
    for given in groups:
        if not isinstance(given, str | int) or given == "":
            raise PackingError(f"{where} has {GROUP_COLUMN} {given!r}, neither a text nor a whole number")
        path.append(str(given))
    for given in counts:
        count = _whole(given)
        if count is None:
            raise PackingError(f"{where} has {PREFIX_COLUMN} {given!r}, not a whole number")
        prefix.append(count)
    if any(prefix) and not path:
        raise PackingError(f"{where} has {PREFIX_COLUMN} {_named(prefix)} and no {GROUP_COLUMN}: name its group")
    if not path:
        return (), ()
    where += f" of {GROUP_COLUMN} {_named(path)}"
    if len(prefix) != len(path):
        raise PackingError(
            f"{where} has {len(path)} names in {GROUP_COLUMN} and {len(prefix)} numbers in {PREFIX_COLUMN}; each "
            "group has one prefix"
        )
    if not 1 <= prefix[0] <= prefix[-1] <= length:
        raise PackingError(
            f"{where} has {PREFIX_COLUMN} {_named(prefix)}, and its document {length} tokens; a prefix has at least "
            "one token, and at most its document's"
        )
    if wrong := next((pair for pair in pairwise(prefix) if pair[0] >= pair[1]), None):
        raise PackingError(
            f"{where} has {PREFIX_COLUMN} {wrong[1]} in a group of {wrong[0]}; documents of a nested group begin with "
            "more of the same tokens"
        )
    return tuple(path), tuple(prefix)


def _named(path: Sequence[object]) -> str:
    return " > ".join(map(str, path))


def _cells(value: object) -> list[object]:
    """Returns the cells of a list of nested groups, or a single cell; none if they are empty. If some cells of a
    column are, pandas has made whole numbers floating-point."""
    cells = []
    for cell in value if isinstance(value, list) else [value]:
        if isinstance(cell, float) and (isnan(cell) or cell.is_integer()):
            cell = None if isnan(cell) else int(cell)
        elif isinstance(cell, str):
            cell = cell.strip().removesuffix(".0")
        if cell is not None and cell != "":
            cells.append(cell)
    return cells


def _whole(value: object) -> int | None:
    """Returns a whole number, or its digits as one; None for anything else."""
    if isinstance(value, str) and value.isdecimal() and value.isascii() and len(value) < 32:
        return int(value)
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None
