"""Exchanges that `distca profile` measures: which rank sends to which."""

from dataclasses import dataclass, field

import pytest
import torch

from distca_hf.comm.measure_links import ROW_BYTES, Exchanges, MeasuringRanks
from distca_hf.comm.transport import AllToAll


@dataclass
class RecordingTransport:
    """Takes down how many rows a rank sends and receives; nothing is sent."""

    rank: int
    world_size: int
    asked: list[AllToAll] = field(default_factory=list)

    def exchange(self, asked: AllToAll) -> None:
        self.asked.append(asked)


def rows_between(ranks: int, per_node: int, pattern: str, between_nodes: bool) -> list[list[int]]:
    """Returns `[source][destination]` rows of an exchange of four rows, after checking that ranks agree."""
    sent, received = [], []
    for rank in range(ranks):
        transport = RecordingTransport(rank, ranks)
        measuring = MeasuringRanks(transport, torch.device("cpu"), per_node)  # type: ignore[arg-type]
        exchanges = getattr(measuring, pattern)(4 * ROW_BYTES, between_nodes)
        assert isinstance(exchanges, Exchanges)
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
        ("to_next", 3, 3, False, [[0, 4, 0], [0, 0, 4], [4, 0, 0]]),
        ("to_next", 2, 1, True, [[0, 4], [4, 0]]),
        ("to_next", 4, 2, True, [[0, 0, 4, 0], [0, 0, 0, 4], [4, 0, 0, 0], [0, 4, 0, 0]]),
        ("to_next", 4, 2, False, [[0, 4, 0, 0], [4, 0, 0, 0], [0, 0, 0, 4], [0, 0, 4, 0]]),
        ("one_way", 2, 2, False, [[0, 4], [0, 0]]),
        ("one_way", 3, 3, False, [[0, 4, 0], [0, 0, 0], [0, 0, 0]]),
        ("one_way", 4, 4, False, [[0, 4, 0, 0], [0, 0, 0, 0], [0, 0, 0, 4], [0, 0, 0, 0]]),
        ("one_way", 4, 2, True, [[0, 0, 4, 0], [0, 0, 0, 4], [0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_ranks_send_to_each_other(
    pattern: str, ranks: int, per_node: int, between_nodes: bool, expected: list[list[int]]
) -> None:
    assert rows_between(ranks, per_node, pattern, between_nodes) == expected
