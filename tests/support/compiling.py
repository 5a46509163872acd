"""What torch.compile did in this process so far."""

import torch
from torch._dynamo.utils import counters


def forget_graphs() -> None:
    """Compiles everything anew, and counts from zero."""
    torch._dynamo.reset()
    counters.clear()


def graph_breaks() -> list[str]:
    """Why graphs broke; as often as they did."""
    return [reason for reason, times in counters["graph_break"].items() for _ in range(times)]


def graphs_made() -> int:
    """Graphs of all lengths together."""
    return counters["stats"]["unique_graphs"]
