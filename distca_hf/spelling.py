"""Names that are most likely misspelt, and the one that is meant."""

import difflib
from collections.abc import Iterable


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Returns the known name that a misspelt one resembles most, or None if it resembles none."""
    by_lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns a sentence with the nearest known name, to go behind the one with the unknown name; or nothing."""
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""
