"""Every error that distca_hf raises on purpose, and text that several messages share.

A message names the event, the place (rank, step, layer, document), the two numbers that disagree, and a remedy. Each
class is also the builtin that a caller would expect, so `except ValueError` keeps working.
"""

import difflib
import re
from collections import abc


# Most characters of another package's message in one of ours.
LONGEST_LINE = 300
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class DistCAError(Exception):
    """Base of everything raised on purpose.

    Attributes:
        lost_ranks: ranks of the roll call that made an operation fail, without those that ended because of another
            rank; empty if none is known.
    """

    lost_ranks: tuple[int, ...] = ()


class ConfigError(DistCAError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class UnknownSettingError(ConfigError, TypeError):
    """A setting without a name, or with an unknown one, which is probably misspelt."""


class VersionError(DistCAError, ImportError):
    """Another package is too old; raised by `import distca_hf`."""


class PackingError(DistCAError, ValueError):
    """Documents, lengths or a layout that cannot be packed: bad input data."""


class ReportError(DistCAError, ValueError):
    """A file or folder that `distca report` cannot read: foreign, cut off, or of another version."""


class PlanError(DistCAError, ValueError):
    """A plan that breaks its own invariants, or no longer exists."""


class UnsupportedAttentionError(DistCAError, NotImplementedError):
    """A model, layer or kernel asks for something that core attention does not compute here."""


class CheckpointError(DistCAError, OSError):
    """A checkpoint that a rank could not write or read."""


class NotFiniteError(DistCAError, ArithmeticError):
    """A number that is infinite or NaN, found with the setting `debug.check_finite`."""


class PlanMismatchError(DistCAError, RuntimeError):
    """Ranks disagree about their next step; found before anything was sent."""


class PeerLostError(DistCAError, RuntimeError):
    """Another rank failed, left, or cannot be reached."""


class ServerLostError(PeerLostError):
    """An attention server failed, left, or cannot be reached."""


class StoreLostError(PeerLostError):
    """The launcher's store is gone, and with it the job."""


class StepTimeoutError(DistCAError, TimeoutError):
    """An exchange did not finish before its deadline."""


def printable(text: str) -> str:
    """Returns a text of a file or of another process without characters that a terminal would obey: escapes, other
    control characters, marks of writing direction. Line ends stay."""
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def first_line(error: BaseException) -> str:
    """Returns the beginning of another package's message; the name of the error's class if it has none."""
    return str(error).partition("\n")[0][:LONGEST_LINE] or type(error).__name__


def and_more(others: int) -> str:
    """Returns text that counts further wrong things, to follow the first one in a message; empty if there are none."""
    return f" (and {others} more like it)" if others else ""


def nearest(name: object, known: abc.Iterable[str]) -> str | None:
    """Returns the known name that is most similar to a misspelt one; None if none is similar."""
    by_lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def did_you_mean(name: object, known: abc.Iterable[str]) -> str:
    """Returns a question with the nearest known name, to follow a message; empty if none is similar."""
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""
