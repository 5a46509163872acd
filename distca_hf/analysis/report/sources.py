"""Sources: finds out what a path holds, and reads it: a folder of traces, or the JSON of another command."""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol, cast

from distca_hf.analysis.profiles.shipped import find_profile
from distca_hf.analysis.report import given_answer, plan_answer, simulate_answer
from distca_hf.analysis.report.figures import KIND, Report
from distca_hf.analysis.report.predictions import Predictor
from distca_hf.analysis.report.run_folder import read_folder
from distca_hf.errors import ReportError, first_line
from distca_hf.typed_json import read_json
from distca_hf.whole_file import read_at_most


# A path that stands for standard input.
STANDARD_INPUT = "-"
# Most JSON that is read: a thousand times that of a plan for 1,000 ranks.
MOST_BYTES = 2**30


class JSONReader(Protocol):
    """A module that reads one kind of JSON."""

    def claims(self, content: Mapping[str, Any]) -> bool:
        """Returns whether an object is of this kind."""
        ...

    def read(self, content: Mapping[str, Any], source: str) -> Report:
        """Returns its report."""
        ...


# Kinds of JSON, by the command that prints them.
READERS: dict[str, JSONReader] = {
    "distca plan": cast(JSONReader, plan_answer),
    "distca plan --batch-size": cast(JSONReader, given_answer),
    "distca simulate": cast(JSONReader, simulate_answer),
}


def read_source(path: Path, cluster: str | None = None) -> Report:
    """Returns the report of a run or of the output of another command.

    Args:
        cluster: name or file of the profile that seconds of a run are predicted from; None: that of its GPUs.

    Raises:
        ReportError: there is nothing there, or it cannot be read; says why.
        ConfigError: there is no such profile.
    """
    if path.is_dir():
        return read_folder(path, Predictor(None if cluster is None else find_profile(cluster), path))
    if cluster is not None:
        raise ReportError(
            f"--cluster {cluster}: seconds of a run are predicted from it, and {path} is not the folder of one"
        )
    content = _object_of(path)
    for command, reader in READERS.items():
        if reader.claims(content):
            try:
                return reader.read(content, str(path))
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
                raise ReportError(
                    f"{path} is not as {command} --json of this version prints it ({type(error).__name__}: "
                    f"{first_line(error)}); run it again"
                ) from error
    if content.get("kind") == KIND:
        raise ReportError(f"{path} is printed by distca report itself; give what that was made of")
    raise ReportError(
        f"{path} is JSON of no command that is known here: give a folder of traces, or the output of "
        f"{' or '.join(f'{command} --json' for command in READERS)}"
    )


def _object_of(path: Path) -> Mapping[str, Any]:
    """Returns the JSON object in a file, or on standard input."""
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == STANDARD_INPUT else path.open("rb") as file:
            text = read_at_most(file, MOST_BYTES).decode()
    except FileNotFoundError:
        raise ReportError(f"{path} does not exist: give a folder of traces, or a file of JSON") from None
    except UnicodeDecodeError:
        raise ReportError(f"{path} is not text: give a folder of traces, or a file of JSON") from None
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        content = read_json(text)
    except ReportError as error:
        raise ReportError(f"{path} has {error}") from None
    except (ValueError, RecursionError):
        raise ReportError(f"{path} is not JSON, or cut off; for a run give the folder of its traces") from None
    if not isinstance(content, Mapping):
        raise ReportError(f"{path} holds a {type(content).__name__}, and not an object of JSON")
    return content
