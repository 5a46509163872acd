"""Lines of the log: name and rank, once per job, and nowhere where the application writes them."""

import contextlib
import io
import logging
import subprocess
import sys
from collections.abc import Sequence

import pytest

from distca_hf.telemetry import OF_THIS_RANK, get_logger


LOGGER = get_logger("distca_hf.tests")


def written(handlers: Sequence[logging.Handler] = (), level: int = logging.INFO) -> list[str]:
    """Lines on standard error of one record of each kind, where the application has these handlers and this level."""
    root = logging.getLogger()
    kept, root.handlers = root.handlers, list(handlers)  # pytest has some of its own
    LOGGER.setLevel(level)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            LOGGER.debug("a %d", 1)
            LOGGER.info("b")
            LOGGER.warning("c")
            LOGGER.warning("d", extra=OF_THIS_RANK)
            LOGGER.error("e")
    finally:
        root.handlers = kept
        LOGGER.setLevel(logging.NOTSET)
    return stderr.getvalue().splitlines()


def test_information_is_shown_by_default() -> None:
    assert get_logger("distca_hf.other").getEffectiveLevel() == logging.INFO


def test_lines_carry_name_and_rank() -> None:
    assert written() == [
        "distca_hf [rank 0] b",
        "distca_hf [rank 0] WARNING: c",
        "distca_hf [rank 0] WARNING: d",
        "distca_hf [rank 0] ERROR: e",
    ]


def test_other_ranks_write_what_concerns_them_alone_and_debug_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")

    own = ["distca_hf [rank 3] WARNING: d", "distca_hf [rank 3] ERROR: e"]
    assert written() == own
    assert written(level=logging.DEBUG) == ["distca_hf [rank 3] DEBUG: a 1", *own]


def test_level_of_the_application_counts() -> None:
    assert written(level=logging.ERROR) == ["distca_hf [rank 0] ERROR: e"]


class ClosedPipe(io.StringIO):
    """Standard error behind which nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_training_goes_on_where_lines_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with contextlib.redirect_stderr(ClosedPipe()):
        LOGGER.warning("lost")


def test_handlers_of_the_application_write_instead(caplog: pytest.LogCaptureFixture) -> None:
    assert written([caplog.handler]) == []
    assert [(record.getMessage(), record.rank) for record in caplog.records] == [
        ("b", 0),
        ("c", 0),
        ("d", 0),
        ("e", 0),
    ]


def test_level_that_was_set_before_the_import_stays() -> None:
    code = (
        "import logging; logging.getLogger('distca_hf').setLevel(logging.ERROR);"
        "from distca_hf.telemetry import get_logger; log = get_logger('x'); log.warning('not this'); log.error('this')"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stderr == "distca_hf [rank 0] ERROR: this\n"
