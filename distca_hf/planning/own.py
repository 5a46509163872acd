"""Own parts: queries that stay at home, with the keys beside them."""

from dataclasses import dataclass

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.planning.pieces import Pieces
from distca_hf.planning.ranges import Ranges, line_keys


@dataclass(frozen=True, eq=False)
class OwnParts(Ranges):
    """Ranges of tokens whose rows follow each other at home, sorted by (document, head, start). A part that does not
    begin its document attends to a prefix, too.

    Attributes:
        token_row: layout row of the first token; rows here are tokens.
    """

    token_row: IntArray

    @classmethod
    def of(cls, pieces: Pieces) -> "OwnParts":
        """Joins pieces of one rank, sorted as `Pieces` are, where one goes on right behind another."""
        groups = pieces.head_groups
        line = line_keys(pieces.document, pieces.head, groups)
        token_row = pieces.row // groups
        opens = np.ones(len(pieces), dtype=bool)
        opens[1:] = (
            (line[1:] != line[:-1])
            | (pieces.start[1:] != pieces.stop[:-1])
            | (token_row[1:] - token_row[:-1] != pieces.tokens[:-1])
        )
        closes = np.append(opens[1:], True)[: len(pieces)]
        return cls(
            pieces.document[opens],
            pieces.head[opens],
            pieces.start[opens],
            pieces.stop[closes],
            groups,
            token_row[opens],
        )

    @property
    def continued(self) -> IntArray:
        """Parts that attend to a prefix."""
        return np.flatnonzero(self.start > 0)

    @property
    def prefix_lines(self) -> IntArray:
        """Lines of the prefixes, see `line_keys`."""
        chosen = self.continued
        return line_keys(self.document[chosen], self.head[chosen], self.head_groups)

    @property
    def prefixes(self) -> IntArray:
        """Tokens of the prefixes."""
        return self.start[self.continued]
