"""Heads: which heads of own calls are computed when.

Calls name groups of heads, as the plan divides them; here they get the KV heads of a layer, and own calls are divided
in those to compute before rows of others are needed, and those to compute while results return: some heads of each
call. Nothing is computed twice or summed for that, and one long document can be divided as well as many short ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from distca_hf.runtime.maps import DeviceCall, Maps


@dataclass(frozen=True)
class CallsOfHeads:
    """Calls of a layer; their `heads` count KV heads.

    Attributes:
        early, late: own calls.
        far: of each leg.
    """

    early: tuple[DeviceCall, ...]
    late: tuple[DeviceCall, ...]
    far: tuple[tuple[DeviceCall, ...], ...]


def calls_of_heads(maps: Maps, kv_heads: int, *, comes: bool, leaves: bool) -> CallsOfHeads:
    """Calls of a layer with so many KV heads; made once per micro-batch.

    Args:
        comes: rows of other ranks are under way while own calls run.
        leaves: results return after the other calls.
    """
    key = kv_heads, comes, leaves
    if key not in maps.calls_of_heads:
        per_group = kv_heads // maps.rows_per_token
        own = with_kv_heads(maps.own, per_group)
        share = maps.late_share / 2 if comes else maps.late_share
        early, late = divide_heads(own, share) if leaves else (own, ())
        maps.calls_of_heads[key] = CallsOfHeads(
            early, late, tuple(with_kv_heads(leg.far, per_group) for leg in maps.legs)
        )
    calls: CallsOfHeads = maps.calls_of_heads[key]
    return calls


def with_kv_heads(calls: Iterable[DeviceCall], heads_per_group: int) -> tuple[DeviceCall, ...]:
    """Own and far calls whose `heads` count KV heads instead of groups."""
    return tuple(
        replace(call, heads=(call.heads[0] * heads_per_group, call.heads[1] * heads_per_group)) for call in calls
    )


def divide_heads(calls: Iterable[DeviceCall], share: float) -> tuple[tuple[DeviceCall, ...], tuple[DeviceCall, ...]]:
    """Own calls in two parts, the second with about a share of their work."""
    early: list[DeviceCall] = []
    late: list[DeviceCall] = []
    calls = tuple(calls)
    missing = share * sum(call.pairs for call in calls)
    for call in reversed(calls):
        first, stop = call.heads
        of_head = call.pairs / (stop - first)
        taken = min(stop - first, max(0, round(missing / of_head))) if of_head else 0
        missing -= taken * of_head
        for part, heads in ((early, (first, stop - taken)), (late, (stop - taken, stop))):
            if heads[0] < heads[1]:
                part.insert(0, replace(call, heads=heads, pairs=round(of_head * (heads[1] - heads[0]))))
    return tuple(early), tuple(late)
