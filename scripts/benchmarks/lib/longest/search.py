"""The search for the longest document that trains: which length to try next. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tried:
    """A length that was tried.

    Attributes:
        tokens: on each rank.
        trained: whether it did; else memory was out.
        peak_bytes: memory of the fullest GPU; None if it is not known.
    """

    tokens: int
    trained: bool
    peak_bytes: int | None = None


def longest_of(tried: Sequence[Tried]) -> Tried | None:
    """Returns the longest length that trained; None if none did."""
    return max((one for one in tried if one.trained), key=lambda one: one.tokens, default=None)


def next_tokens(
    tried: Sequence[Tried], first_tokens: int, resolution_tokens: int, limit_bytes: int | None = None
) -> int | None:
    """Returns how many tokens of a rank to try next, a multiple of the resolution; None at the end.

    Lengths double until memory is out, and halve while nothing trains. Then the gap between the longest that trained
    and the shortest that did not is halved. An attempt close to the limit costs minutes: as soon as two lengths have
    trained, a line through their peaks says where the limit is, and that is tried instead of the double.

    Args:
        tried: so far.
        first_tokens: of a rank, at the beginning.
        resolution_tokens: to which the limit is found.
        limit_bytes: memory of a GPU; None if it is not known.
    """
    longest = longest_of(tried)
    shortest = min((one.tokens for one in tried if not one.trained), default=None)
    if longest is None:
        chosen = first_tokens if shortest is None else shortest // 2
        return chosen // resolution_tokens * resolution_tokens or None
    if shortest is None:
        double = 2 * longest.tokens
        predicted = _predicted(tried, limit_bytes)
        if predicted is None or predicted >= double:
            return double
        return max(predicted // resolution_tokens * resolution_tokens, longest.tokens + resolution_tokens)
    if shortest - longest.tokens <= resolution_tokens:
        return None
    return (longest.tokens + shortest) // 2 // resolution_tokens * resolution_tokens


def _predicted(tried: Sequence[Tried], limit_bytes: int | None) -> int | None:
    """Returns at how many tokens the limit is met, if peaks go on as between the two longest that trained."""
    known = sorted((one.tokens, one.peak_bytes) for one in tried if one.trained and one.peak_bytes)
    if limit_bytes is None or len(known) < 2:
        return None
    (fewer, lower), (more, higher) = known[-2:]
    if higher <= lower:
        return None
    return more + int((limit_bytes - higher) * (more - fewer) / (higher - lower))
