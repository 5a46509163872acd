"""Legs: stored prefixes arrive in several parts, so that the first can be attended while the others fly.

A prefix that only own queries read is cut in as many parts as there are legs, of equally many tokens. One that guests
read comes whole, in one leg: the guests of a server are divided among the legs.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.planning.plan import Plan
from distca_hf.planning.ranges import line_keys
from distca_hf.planning.task import ALL_HEADS


NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Legs:
    """Where the prefixes that servers read are cut.

    Attributes:
        count: legs.
        num_lines: lines that there may be, see `line_keys`.
        keys: `[prefixes]` ascending, one for each (server, line).
        borders: `[prefixes, count + 1]` leg i brings tokens [borders[i], borders[i + 1]).
    """

    count: int
    num_lines: int
    keys: IntArray
    borders: IntArray

    @classmethod
    def cut(cls, plan: Plan, count: int) -> "Legs":
        """Legs of all prefixes of a plan."""
        tasks, reads = plan.tasks, plan.reads_others
        groups, num_lines = tasks.head_groups, plan.layout.num_documents * (tasks.head_groups + 1)
        lines = line_keys(tasks.document[reads], tasks.head[reads], groups)
        keys, prefix = np.unique(tasks.server[reads] * num_lines + lines, return_inverse=True)
        guest, longest = plan.is_guest[reads], np.zeros(len(keys), dtype=np.int64)
        of_guests = np.zeros(len(keys), dtype=bool)
        of_guests[prefix[guest]] = True
        np.maximum.at(longest, prefix[~guest], tasks.start[reads][~guest])
        borders = longest[:, None] * np.arange(count + 1) // count
        borders[:, -1] = NEVER
        leg = _legs_of_guests(keys[of_guests], num_lines, groups, count)
        borders[of_guests] = np.where(np.arange(count + 1) <= leg[:, None], 0, NEVER)
        return cls(count, num_lines, keys, borders)

    def borders_of(self, servers: IntArray | int, lines: IntArray) -> IntArray:
        """`[prefixes, count + 1]` borders; a prefix that nobody else holds is not cut."""
        borders = np.full((len(lines), self.count + 1), NEVER)
        borders[:, 0] = 0
        if len(self.keys):
            wanted = servers * self.num_lines + lines
            at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
            found = self.keys[at] == wanted
            borders[found] = self.borders[at[found]]
        return borders

    def of_guests(self, servers: IntArray, lines: IntArray) -> IntArray:
        """Leg that brings a prefix that guests read."""
        return (self.borders_of(servers, lines)[:, 1:] == 0).sum(axis=1)


def _legs_of_guests(keys: IntArray, num_lines: int, head_groups: int, count: int) -> IntArray:
    """Leg of each (server, line): those of a server one after the other, as they lie in its store."""
    server, head = keys // num_lines, keys % num_lines % (head_groups + 1) + ALL_HEADS
    order = np.lexsort((keys, head != ALL_HEADS, server))
    _, first, number = np.unique(server[order], return_index=True, return_counts=True)
    place = np.arange(len(keys)) - np.repeat(first, number)
    leg = np.empty(len(keys), dtype=np.int64)
    leg[order] = place * count // np.repeat(number, number)
    return leg
