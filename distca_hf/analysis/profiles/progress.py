"""Progress of measurements on stderr: a bar on a terminal, lines elsewhere."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar


T = TypeVar("T")


class MeasuringProgress:
    """Shows what is measured, on rank 0 alone. `rich` draws a bar; without it, as without a terminal, there are lines.

    Args:
        shown: whether this rank shows anything.
        total: number of measurements.
    """

    def __init__(self, shown: bool, total: int) -> None:
        self._shown, self._total, self._done, self._words = shown, total, 0, ""
        self._advance = self._line

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Shows the bar until the block ends."""
        if not (self._shown and sys.stderr.isatty()):
            yield
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
        except ImportError:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=self._total)
            self._advance = lambda words: progress.update(task, completed=self._done, description=words)
            yield

    def over(self, words: str, items: Sequence[T]) -> Iterator[T]:
        """Yields items, and shows how many are done."""
        for item in items:
            if self._shown:
                self._advance(words)
            yield item
            self._done += 1

    def _line(self, words: str) -> None:
        if words != self._words:
            self._words = words
            sys.stderr.write(f"measuring {words} ({self._done} of {self._total} done)\n")
