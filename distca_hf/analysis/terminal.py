"""Terminal: the console that commands print to. Names in files of others are text there, and nothing else."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment

from distca_hf.errors import printable


# Width of text without a terminal: that of most terminals.
COLUMNS = 80


class Terminal(Console):
    """A console that reads no markup, and shows no character that a terminal would follow except its own.

    Args:
        stderr: whether it is standard error.
    """

    def __init__(self, stderr: bool = False) -> None:
        width = None if Console(stderr=stderr).is_terminal else COLUMNS
        super().__init__(stderr=stderr, width=width, markup=False)

    def render(self, *arguments: Any) -> Iterator[Segment]:
        """Yields the parts of what is printed. See `rich.console.Console`."""
        for segment in super().render(*arguments):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
