"""Settings of a dataclass: their names, types and values, and their description for `help()`.

A field of such a dataclass has metadata: `help`, a description; `default`; and `formerly`, names that it had before.

Defaults come from a factory, because the environment may change them. Python would show such a default as `<factory>`,
and descriptions nowhere.
"""

import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Literal

from distca_hf.errors import ConfigError, UnknownSettingError, did_you_mean


# Characters of a line of the settings' docstring.
LINE_WIDTH = 100
# Words of the environment and of recipes for a setting that is on or off.
YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")
# Names of types in messages about a wrong value.
IN_WORDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "yes or no", str: "text"}
# Names that Transformers has for attention kernels, and ours.
OF_TRANSFORMERS = {f"flash_attention_{version}": f"flash{version}" for version in (2, 3, 4)}


def names_of(settings: type) -> list[str]:
    """Returns the names of all settings."""
    return [field.name for field in dataclasses.fields(settings)]


def renamed(settings: type) -> dict[str, str]:
    """Returns the present name of every former one."""
    return {former: field.name for field in dataclasses.fields(settings) for former in field.metadata["formerly"]}


def check_names(settings: type, unnamed: Sequence[object], given: Iterable[object], where: str) -> None:
    """Refuses settings that are given without a name, with a former name, or with an unknown one.

    Raises:
        UnknownSettingError: there are such settings; names the first.
    """
    known, present = names_of(settings), renamed(settings)
    if unnamed:
        raise UnknownSettingError(
            f"{where}: {unnamed[0]!r} has no name; write which setting it is, for example {known[0]}={unnamed[0]!r}"
        )
    for name in given:
        if name in present:
            raise UnknownSettingError(f"{where}: the setting {name!r} is now called {present[str(name)]!r}")
        if name not in known:
            hint = did_you_mean(name, known) or f" Known settings: {', '.join(known)}"
            raise UnknownSettingError(f"{where}: unknown setting {name!r}.{hint}")


def check_value(settings: type, name: str, value: object) -> None:
    """Refuses a value that is of another type than its setting, or none of its choices.

    Raises:
        ConfigError: it is; names setting, value and the types or choices.
    """
    kind, choices = _allowed(settings, name)
    if choices:
        if value not in choices:
            known = OF_TRANSFORMERS.get(str(value))
            hint = f". Transformers' {value} is {known!r} here" if known else ""
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(choices)}{hint}")
        return
    accepted: type | types.UnionType = float | int if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name}={value!r} must be of type {kind.__name__}, not {type(value).__name__}")


def read_text(settings: type, name: str, text: str, where: str) -> object:
    """Returns the value of a setting that is written as text.

    Raises:
        ConfigError: the text is of another kind; names where it comes from.
    """
    kind, _ = _allowed(settings, name)
    readers: dict[type, Callable[[str], object]] = {int: int, float: float, str: str, bool: _yes_or_no}
    try:
        return readers[kind](text)
    except ValueError as error:
        raise ConfigError(f"{where}={text!r} is not {IN_WORDS[kind]}") from error


def describe_settings(settings: type) -> str:
    """Returns the docstring of a dataclass of settings, followed by each of them: name, type, default, description."""
    described = "\n".join(
        f"{field.name} ({_type_in_words(field.type)}, default {field.metadata['default']!r}):\n"
        + textwrap.indent(textwrap.fill(field.metadata["help"], LINE_WIDTH), "    ")
        for field in dataclasses.fields(settings)
    )
    return f"{inspect.getdoc(settings) or ''}\n\nSettings:\n{textwrap.indent(described, '    ')}\n"


def signature_of_settings(settings: type) -> inspect.Signature:
    """Returns the signature of a dataclass of settings, with their own defaults in place of factories."""
    return inspect.Signature(
        [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.metadata["default"], annotation=field.type
            )
            for field in dataclasses.fields(settings)
        ]
    )


@cache
def _allowed(settings: type, name: str) -> tuple[type, tuple[str, ...]]:
    """Returns the type of a setting and, for a choice, its values."""
    hint = typing.get_type_hints(settings)[name]
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint)
    return hint, ()


def _yes_or_no(text: str) -> bool:
    """Returns the truth of a word.

    Raises:
        ValueError: it is none of the known words.
    """
    if text.lower() not in (*YES, *NO):
        raise ValueError(text)
    return text.lower() in YES


def _type_in_words(kind: object) -> str:
    """Returns the choices of a setting, or the name of its type."""
    choices = getattr(kind, "__args__", ())
    return " | ".join(map(repr, choices)) if choices else getattr(kind, "__name__", str(kind))
