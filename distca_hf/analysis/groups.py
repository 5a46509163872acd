"""Groups: documents that begin with the same tokens, such as the completions of a prompt, in a file of lengths.

| length | group | prefix_tokens | |
|---|---|---|---|
| 17408 | a | 16384 | |
| 16900 | a | 16384 | begins with the same 16,384 tokens |
| 800 | | | begins like no other |

Batches are dealt as TRL's GRPO and RLOO trainers deal them: groups in random order, and in an optimizer step each rank
gets consecutive rows, which it shuffles before it divides them into micro-batches. So a group may be on two ranks.
Trainers that keep the order of rows share at least as much.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """Groups of some documents. `names`: `[documents]` name of each document's group; None for a document that begins
    like no other. `prefix_tokens`: `[documents]` tokens with which all documents of the group begin; 0 without a
    group."""

    names: Sequence[str | None]
    prefix_tokens: IntArray

    @classmethod
    def of_columns(cls, columns: Mapping[str, Sequence[object]], tokens: IntArray, source: str) -> Self | None:
        """Returns the groups of documents; None if no document has a prefix. `columns`: values by column, of those
        `GROUP_COLUMNS` that the file has. `tokens`: `[documents]` lengths. `source`: their file, for errors."""
        given_prefixes = columns.get(PREFIX_COLUMN, ())
        if all(prefix is None or prefix == "" for prefix in map(_cell, given_prefixes)):
            return None
        prefix_tokens, groups = map(_cell, given_prefixes), map(_cell, columns.get(GROUP_COLUMN, [None] * len(tokens)))
        first: dict[str, tuple[int, int]] = {}
        names, prefixes = list[str | None](), list[int]()
        for row, (given, prefix, length) in enumerate(zip(groups, prefix_tokens, tokens.tolist(), strict=True)):
            count, where = _whole(prefix), f"{source}: row {row}"
            if not isinstance(given, str | int | None):
                raise PackingError(f"{where} has {GROUP_COLUMN} {given!r}, neither a text nor a whole number")
            name = None if given is None else str(given) or None
            if count is None:
                raise PackingError(f"{where} has {PREFIX_COLUMN} {prefix!r}, not a whole number")
            if name is None and count:
                raise PackingError(f"{where} has {PREFIX_COLUMN} {count} and no {GROUP_COLUMN}: name its group")
            if name is not None:
                where += f" of {GROUP_COLUMN} {name}"
                if not 1 <= count <= length:
                    raise PackingError(
                        f"{where} has {PREFIX_COLUMN} {count}, and its document {length} tokens; a "
                        "prefix has at least one token, and at most its document's"
                    )
                before, of_group = first.setdefault(name, (row, count))
                if count != of_group:
                    raise PackingError(
                        f"{where} has {PREFIX_COLUMN} {count}, and row {before} of the same "
                        f"{GROUP_COLUMN} {of_group}; documents of a group have one prefix, the one that all of them "
                        "begin with (training shares longer ones, too)"
                    )
            names.append(name)
            prefixes.append(count)
        return cls(names, np.array(prefixes, dtype=np.int64))

    def of(self, rows: IntArray) -> "Groups":
        return Groups([self.names[row] for row in rows.tolist()], self.prefix_tokens[rows])

    @property
    def counts(self) -> Counter[str]:
        """Documents of each group with several of them."""
        return Counter({name: count for name, count in Counter(self.names).items() if name is not None and count > 1})

    def in_words(self, unshared: str) -> str:
        """Returns a sentence: how many documents begin alike, and whether layers compute that once. `unshared`: why
        not; empty if they do."""
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
        """Deals the documents of an epoch as TRL's GRPO trainer does.

        Returns:
            int64 `[rows]` documents of all whole optimizer steps: micro-batch after micro-batch, rank after rank,
            `batch_size` of each. The last step is left out if it is not full.
        """
        first: dict[str, int] = {}
        of_group = [row if name is None else first.setdefault(name, row) for row, name in enumerate(self.names)]
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
        prefix = np.minimum(self.prefix_tokens, tokens)
        counts = num_hashes(tokens, least_tokens)
        common = np.minimum(num_hashes(prefix + 1 - has_one_label, least_tokens), counts)
        alike = Counter(name for name, count in zip(self.names, common.tolist(), strict=True) if count)
        of_group = {name: number for number, name in enumerate(alike)}
        hashes = []
        for row, (name, count, shared) in enumerate(zip(self.names, counts.tolist(), common.tolist(), strict=True)):
            if name is None or not shared or alike[name] < 2:
                hashes.append(np.zeros(0, dtype=np.int64))
                continue
            at = 1 + np.arange(count)
            # Beyond the prefix: 0 must not be shared; with bit 62 a hash equals no other one.
            others = np.zeros_like(at) if has_one_label else at + (row << TOKEN_BITS) + 2**62
            hashes.append(np.where(at <= shared, at + (of_group[name] << TOKEN_BITS), others))
        shared_prefixes = SharedPrefixes.find(tokens, hashes, least_tokens)
        if shared_prefixes is None:
            return []
        few = num_ranks == 1 and shared_prefixes.first_own.sum() < LEAST_SAVED * tokens.sum()
        return [] if few else hashes


def _cell(value: object) -> object:
    """Returns a cell of a table. If some cells of a column are empty, pandas has made whole numbers floating-point."""
    if isinstance(value, float) and (isnan(value) or value.is_integer()):
        return None if isnan(value) else int(value)
    return value.strip().removesuffix(".0") if isinstance(value, str) else value


def _whole(value: object) -> int | None:
    """Returns a whole number, or its digits as one; 0 for an empty cell, and None for anything else."""
    if value is None or value == "":
        return 0
    if isinstance(value, str) and value.isdecimal() and value.isascii() and len(value) < 32:
        return int(value)
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None
