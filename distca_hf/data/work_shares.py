"""Work shares: whole documents into micro-batches of nearly equal tokens, whose attention work is in given
proportions.

    shares 1 3 3 1    | d7 d9 d9 ...... | d0 d6 ... | d1 d2 d5 ... | d8 d9 ....... |      d0 is the longest

Documents are dealt from the longest on. In a full step the last ones may find no room, although there is enough of it
in all micro-batches together. Then long and short documents are exchanged until one of them has it all.
"""

from collections.abc import Sequence

import numpy as np

from distca_hf.arrays import IntArray


# Bundles per micro-batch among which the documents that are left are always divided: short ones are dealt together.
BUNDLES = 16
# Tokens above its equal share that a micro-batch may get while others have room, as a part of its capacity.
SLACK = 0.002


def divide(
    document_tokens: IntArray, document_work: IntArray, shares: Sequence[float], capacity_tokens: int
) -> list[IntArray] | None:
    """Divides whole documents among micro-batches of nearly equal tokens, with work in proportion to shares.

    Documents are dealt from the longest on, each to the micro-batch that misses most work beyond what its missing
    tokens will bring on average. Short ones are dealt in bundles, which get smaller towards the end.

    Args:
        document_tokens: `[documents]` lengths.
        document_work: `[documents]` attended pairs, which rise with the length.
        shares: of each micro-batch, in any unit.
        capacity_tokens: most tokens of a micro-batch.

    Returns:
        `[micro_batches]` documents as indices; None if no room was found for one of them.
    """
    longest_first = np.argsort(-document_tokens, kind="stable")
    borders = _bundles(document_tokens[longest_first], BUNDLES * len(shares))
    tokens = np.add.reduceat(document_tokens[longest_first], borders[:-1]).tolist()
    work = np.add.reduceat(document_work[longest_first], borders[:-1]).tolist()
    dealt = _deal(tokens, work, shares, capacity_tokens)
    group_of = np.empty(len(document_tokens), dtype=np.int64)
    group_of[longest_first] = np.repeat(dealt, np.diff(borders))
    return _make_room(document_tokens, group_of, len(shares), capacity_tokens)


def _bundles(tokens: IntArray, parts: int) -> IntArray:
    """Returns `[bundles + 1]` borders of bundles of neighbours: each has one document, or several with at most one of
    `parts` equal parts of the tokens that are left."""
    stops = np.cumsum(tokens)
    borders, at, done, total = [0], 0, 0, int(stops[-1])
    while at < len(tokens):
        at = max(at + 1, int(np.searchsorted(stops, done + (total - done) // parts, side="right")))
        done = int(stops[at - 1])
        borders.append(at)
    return np.array(borders)


def _deal(tokens: list[int], work: list[int], shares: Sequence[float], capacity_tokens: int) -> list[int]:
    """Returns the micro-batch of each bundle; the number of micro-batches where none has room."""
    micro_batches, slack = range(len(shares)), SLACK * capacity_tokens
    tokens_left, work_left = sum(tokens), sum(work)
    missing_tokens = [tokens_left / len(shares)] * len(shares)
    missing_work = [work_left * share / sum(shares) for share in shares]
    room = [capacity_tokens] * len(shares)
    dealt = []
    for size, pairs in zip(tokens, work, strict=True):
        mean = work_left / tokens_left
        best, best_need = len(shares), (False, 0.0)
        for at in micro_batches:
            if size <= room[at]:
                need = size <= missing_tokens[at] + slack, missing_work[at] - mean * missing_tokens[at]
                if best == len(shares) or need > best_need:
                    best, best_need = at, need
        dealt.append(best)
        tokens_left -= size
        work_left -= pairs
        if best < len(shares):
            missing_tokens[best] -= size
            missing_work[best] -= pairs
            room[best] -= size
    return dealt


def _make_room(
    document_tokens: IntArray, group_of: IntArray, micro_batches: int, capacity_tokens: int
) -> list[IntArray] | None:
    """Returns the documents of each micro-batch, with room made for those that have none.

    In a full step the room that is left is scattered over micro-batches. It is brought together in one of them, which
    gives longer documents for shorter ones of the others.

    Args:
        group_of: `[documents]` micro-batch of each document; `micro_batches` where none had room.

    Returns:
        None if there is no room.
    """
    groups = [np.flatnonzero(group_of == number) for number in range(micro_batches)]
    room = [capacity_tokens - int(document_tokens[group].sum()) for group in groups]
    for document in np.flatnonzero(group_of == micro_batches).tolist():
        size = int(document_tokens[document])
        roomiest_first = sorted(range(micro_batches), key=lambda number: -room[number])
        found = next((one for one in roomiest_first if _gather_room(document_tokens, groups, room, one, size)), None)
        if found is None:
            return None
        groups[found] = np.sort(np.append(groups[found], document))
        room[found] -= size
    return groups


def _gather_room(document_tokens: IntArray, groups: list[IntArray], room: list[int], one: int, wanted: int) -> bool:
    """Exchanges documents of one group for shorter ones of the others until it has the wanted room; False if that does
    not succeed."""
    before = -1
    while before < room[one] < wanted:
        before = room[one]
        for other in range(len(groups)):
            if other != one and room[other] and room[one] < wanted:
                moved = _exchange(document_tokens, groups, one, other, min(room[other], wanted - room[one]))
                room[one] += moved
                room[other] -= moved
    return room[one] >= wanted


def _exchange(document_tokens: IntArray, groups: list[IntArray], one: int, other: int, most_tokens: int) -> int:
    """Exchanges a document of one group for a shorter one of another, and returns by how many tokens: as many as
    can be, up to `most_tokens`. That is little room in a full step, so that work hardly changes."""
    longer, shorter = (
        group[np.argsort(document_tokens[group], kind="stable")] for group in (groups[one], groups[other])
    )
    # For each document of the one, the shortest of the other that is not too short.
    at = np.searchsorted(document_tokens[shorter], document_tokens[longer] - most_tokens)
    longer, at = longer[at < len(shorter)], at[at < len(shorter)]
    tokens = document_tokens[longer] - document_tokens[shorter[at]]
    if tokens.max(initial=0) <= 0:
        return 0
    best = int(np.argmax(tokens))
    gives, takes = longer[best], shorter[at[best]]
    groups[one] = np.sort(np.append(groups[one][groups[one] != gives], takes))
    groups[other] = np.sort(np.append(groups[other][groups[other] != takes], gives))
    return int(tokens[best])
