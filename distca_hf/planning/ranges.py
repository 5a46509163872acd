"""Ranges: tokens of documents and groups of heads, as columns. What pieces and transfers have in common.

If a plan divides heads, a *row* is one token of one group of heads, and ranks hold `head_groups` rows per token, token
after token. Otherwise a row is a token.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.planning.task import ALL_HEADS


POSITION_BITS = 31  # documents are shorter than 2 ** 31 tokens


@dataclass(frozen=True, eq=False)
class Ranges:
    """Int64 arrays of one length.

    Attributes:
        document, head, start, stop: tokens [start, stop) of a document, and the group of heads or `ALL_HEADS`.
        head_groups: groups that the plan divides heads in; rows per token on every rank.
    """

    document: IntArray
    head: IntArray
    start: IntArray
    stop: IntArray
    head_groups: int

    def __len__(self) -> int:
        return len(self.document)

    @property
    def tokens(self) -> IntArray:
        return self.stop - self.start

    @property
    def rows(self) -> IntArray:
        """Rows of each range."""
        return self.tokens * rows_per_token(self.head, self.head_groups)

    def select(self, chosen: np.ndarray) -> Self:
        """The chosen ranges (a mask or indices), in the order given."""
        columns = {column.name: getattr(self, column.name) for column in fields(self) if column.name != "head_groups"}
        return replace(self, **{name: values[chosen] for name, values in columns.items()})


def position_keys(documents: IntArray, heads: IntArray, tokens: IntArray, head_groups: int) -> IntArray:
    """One sortable integer for each (document, head, position)."""
    return (line_keys(documents, heads, head_groups) << POSITION_BITS) + tokens


def line_keys(documents: IntArray, heads: IntArray, head_groups: int) -> IntArray:
    """One sortable integer for each (document, head)."""
    return documents * (head_groups + 1) + heads - ALL_HEADS


def rows_per_token(heads: IntArray, head_groups: int) -> IntArray:
    """Rows of one token for each group of heads, or all of them."""
    return np.where(heads == ALL_HEADS, head_groups, 1)
