"""Attention does the same in the same order as before: what runs while an exchange is under way shows in no result."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from distca_hf.comm.transport import Transport
from distca_hf.runtime import alike_layers
from distca_hf.runtime.device_routing import ChunkRouting, DeviceCall
from distca_hf.runtime.remote_kv import KVDispatch
from support.event_log import CASES, KINDS, OrderCase, digest_of, events_of
from support.thorough import is_thorough


DIGESTS = Path(__file__).with_name("event_orders.json")
SAMPLE = CASES[: 6 * len(KINDS)]
Calls = tuple[tuple[DeviceCall, ...], tuple[DeviceCall, ...]]


def changed(numbers: Iterable[int]) -> Iterator[int]:
    """Yields the cases of these numbers whose order is another one than before."""
    before = json.loads(DIGESTS.read_text())
    yield from (number for number in numbers if digest_of(events_of(OrderCase.draw(number))) != before[number])


def test_events_come_in_the_order_of_before() -> None:
    assert list(changed(CASES if is_thorough() else CASES[::2])) == [], (
        "attention does something else, or in another order: compare the lines of such a case in both trees, "
        "`cd tests && python -m support.event_log NUMBER`; if it is meant, write the digests anew as said there"
    )


def test_the_corpus_has_all_kinds_of_events() -> None:
    cases = [OrderCase.draw(number) for number in SAMPLE]
    events = {line.partition(" ")[0] for case in cases for line in chain(*events_of(case))}
    assert events == {"layer", "begin", "start", "wait", "forward", "backward", "copy", "spent"}
    assert {case.num_chunks for case in cases} == {1, 2, 3}
    assert {case.kind for case in cases if case.window_tokens} == {"placed", "packs", "in place", "striped"}
    for flag in ("again", "has_sinks", "kv_residency"):
        assert len({getattr(case, flag) for case in cases}) == 2


def none_late(divide: Callable[..., Calls]) -> Callable[..., Calls]:
    return lambda calls, share: (tuple(calls), ())


def half_as_late(divide: Callable[..., Calls]) -> Callable[..., Calls]:
    return lambda calls, share: divide(calls, share / 2)


@pytest.mark.parametrize("broken", [none_late, half_as_late])
def test_a_broken_rule_for_late_calls_is_seen(
    broken: Callable[..., Callable[..., Calls]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alike_layers, "divide_calls", broken(alike_layers.divide_calls))
    assert any(changed(SAMPLE))


def test_a_wait_before_its_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    start = KVDispatch.start

    def start_and_wait(dispatch: KVDispatch, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        start(dispatch, chunk, transport, where)
        for exchange in dispatch._started:
            exchange.wait()

    monkeypatch.setattr(KVDispatch, "start", start_and_wait)
    assert any(changed(SAMPLE))
