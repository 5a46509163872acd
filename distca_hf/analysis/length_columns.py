"""Length columns: which column of a file or dataset says how long its documents are."""

from collections.abc import Sequence
from pathlib import Path

from distca_hf.errors import PackingError


NUMBER_COLUMNS = ("length", "lengths", "num_tokens")
TOKENS_COLUMN = "input_ids"
# Lengths of the documents of each row, from TRL's packing.
SEQUENCES_COLUMN = "seq_lengths"
COLUMNS = (*NUMBER_COLUMNS, TOKENS_COLUMN)


def choose_column(names: Sequence[str], path: Path) -> str:
    """Returns the one column that says lengths.

    Raises:
        PackingError: there is none, or more than one, or rows hold several documents; names the columns.
    """
    if SEQUENCES_COLUMN in names:
        raise PackingError(
            f"{path} has a column {SEQUENCES_COLUMN}: its rows hold several documents; give the folder of a dataset "
            "saved with save_to_disk, which has input_ids, too"
        )
    found = [name for name in COLUMNS if name in names]
    if len(found) == 1:
        return found[0]
    if found:
        raise PackingError(f"{path} has several columns of lengths, {', '.join(found)}; keep one of them")
    there = ", ".join(names) if names else "none"
    raise PackingError(f"{path} has no column of lengths ({', '.join(COLUMNS)}); its columns: {there}")
