"""Small enough: which figures a page shows where there are too many: calls of a layer, ranks of a timeline, pairs of
ranks, steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from distca_hf.analysis.report.figures import CallOfRanks, Report
from distca_hf.arrays import ceil_div


# Layers of each part of a pass whose timelines are shown, and ranks in a timeline.
MOST_LAYERS, MOST_TIMELINE_RANKS = 3, 48
# Ranks and servers in a picture of who sends to whom; of more, ranks are shown by node.
MOST_MATRIX_RANKS = 128
# Numbers of a page, all steps together, which make about ten bytes each; and steps in its list.
MOST_NUMBERS, MOST_STEPS = 120_000, 200


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` of the numbers 0 to count - 1, spread evenly; the first and the last are among them."""
    if count <= most:
        return list(range(count))
    return [round(at * (count - 1) / max(1, most - 1)) for at in range(most)]


def waiting_us(call: CallOfRanks) -> float:
    """Returns the microseconds that all ranks together wait in a call."""
    return sum(us for _, spans in call.ranks for use, us in spans if use == "wait")


def chosen_calls(calls: Sequence[CallOfRanks], num_ranks: int) -> list[CallOfRanks]:
    """Returns calls of few layers: of every part of a pass the ones in which ranks wait longest; and of each the ranks
    that wait longest and shortest, and others between them. Attention servers, behind `num_ranks` ranks, take up to
    half of the places."""
    chosen = []
    for part in dict.fromkeys(call.part for call in calls):
        of_part = sorted((call for call in calls if call.part == part), key=waiting_us, reverse=True)
        chosen += [_with_few_ranks(call, num_ranks) for call in of_part[:MOST_LAYERS]]
    return chosen


def _with_few_ranks(call: CallOfRanks, num_ranks: int) -> CallOfRanks:
    if len(call.ranks) <= MOST_TIMELINE_RANKS:
        return call
    by_waiting = sorted(call.ranks, key=lambda of_rank: sum(us for use, us in of_rank[1] if use == "wait"))
    servers = [of_rank for of_rank in by_waiting if of_rank[0] >= num_ranks]
    others = [of_rank for of_rank in by_waiting if of_rank[0] < num_ranks]
    places = max(MOST_TIMELINE_RANKS // 2, MOST_TIMELINE_RANKS - len(others))
    kept = [servers[at] for at in spread(len(servers), places)]
    kept += [others[at] for at in spread(len(others), MOST_TIMELINE_RANKS - len(kept))]
    return replace(call, ranks=sorted(kept))


def in_nodes(
    sent: Sequence[tuple[int, int, float]], num_ranks: int, num_servers: int, ranks_per_node: int
) -> tuple[int, list[tuple[int, int, float]]]:
    """Returns a number of nodes and (source, destination, bytes): of ranks as they are and 0 nodes, or of nodes where
    ranks are too many. Attention servers are never summed: they come after the ranks, or after the nodes.

    Args:
        num_ranks: ranks that hold tokens; servers have the numbers after them.
        num_servers: attention servers.
        ranks_per_node: ranks that share a node, of those that hold tokens.
    """
    if num_ranks + num_servers <= MOST_MATRIX_RANKS or ranks_per_node == 1:
        return 0, list(sent)
    num_nodes = ceil_div(num_ranks, ranks_per_node)

    def place(rank: int) -> int:
        return rank // ranks_per_node if rank < num_ranks else num_nodes + rank - num_ranks

    of_nodes: Counter[tuple[int, int]] = Counter()
    for source, destination, size in sent:
        of_nodes[place(source), place(destination)] += round(size)
    summed = [(source, destination, float(size)) for (source, destination), size in sorted(of_nodes.items())]
    return num_nodes, summed


def fitted(report: Report) -> Report:
    """Returns a report with as many steps, and timelines in as many of them, as a page holds; a note says so.

    The step that is shown first stays, with its timeline.
    """
    per_step = max((2 * len(step.work) + 4 * len(step.sent) + 20 * len(step.work) for step in report.steps), default=1)
    count = max(1, min(len(report.steps), MOST_STEPS, MOST_NUMBERS // max(1, per_step)))
    chosen, begin_with = _spread_with(report.begin_with, len(report.steps), count)
    steps = [report.steps[at] for at in chosen]
    notes = list(report.notes)
    if count < len(report.steps):
        notes.append(
            f"{count} of {len(report.steps)} micro-batches are shown, to keep the page small; --json has all."
        )
    spans = max(
        (sum(2 * len(spans) + 1 for call in step.calls for _, spans in call.ranks) for step in steps), default=0
    )
    room = max(0, MOST_NUMBERS - count * per_step)
    with_timeline, _ = _spread_with(begin_with, count, max(1, min(count, room // spans)) if spans else count)
    if len(with_timeline) < count:
        notes.append(f"{len(with_timeline)} of them have timelines, to keep the page small; --json has all.")
    return replace(
        report,
        steps=[step if at in with_timeline else replace(step, calls=()) for at, step in enumerate(steps)],
        notes=notes,
        begin_with=begin_with,
    )


def _spread_with(wanted: int, total: int, count: int) -> tuple[list[int], int]:
    """Returns `count` numbers below `total`, spread evenly but for one of them, and the place of that one."""
    chosen = list(spread(total, count))
    if not chosen:
        return chosen, 0
    place = min(range(len(chosen)), key=lambda at: abs(chosen[at] - wanted))
    chosen[place] = wanted
    return chosen, place
