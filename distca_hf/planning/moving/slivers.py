"""Slivers: the short rest of a document that packing cut at the end of a rank.

The next rank would compute a few late queries, and receive the keys of all that is before them: gigabytes for a long
document. Where it costs fewer bytes their queries (and outputs, back) travel instead, to the rank that computes what
is before them; from then on they are the top of its stack, and leave together with what is below. It may be so for
some heads alone: then the bytes of both ways are divided between the two ranks.
"""

from distca_hf.cost import TokenBytes
from distca_hf.planning.moving.prices import Prices
from distca_hf.planning.moving.stacks import Holders, Stack
from distca_hf.planning.moving.strategy import Strategy


def merge_slivers(
    document: int,
    segments: list[tuple[int, int, int]],
    head_groups: int,
    token_bytes: TokenBytes,
    prices: Prices,
    strategy: Strategy,
) -> list[Stack]:
    """Stacks of a document that spans ranks, in order: one for each rank that begins to compute part of it.

    Args:
        document: its number.
        segments: (start, stop, rank) of each, in order.
        head_groups: groups that heads are divided in.
        token_bytes: bytes of one token.
        prices: what a byte costs on every rank.
        strategy: which slivers are merged, and for how many heads.
    """
    stacks: list[Stack] = []
    holders: Holders = {}
    some_heads = max(1, round(strategy.merge_heads * head_groups))
    for start, stop, rank in segments:
        holders.setdefault(rank, []).append((start, stop))
        before = stacks[-1] if stacks else None
        if before is not None and before.server == rank and before.own_stop == before.stop:
            before.own_stop = before.stop = stop
        elif before is not None and _price_of_queries(stop - start, rank, before.server, token_bytes, prices) < (
            strategy.merge_below * _price_of_keys(start, rank, before.server, token_bytes, prices)
        ):
            below, before.stop = before.stop, stop
            if some_heads < head_groups and stop == segments[-1][1]:  # nothing comes after it, on whichever rank
                others = head_groups - some_heads
                before.tops = [stop] * some_heads + [below] * others
                tops = [start] * some_heads + [stop] * others
                stacks.append(Stack(document, rank, start, stop, stop, holders, tops))
        else:
            stacks.append(Stack(document, rank, start, stop, stop, holders, []))
    for stack in stacks:
        stack.tops = stack.tops or [stack.stop] * head_groups
    return stacks


def _price_of_keys(before: int, rank: int, server: int, token_bytes: TokenBytes, prices: Prices) -> float:
    """Price of computing a sliver at home: keys of all that is before it come."""
    return before * prices.of_keys(server, rank, token_bytes)


def _price_of_queries(tokens: int, rank: int, server: int, token_bytes: TokenBytes, prices: Prices) -> float:
    """Price of computing it where the keys are: its queries go there, with their own keys."""
    return tokens * (prices.of_queries(rank, server, token_bytes) + prices.of_keys(rank, server, token_bytes))
