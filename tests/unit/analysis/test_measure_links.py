"""Exchanges that `distca profile` measures: which rank sends to which."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from distca_hf.analysis.profiles.measure_links import ROW_BYTES, MeasuringRanks, part_elements
from distca_hf.comm.transport import AllToAll, Gathered
from distca_hf.errors import ConfigError


@dataclass
class RecordingTransport:
    """Takes down how many rows a rank sends and receives; nothing is sent."""

    rank: int
    world_size: int
    asked: list[AllToAll] = field(default_factory=list)

    def exchange(self, asked: AllToAll) -> "Arrived":
        self.asked.append(asked)
        return Arrived()


def rows_between(ranks: int, per_node: int, pattern: str, between_nodes: bool) -> list[list[int]]:
    """Returns `[source][destination]` rows of an exchange of four rows, after checking that ranks agree."""
    sent, received = [], []
    for rank in range(ranks):
        transport = RecordingTransport(rank, ranks)
        measuring = MeasuringRanks(transport, torch.device("cpu"), per_node)  # type: ignore[arg-type]
        getattr(measuring, pattern)(4 * ROW_BYTES, between_nodes)()()
        (asked,) = transport.asked
        assert (len(asked.rows), len(asked.room())) == (sum(asked.send_counts), sum(asked.receive_counts))
        sent.append(asked.send_counts)
        received.append(asked.receive_counts)
    assert received == [list(column) for column in zip(*sent, strict=True)]
    return sent


@pytest.mark.parametrize(
    ("pattern", "ranks", "per_node", "between_nodes", "expected"),
    [
        ("exchange", 3, 3, False, [[0, 2, 2], [2, 0, 2], [2, 2, 0]]),
        ("one_way", 2, 2, False, [[0, 4], [0, 0]]),
        ("one_way", 3, 3, False, [[0, 4, 0], [0, 0, 0], [0, 0, 0]]),
        ("one_way", 4, 4, False, [[0, 2, 0, 2], [0, 0, 0, 0], [0, 2, 0, 2], [0, 0, 0, 0]]),
        ("one_way", 5, 5, False, [[0, 2, 0, 2, 0], [0, 0, 0, 0, 0], [0, 2, 0, 2, 0], [0, 0, 0, 0, 0], [0] * 5]),
        ("one_way", 4, 2, True, [[0, 0, 4, 0], [0, 0, 0, 4], [0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_ranks_send_to_each_other(
    pattern: str, ranks: int, per_node: int, between_nodes: bool, expected: list[list[int]]
) -> None:
    assert rows_between(ranks, per_node, pattern, between_nodes) == expected


@dataclass(frozen=True)
class Send:
    """A call of `P2POp`."""

    function: object
    numbers: torch.Tensor
    rank: int


class Arrived:
    def wait(self) -> None:
        """There is nothing to wait for."""


@pytest.mark.parametrize(
    ("ranks", "per_node", "between_nodes", "next_ranks"),
    [(3, 3, False, [1, 2, 0]), (2, 1, True, [1, 0]), (4, 2, True, [2, 3, 0, 1]), (4, 2, False, [1, 0, 3, 2])],
)
def test_a_ring_sends_keys_and_values_to_the_next_rank(
    ranks: int, per_node: int, between_nodes: bool, next_ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Send] = []
    monkeypatch.setattr(dist, "P2POp", Send)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda sends: asked.extend(sends) or [Arrived() for _ in sends])
    for rank, next_rank in enumerate(next_ranks):
        asked.clear()
        transport = RecordingTransport(rank, ranks)
        measuring = MeasuringRanks(transport, torch.device("cpu"), per_node)  # type: ignore[arg-type]
        measuring.to_next(4 * ROW_BYTES, between_nodes)()
        calls = [(send.function, send.rank) for send in asked]
        assert calls == [(dist.isend, next_rank)] * 2 + [(dist.irecv, next_ranks.index(rank))] * 2
        assert len({send.numbers.data_ptr() for send in asked}) == 4
        assert {send.numbers.nbytes for send in asked} == {2 * ROW_BYTES}


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("num_bytes", [1, 65_536, 1 << 30])
def test_parts_of_collectives_begin_at_whole_words_of_nccl(ranks: int, num_bytes: int) -> None:
    part_bytes = 2 * part_elements(num_bytes, ranks)
    assert part_bytes % 16 == 0
    assert abs(part_bytes * (ranks - 1) - num_bytes) <= 64 * (ranks - 1) or part_bytes == 128


@dataclass
class NodesTransport:
    """Every rank tells its number on its node."""

    told: list[int]
    closed: bool = False

    @property
    def world_size(self) -> int:
        return len(self.told)

    def gather(self, values: Sequence[int], where: str) -> Gathered:
        return Gathered([[number] for number in self.told])

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("told", "per_node", "words"),
    [([0, 1, 2, 0], 2, "4 ranks, on each node 3, 1"), ([0, 0, 1], 1, "3 ranks, on each node 1, 2")],
)
def test_nodes_of_unequal_size_are_refused_on_all_ranks(told: list[int], per_node: int, words: str) -> None:
    for local_rank in told:
        transport = NodesTransport(told)
        measuring = MeasuringRanks(transport, torch.device("cpu"), per_node)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{words}: start equally many on each"):
            measuring._check_nodes(local_rank)
        assert transport.closed


@pytest.mark.parametrize("told", [[0], [0, 1, 2], [0, 1, 0, 1]])
def test_nodes_of_equal_size_are_measured(told: list[int]) -> None:
    transport = NodesTransport(told)
    MeasuringRanks(transport, torch.device("cpu"), max(told) + 1)._check_nodes(0)  # type: ignore[arg-type]
    assert not transport.closed
