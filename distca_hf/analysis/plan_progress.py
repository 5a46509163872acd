"""Plan progress: how far a long plan is, on stderr, where that is a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class PlanProgress:
    """A line that says what is being done; it is gone when everything is."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the line until the block ends, however it ends."""
        with self._progress:
            yield

    @contextmanager
    def stage(self, words: str) -> Iterator[None]:
        """Shows that something is being done whose length is not known."""
        task = self._progress.add_task(words, total=None)
        yield
        self._progress.remove_task(task)

    def over(self, words: str, items: Sequence[int]) -> Iterable[int]:
        """Goes over items, and shows how many are done."""
        task = self._progress.add_task(words, total=len(items))
        for item in items:
            yield item
            self._progress.advance(task)
        self._progress.remove_task(task)
