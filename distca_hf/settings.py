"""Settings: dataclasses whose values are given by name, checked, fixed, and described for `help()`.

A field has metadata: `help`, a description; `default`; `at_least` and `at_most`, its limits, and whether it is
`positive`; `or_number`, whether a whole number may stand for its text; `check`, which refuses other wrong values. A
field whose type is another class of settings is a group. Its settings are named with a dot: `debug.check_finite`.

Defaults come from a factory, because the environment may change them. `described` shows them, and descriptions, in
docstring and signature: Python would show the default as `<factory>`.
"""

import dataclasses
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Literal, Self, TypeVar

from distca_hf.errors import ConfigError, UnknownSettingError, did_you_mean, nearest


Kind = TypeVar("Kind")

# Characters of a line of the settings' docstring.
LINE_WIDTH = 100
# Largest whole number of a setting without a limit: plans count tokens and ranks in 64 bits, and multiply them.
LARGEST_NUMBER = 2**31 - 1
# Values of the environment and of recipes for a setting that is on or off.
YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")
# Names of types in messages about a wrong value.
IN_WORDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "yes or no", str: "text"}
# Names that Transformers has for attention kernels, and ours.
OF_TRANSFORMERS = {f"flash_attention_{version}": f"flash{version}" for version in (2, 3, 4)}


class Settings:
    """Base class of dataclasses of settings, whose values cannot be changed after creation."""

    def __new__(cls, *unnamed: object, **settings: object) -> Self:
        maker = next(kind for kind in cls.__mro__ if "__init__" in vars(kind))
        if "__dataclass_fields__" in vars(maker):  # another subclass may take its own arguments
            check_names(maker, unnamed, settings, cls.__name__)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        """Sets an attribute that is not a setting, or a setting for the first time. Raises ConfigError if the setting
        already has a value, which models, loaders and Trainers have read; UnknownSettingError if the name is probably
        a misspelt setting."""
        kind: type = type(self)
        names = names_of(kind)
        if name in vars(self) and name in names:
            raise ConfigError(
                f"{name}={value!r}: settings of a {kind.__name__} are fixed, and this one was made with "
                f"{getattr(self, name)!r}. Make others, dataclasses.replace(settings, {name}={value!r}), and attach "
                "or enable with a plugin that has them"
            )
        is_known = name in names or name.startswith("_")
        if not is_known and nearest(name, [*names, *fields_of(kind)]) is not None:
            check_names(kind, (), [name], kind.__name__)
        super().__setattr__(name, value)

    def check_values(self, settings: type) -> None:
        """Checks this object's values of a class of settings, and converts whole numbers to floats or text if needed.
        Raises ConfigError if a value has the wrong type, is not one of the choices, or is beyond its limits."""
        for name in names_of(settings):
            value = getattr(self, name)
            check_value(settings, name, value)
            if (kind := _types(settings)[name]) in (float, str):
                vars(self)[name] = kind(value)


def names_of(settings: type) -> list[str]:
    """Returns the names of all settings and groups."""
    return [field.name for field in dataclasses.fields(settings)]


def group_of(field: "dataclasses.Field[Any]") -> type | None:
    """Returns the class of the settings in a group; None if the field is a setting itself."""
    return field.type if isinstance(field.type, type) and issubclass(field.type, Settings) else None


@cache
def fields_of(settings: type) -> dict[str, "dataclasses.Field[Any]"]:
    """Returns the fields of all settings by name; a group's as `group.name`."""
    found = {}
    for field in dataclasses.fields(settings):
        group = group_of(field)
        if group is None:
            found[field.name] = field
        else:
            found |= {f"{field.name}.{name}": inner for name, inner in fields_of(group).items()}
    return found


def values_of(settings: Settings, kind: type) -> dict[str, object]:
    """Returns the values of all settings of a class, by the names of `fields_of`."""
    return {name: attrgetter(name)(settings) for name in fields_of(kind)}


def check_names(settings: type, unnamed: Sequence[object], given: Iterable[object], where: str) -> None:
    """Refuses settings that are given without a name, or with an unknown one. Raises UnknownSettingError, which names
    the first of them."""
    known = names_of(settings)
    if unnamed:
        raise UnknownSettingError(
            f"{where}: {unnamed[0]!r} has no name; write which setting it is, for example {known[0]}={unnamed[0]!r}"
        )
    for name in given:
        if name in known:
            continue
        for full in fields_of(settings):
            group, _, inner = full.rpartition(".")
            if name in (full, inner):
                kind = _types(settings)[group].__name__
                raise UnknownSettingError(
                    f"{where}: {name!r} is a setting of a group: {group}=distca_hf.{kind}({inner}=...) in Python, "
                    f"{inner} in a section {group} in recipes"
                )
        all_names = [*fields_of(settings), *known]
        hint = did_you_mean(name, all_names) or f" Known settings: {', '.join(fields_of(settings))}"
        raise UnknownSettingError(f"{where}: unknown setting {name!r}.{hint}")


