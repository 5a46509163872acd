"""Numbers: whole numbers of a column, from text or from JSON, one after the other."""

import json
import re
from array import array

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.errors import PackingError


# A word of a text, and what to do with a file of texts.
WORD = re.compile(r"[^\W\d_]{2}")
OF_TEXTS = (
    '. Tokenise texts first: python "$(distca examples tokenise_texts)" MODEL FILE FOLDER reads a column text '
    "(of chats, make one with their template); then give FOLDER"
)
# A number as `numpy.savetxt` writes it.
SAVETXT = re.compile(r"-?\d\.\d+e[+-]\d+")


class Numbers:
    """Whole numbers in the order in which they are read. Lines are read one by one, because there may be millions.

    Args:
        source: their file and column, for errors.
        each: name of one of them in errors, such as "row".
    """

    def __init__(self, source: str, each: str) -> None:
        self._source = source
        self._each = each
        self._numbers = array("q")

    def add(self, value: object) -> None:
        """Adds an integer; refuses all other JSON values, such as 3.0 and true."""
        if type(value) is not int:
            raise self._refusal(kind_of(value), isinstance(value, str | dict))
        if abs(value) >= 2**63:
            raise PackingError(f"{self._next} is {_short(value)}, far more tokens than a document can have")
        self._numbers.append(value)

    def add_length(self, value: object) -> None:
        """Adds the length of a list."""
        if not isinstance(value, list):
            raise PackingError(f"{self._next} is {kind_of(value)}, not a list of tokens")
        self._numbers.append(len(value))

    def add_text(self, text: str) -> None:
        """Adds a number from its digits, or as `numpy.savetxt` writes it."""
        digits = text.strip()
        if SAVETXT.fullmatch(digits) and float(digits).is_integer():
            digits = str(int(float(digits)))
        if not digits.removeprefix("-").isdecimal() or not digits.isascii():
            raise self._refusal(_short(digits), WORD.search(digits) is not None)
        self.add(int(digits) if len(digits) < 32 else 10**32)

    def array(self) -> IntArray:
        """Returns `[documents]` numbers."""
        return np.array(self._numbers, dtype=np.int64)

    @property
    def _next(self) -> str:
        """Names the next number in errors."""
        return f"{self._source}: {self._each} {len(self._numbers)}"

    def _refusal(self, kind: str, is_text: bool) -> PackingError:
        """Returns the error for a value that is not a number; if the first value is text, with the way to lengths."""
        way = OF_TEXTS if is_text and not self._numbers else ""
        return PackingError(f"{self._next} is {kind}, not a whole number{way}")


def kind_of(value: object) -> str:
    """Describes a JSON value briefly."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"a text of {len(value)} characters" if isinstance(value, str) else _short(value)


def _short(value: object) -> str:
    """Returns a value as JSON writes it, in a few characters."""
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}..."
