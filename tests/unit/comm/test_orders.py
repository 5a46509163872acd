"""Orders: they arrive as they were posted, or not at all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.comm.orders import CallOrder, Kind, Order, Phase, PlanOrder, Sequences, encode, shares_of
from distca_hf.errors import PlanMismatchError


INTEGERS = st.integers(-(2**63), 2**63 - 1)


def _order(kind: Kind = Kind.CALL, roster: int = 3, numbers: tuple[int, ...] = (7, -1)) -> Order:
    return Order(kind, roster, np.array(numbers, dtype=np.int64))


@given(st.sampled_from(Kind), st.integers(0, 2**62), st.lists(INTEGERS, max_size=30))
def test_orders_arrive_as_they_were_posted(kind: Kind, roster: int, numbers: list[int]) -> None:
    order = Sequences().decode(encode(_order(kind, roster, tuple(numbers)), 0), "server 0")

    assert (order.kind, order.roster, order.numbers.tolist()) == (kind, roster, numbers)


@given(st.lists(INTEGERS, min_size=5, max_size=5), st.lists(INTEGERS, max_size=20))
def test_plans_are_their_numbers(scalars: list[int], integers: list[int]) -> None:
    order = PlanOrder(*scalars, integers=np.array(integers, dtype=np.int64))
    found = PlanOrder.of(order.numbers())

    assert (*found[:-1], found.integers.tolist()) == (*scalars, integers)


@given(st.lists(st.floats(allow_nan=False), max_size=6))
def test_calls_are_their_numbers(spec: list[float]) -> None:
    order = CallOrder(1, Phase.BACKWARD, 8, 2, 64, 128, 2, tuple(spec))

    assert CallOrder.of(order.numbers()) == order


@given(st.data())
def test_damaged_orders_are_refused(data: st.DataObject) -> None:
    message = bytearray(encode(_order(), 0))
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))

    with pytest.raises(PlanMismatchError, match=r"server 1: an order of .* bytes is damaged"):
        Sequences().decode(bytes(message), "server 1")


@given(st.integers(0, 55))
def test_cut_orders_are_refused(length: int) -> None:
    with pytest.raises(PlanMismatchError, match="damaged"):
        Sequences().decode(encode(_order(), 0)[:length], "server 1")


@pytest.mark.parametrize(
    ("sequences", "words"), [((0, 0), "order 0 .* and 1 comes next"), ((0, 2), "order 2 .* and 1")]
)
def test_repeated_and_lost_orders_are_refused(sequences: tuple[int, int], words: str) -> None:
    reader = Sequences()
    reader.decode(encode(_order(), sequences[0]), "server 0")

    with pytest.raises(PlanMismatchError, match=words):
        reader.decode(encode(_order(), sequences[1]), "server 0")


def test_rosters_are_counted_apart() -> None:
    writer, reader = Sequences(), Sequences()
    messages = [writer.encode(_order(roster=roster)) for roster in (1, 2, 1)]

    assert [reader.decode(message, "server 0").roster for message in messages] == [1, 2, 1]


@given(st.integers(1, 9), st.integers(1, 9))
def test_every_server_gets_its_orders_from_one_trainer(trainers: int, servers: int) -> None:
    shares = [server for trainer in range(trainers) for server in shares_of(servers, trainers, trainer)]

    assert sorted(shares) == list(range(servers))