def check_value(settings: type, name: str, value: object) -> None:
    """Refuses a value that does not have its setting's type, is not one of its choices, or is beyond its limits.
    Raises ConfigError, which names setting, value and the types or choices."""
    kind, choices = _allowed(settings, name)
    if choices:
        if value not in choices:
            known = OF_TRANSFORMERS.get(str(value))
            hint = f". Transformers' {value} is {known!r} here" if known else ""
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(choices)}{hint}")
        return
    accepted: type | types.UnionType = float | int if kind is float else kind
    if kind is str and fields_of(settings)[name].metadata["or_number"]:
        accepted = str | int
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        how = f": {name}=distca_hf.{kind.__name__}(...)" if issubclass(kind, Settings) else ""
        raise ConfigError(f"{name}={value!r} must be of type {kind.__name__}, not {type(value).__name__}{how}")
    if issubclass(kind, Settings):
        return
    limits, number = fields_of(settings)[name].metadata, typing.cast(float, value)
    if limits["at_least"] is not None and number < limits["at_least"]:
        raise ConfigError(f"{name}={value} must be at least {limits['at_least']}")
    if limits["positive"] and not number > 0:
        raise ConfigError(f"{name}={value} must be positive")
    if kind is float and not abs(number) < math.inf:
        raise ConfigError(f"{name}={value} must be finite")
    at_most = LARGEST_NUMBER if kind is int and limits["at_most"] is None else limits["at_most"]
    if at_most is not None and number > at_most:
        raise ConfigError(f"{name}={value} must be at most {at_most:.10g}")
    if limits["check"] is not None:
        limits["check"](value)


def check_mapping(settings: type, values: object, where: str) -> dict[str, object]:
    """Returns the values of a recipe's mapping, by the names of `fields_of`. Raises UnknownSettingError if a key is
    not a setting; ConfigError if a value has the wrong type."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: the plugin settings must be a mapping, not {type(values).__name__}")
    check_names(settings, (), values, where)
    checked: dict[str, object] = {}
    for name, value in values.items():
        group = group_of(settings.__dataclass_fields__[name])  # type: ignore[attr-defined]
        if group is not None:
            of_group = check_mapping(group, value, f"{where}: {name}")
            checked |= {f"{name}.{inner}": inner_value for inner, inner_value in of_group.items()}
            continue
        try:
            check_value(settings, name, value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        checked[str(name)] = value
    return checked


def read_text(settings: type, name: str, text: str, where: str) -> object:
    """Returns the value of a setting that is written as text. `name` is as in `fields_of`. Raises ConfigError if it is
    not a value of this setting; names its origin."""
    kind, _ = _allowed(settings, name)
    try:
        value = kind(text) if kind is not bool else [*NO, *YES].index(text.lower()) >= len(NO)
    except ValueError as error:
        raise ConfigError(f"{where}: {name}={text!r} is not {IN_WORDS[kind]}") from error
    try:
        check_value(settings, name, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return value


def described(settings: Kind) -> Kind:
    """Decorates a dataclass of settings. Its docstring lists name, type, default and description of each setting, and
    its signature has the defaults instead of factories."""
    kind: Any = settings
    listed = "\n".join(
        f"{name} ({_type_in_words(field.type)}, default {field.metadata['default']!r}):\n"
        + textwrap.indent(textwrap.fill(field.metadata["help"], LINE_WIDTH), "    ")
        for name, field in fields_of(kind).items()
    )
    parameters = []
    for field in dataclasses.fields(kind):
        group = group_of(field)
        if group is None:
            default = field.metadata["default"]
        else:
            default = group(**{name: inner.metadata["default"] for name, inner in fields_of(group).items()})
        by_name = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, by_name, default=default, annotation=field.type))
    kind.__doc__ = f"{inspect.getdoc(kind) or ''}\n\nSettings:\n{textwrap.indent(listed, '    ')}\n"
    kind.__signature__ = inspect.Signature(parameters)
    return settings


@cache
def _types(settings: type) -> dict[str, Any]:
    return typing.get_type_hints(settings)


def _allowed(settings: type, name: str) -> tuple[type, tuple[str, ...]]:
    """Returns the type of a setting and, for a choice, its values."""
    group, _, inner = name.rpartition(".")
    hint = _types(_types(settings)[group] if group else settings)[inner]
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint)
    return hint, ()


def _type_in_words(kind: object) -> str:
    """Returns the choices of a setting, or the names of its types."""
    names = map(repr if typing.get_origin(kind) is Literal else _type_in_words, typing.get_args(kind))
    return " | ".join(names) or getattr(kind, "__name__", str(kind))
