"""The log, kept to be read by a test."""

import logging


class KeptLines(logging.Handler):
    """Keeps all that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
