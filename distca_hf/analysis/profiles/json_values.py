"""JSON values of a profile: dataclasses that are read from them, and checks of sizes and times."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, get_type_hints


# Least and most of a number that is measured, in any unit: a few of them multiplied or divided are finite, too.
LEAST, MOST = 1e-30, 1e30


class UnknownNamesError(ValueError):
    """Names of another version: nothing is damaged, and what they mean is not known here."""


def check_names(where: str, content: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises UnknownNamesError where content has names that are not known."""
    if unknown := set(content) - {*known}:
        raise UnknownNamesError(f"{where} has {', '.join(sorted(unknown))}")


def read_dataclass(cls: Any, content: Mapping[str, Any]) -> Any:
    """Returns a dataclass of JSON values; lists become tuples.

    Raises:
        UnknownNamesError: names are unknown.
        TypeError, ValueError: names are missing, or a value is of another kind or out of range.
    """
    check_names(cls.__name__, content, {field.name for field in fields(cls)})
    found = cls(**{name: _as_tuples(value) for name, value in content.items()})
    for name, kind in get_type_hints(cls).items():
        _check_single(f"{cls.__name__}.{name}", kind, getattr(found, name))
    return found


def _check_single(name: str, kind: Any, value: Any) -> None:
    """Raises ValueError where a single value is of another kind than its field, or out of range."""
    if kind not in (int, float, str, bool):
        return
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{name} is {value!r}, and no {kind.__name__}")
    if kind in (int, float):
        least = 0 if kind is float or name.endswith("window_tokens") else 1
        if not least <= value <= MOST:
            raise ValueError(f"{name} is {value}, and must be at least {least}, and at most {MOST:g}")


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def check_curve(name: str, sizes: Sequence[float], *times: Sequence[float]) -> None:
    """Raises ValueError where sizes do not rise, or times are not as many, finite and above 0."""
    check_rising(name, sizes)
    for seconds in times:
        if len(seconds) != len(sizes):
            raise ValueError(f"{len(seconds)} times for {len(sizes)} {name}")
        check_positive(name, seconds)


def check_rising(name: str, sizes: Sequence[float]) -> None:
    """Raises ValueError where there are no sizes, or these do not rise from above 0."""
    if not sizes or any(later <= earlier for earlier, later in pairwise(sizes)):
        raise ValueError(f"{name} do not rise: {sizes}")
    check_positive(name, sizes)


def check_positive(name: str, values: Sequence[float]) -> None:
    """Raises ValueError where a value is not above 0, or not within what can be measured."""
    if not all(LEAST <= value <= MOST for value in values):
        raise ValueError(f"{name}: {values} are not all above 0, between {LEAST:g} and {MOST:g}")
