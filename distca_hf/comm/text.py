"""Text as integers: gathers carry integers alone."""

from collections.abc import Sequence


BYTES_PER_INTEGER = 4


def integers_of(text: bytes, most_bytes: int) -> list[int]:
    """Encodes at most `most_bytes` bytes of a text; equally many integers for every text."""
    count = -(-most_bytes // BYTES_PER_INTEGER)
    padded = text[:most_bytes].ljust(count * BYTES_PER_INTEGER)
    return [int.from_bytes(padded[at : at + BYTES_PER_INTEGER]) for at in range(0, len(padded), BYTES_PER_INTEGER)]


def text_of(integers: Sequence[int]) -> str:
    """Decodes integers of `integers_of`; spaces at the end are lost."""
    return b"".join(number.to_bytes(BYTES_PER_INTEGER) for number in integers).decode(errors="replace").rstrip()
