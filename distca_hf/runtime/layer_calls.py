"""Layer calls: the kernel calls of a layer, and when each of them is computed.

Local calls are divided in two parts, some heads of each call. The early one is computed before rows of other ranks are
needed, the late one while results are sent back. Nothing is computed twice or summed for that, and one long document
can be divided as well as many short ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from distca_hf.runtime.device_routing import DeviceCall, DeviceRouting


@dataclass(frozen=True)
class LayerCalls:
    """Local and prefix calls of a layer. Their `heads` count its KV heads; those of a routing count groups of heads.

    Attributes:
        early, late: local calls.
        prefix: of each chunk.
    """

    early: tuple[DeviceCall, ...]
    late: tuple[DeviceCall, ...]
    prefix: tuple[tuple[DeviceCall, ...], ...]

    @classmethod
    def of(cls, routing: DeviceRouting, kv_heads: int, *, rows_come: bool, results_leave: bool) -> "LayerCalls":
        """Returns the calls of a layer with so many KV heads.

        Args:
            rows_come: whether rows of other ranks are in flight while early calls run.
            results_leave: whether results are sent back behind the prefix calls; only then are some calls late.
        """
        per_group = kv_heads // routing.rows_per_token
        local = with_kv_heads(routing.local, per_group)
        share = routing.late_share / 2 if rows_come else routing.late_share
        early, late = divide_calls(local, share) if results_leave else (local, ())
        return cls(early, late, tuple(with_kv_heads(chunk.prefix, per_group) for chunk in routing.chunks))


def with_kv_heads(calls: Iterable[DeviceCall], heads_per_group: int) -> tuple[DeviceCall, ...]:
    """Returns local and prefix calls whose `heads` count KV heads instead of groups."""
    return tuple(
        replace(call, heads=(call.heads[0] * heads_per_group, call.heads[1] * heads_per_group)) for call in calls
    )


def divide_calls(calls: Iterable[DeviceCall], share: float) -> tuple[tuple[DeviceCall, ...], tuple[DeviceCall, ...]]:
    """Returns local calls in two parts, the second with about a share of their work."""
    #     call 0   | head 0 | head 1 | head 2 | head 3 |     early
    #     call 1   | head 0 | head 1 | head 2 : head 3 |     the last heads of the last calls are late
    early: list[DeviceCall] = []
    late: list[DeviceCall] = []
    calls = tuple(calls)
    missing = share * sum(call.pairs for call in calls)
    for call in reversed(calls):
        first, stop = call.heads
        of_head = call.pairs / (stop - first)
        taken = min(stop - first, max(0, round(missing / of_head))) if of_head else 0
        missing -= taken * of_head
        for chosen, heads in ((early, (first, stop - taken)), (late, (stop - taken, stop))):
            if heads[0] < heads[1]:
                chosen.insert(0, replace(call, heads=heads, pairs=round(of_head * (heads[1] - heads[0]))))
    return tuple(early), tuple(late)
