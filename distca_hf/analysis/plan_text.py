"""Plan text: numbers in few characters, and tables without lines that are as narrow as their words."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


GIB = 2**30


def block(title: str, table: Table, *words: str) -> RenderableType:
    """Returns a table between its title and notes, which may be wider than it is."""
    return Group(Text(title, style="bold"), table, *words)


def plain_table(*columns: str) -> Table:
    """Returns a table whose first column may wrap, between words, and whose numbers, on the right, never do."""
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    table.add_column("", overflow="fold", min_width=7)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def counted(number: int, thing: str) -> str:
    """Returns a number of things: "1 document", "2,000 documents", "3 micro-batches"."""
    return f"{number:,} {thing}" + ("" if number == 1 else "es" if thing.endswith("ch") else "s")


def in_bytes(number: int) -> str:
    """Returns bytes in the unit that leaves few digits."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"


def in_gib(number: float) -> str:
    """Returns bytes as GiB, without their unit."""
    return f"{number / GIB:,.1f}"


def in_thousands(number: int) -> str:
    """Returns a number of tokens in at most six characters, as 131.1K."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def in_range(low: int, high: int) -> str:
    """Returns one number, or the two ends."""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
