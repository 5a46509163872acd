"""Straggler: the rank that others wait for, and why, in sentences.

Ranks meet in the exchanges of every layer. The rank that waits least there is the one that comes last. If its kernels
take longer, attention is the reason: it has more work, or it is slower at the same work. Else it loses time beside
attention.
"""

from collections.abc import Sequence

import numpy as np

from distca_hf.analysis.report.figures import OfRanks, Seconds, StepFigures, imbalance
from distca_hf.traces import RankTrace


# Waiting below this part of a pass is too little to name anyone; as in the log of a training.
LITTLE_WAITING = 0.01
# A rank has more work, or is slower, if it is by this factor over the median of all ranks.
NOTABLE = 1.05


def balance_in_words(before: str, after: str, work_before: Sequence[float], work: Sequence[float]) -> str:
    """Returns a sentence about the busiest ranks before and after."""
    return (
        f"The busiest rank has {imbalance(work_before):.2f} times the mean attention work with {before} (rank "
        f"{int(np.argmax(work_before))}), and {imbalance(work):.3f} times {after} (rank {int(np.argmax(work))})."
    )


def findings_of(trace: RankTrace, seconds: Seconds, missing: Sequence[int]) -> list[str]:
    """Returns sentences about one micro-batch: its balance, and the rank that others wait for.

    Args:
        trace: of any of its ranks.
        seconds: measured.
        missing: ranks without traces.
    """
    before = "documents in order" if trace.placed else "packs as they came"
    after = "as placed" if trace.placed else "after tasks moved"
    sentences = [balance_in_words(before, after, trace.work_before, trace.work)]
    if trace.num_ranks > 1:
        sentences.append(straggler_in_words(trace.work[: trace.num_ranks], seconds))
    if missing:
        sentences.append(f"Traces of rank {', '.join(map(str, missing))} are missing.")
    return sentences


def straggler_in_words(work: Sequence[float], seconds: Seconds) -> str:
    """Returns a sentence that names the rank that others wait for, and the reason.

    Args:
        work: `[ranks]` attended pairs.
        seconds: measured.
    """
    waited = _numbers(seconds.waiting)
    if np.isnan(waited).all():
        return "Nothing was measured."
    attention, passed = _numbers(seconds.attention), _passed(seconds)
    last, first = int(np.nanargmin(waited)), int(np.nanargmax(waited))
    share = (waited[first] - waited[last]) / passed[first] if passed[first] else 0.0
    if share < LITTLE_WAITING:
        longest = waited[first] / passed[first] if passed[first] else 0.0
        if longest < LITTLE_WAITING:
            return f"No rank waits for others: the longest waiting in attention is {longest:.1%} of the pass."
        return (
            f"All ranks wait about as long, up to {longest:.1%} of the pass: not for one of them, but for rows on "
            "their way. Links are slow for so many bytes, or there is little to compute meanwhile."
        )
    named = (
        f"Others wait for rank {last}: rank {first} waits {1e3 * waited[first]:.1f} ms in attention, rank {last} "
        f"{1e3 * waited[last]:.1f} ms. "
    )
    per_pair = attention / np.maximum(np.array(work, dtype=np.float64), 1.0)
    if work[last] > NOTABLE * float(np.median(work)):
        return f"{named}It has {work[last] / np.mean(work):.2f} times the mean attention work."
    if attention[last] > NOTABLE * np.nanmedian(attention) and per_pair[last] > NOTABLE * np.nanmedian(per_pair):
        return (
            f"{named}Its attention kernels take {attention[last] / np.nanmedian(attention):.2f} times as long as the "
            "median for the same work: look at its clocks and temperature, and for other programs there."
        )
    return (
        f"{named}Its attention kernels take no longer than those of others, so it comes late from elsewhere: other "
        "layers (experts), the host, data, or a callback on that rank."
    )


def summary_of(steps: Sequence[StepFigures]) -> list[str]:
    """Returns sentences about all reported micro-batches."""
    before = float(np.mean([step.imbalance_before for step in steps]))
    after = float(np.mean([step.imbalance for step in steps]))
    sentences = [
        f"{len(steps)} reported micro-batch{'es' if len(steps) > 1 else ''}: attention work of the busiest rank "
        f"{before:.2f} → {after:.2f} times the mean."
    ]
    waited: dict[int, int] = {}
    for step in steps:
        if step.seconds is not None and len(_numbers(step.seconds.waiting)) > 1:
            numbers = _numbers(step.seconds.waiting)
            if not np.isnan(numbers).all():
                last = int(np.nanargmin(numbers))
                waited[last] = waited.get(last, 0) + 1
    if waited:
        rank, count = max(waited.items(), key=lambda found: (found[1], -found[0]))
        sentences.append(f"Rank {rank} waits least in {count} of them, so that the others wait for it.")
    return sentences


def _numbers(of_ranks: OfRanks) -> np.ndarray:
    """Returns `[ranks]` float64, NaN where a number is not known."""
    return np.array([np.nan if one is None else one for one in of_ranks], dtype=np.float64)


def _passed(seconds: Seconds) -> np.ndarray:
    """Returns `[ranks]` seconds of the pass."""
    parts = (seconds.attention, seconds.waiting, seconds.exchange, seconds.rest)
    passed: np.ndarray = np.sum([_numbers(part) for part in parts], axis=0)
    return passed
