"""Typed JSON: content of JSON whose numbers can be computed with, and dataclasses read from it, field by field."""

import enum
import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from distca_hf.errors import ReportError


# Most digits of a number that is computed with: products and sums of a few such numbers are finite, too.
MOST_DIGITS = 60
# Largest whole number of a field: that of a double, and so of JSON elsewhere.
MOST_WHOLE = 2**53
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")  # half of one outside of 16 bits; JSON writes both halves so
# Makes an object of a value of JSON; the second argument is where it is.
Reader = Callable[[Any, str], Any]


def read_json(text: str) -> Any:
    """Returns the content of JSON, with whose numbers one can compute, and whose words can be written.

    Raises:
        ReportError: a number is none (NaN), or too large; or a word has half a character. Says which.
        ValueError, RecursionError: it is not JSON.
    """
    content = json.loads(text, parse_float=_finite, parse_int=_whole, parse_constant=_finite)
    if HALF_CHARACTER.search(text):
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ReportError("half a character (\\ud800 to \\udfff), which cannot be written") from None
    return content


def _finite(number: str) -> float:
    value = float(number)
    if not abs(value) < 10.0**MOST_DIGITS:
        _refuse_number(number)
    return value


def _whole(number: str) -> int:
    if len(number.lstrip("-")) > MOST_DIGITS:
        _refuse_number(number)
    return int(number)


def _refuse_number(number: str) -> NoReturn:
    raise ReportError(f"the number {number[:40]}, which is not finite or too large")


@cache
def reader_of(kind: Any) -> Reader:
    """Returns the reader of a type: of a dataclass, an enumeration, a tuple, an optional type, or a plain one. It
    raises a ReportError for a value of another type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        given = reader_of(inner[0])
        return lambda value, where: None if value is None else given(value, where)
    if origin is tuple:
        return _reader_of_equal(inner[0]) if inner[1] is Ellipsis else _reader_of_some(inner)
    if is_dataclass(kind):
        return _reader_of_fields(kind)
    if issubclass(kind, enum.StrEnum):
        members = {member.value: member for member in kind}
        return lambda value, where: (
            members[value] if type(value) is str and value in members else _refuse(value, kind, where)
        )
    if kind is int:
        return _whole_number
    types_of = (int, float) if kind is float else (kind,)
    return lambda value, where: kind(value) if type(value) in types_of else _refuse(value, kind, where)


def _whole_number(value: Any, where: str) -> int:
    if type(value) is not int:
        _refuse(value, int, where)
    if abs(value) > MOST_WHOLE:
        raise ReportError(f"{where} has the whole number {value}, larger than any that distca_hf writes")
    return value


def _reader_of_equal(kind: Any) -> Reader:
    item = reader_of(kind)

    def read(value: Any, where: str) -> Any:
        return tuple([item(one, where) for one in value]) if type(value) is list else _refuse(value, tuple, where)

    return read


def _reader_of_some(kinds: tuple[Any, ...]) -> Reader:
    items = [reader_of(kind) for kind in kinds]

    def read(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(items):
            _refuse(value, tuple, where)
        return tuple([item(one, where) for item, one in zip(items, value, strict=True)])

    return read


def _reader_of_fields(kind: Any) -> Reader:
    readers = {name: reader_of(of_field) for name, of_field in get_type_hints(kind).items()}

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            _refuse(value, kind, where)
        missing = [name for name in readers if name not in value]
        if missing:
            raise ReportError(f"{where} has no {missing[0]!r}: it is not as distca_hf writes it")
        return kind(**{name: reader(value[name], where) for name, reader in readers.items()})

    return read


def _refuse(value: object, kind: type, where: str) -> NoReturn:
    raise ReportError(f"{where} has {str(value)[:40]!r} where a {kind.__name__} belongs")
