"""Streams of documents that can be told apart."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, IterableDataset


FIRST_TOKEN = 10


def length_of(number: int) -> int:
    """Tokens of a document."""
    return 1 + number * 7 % 40


def numbered(number: int) -> list[int]:
    """Document number i is `[10 + i, 10 + i, ...]`: a token says which document it is of."""
    return [FIRST_TOKEN + number] * length_of(number)


def numbered_stream(documents: int = 160, shards: int = 6, **columns: Any) -> IterableDataset:
    rows = {"input_ids": [numbered(number) for number in range(documents)]}
    return Dataset.from_dict(rows | columns).to_iterable_dataset(num_shards=shards)


def all_tokens(documents: int = 160, passes: int = 1) -> Counter[int]:
    """How often each token comes in some passes."""
    return Counter({FIRST_TOKEN + number: passes * length_of(number) for number in range(documents)})


def tokens_in(batch: dict[str, Any]) -> Counter[int]:
    """Tokens that a rank holds of a batch, without padding."""
    return Counter(batch["input_ids"][batch["input_ids"] >= FIRST_TOKEN].tolist())


class Rows:
    """Any other stream: rows, and the number of those that were given."""

    def __init__(self, rows: list[dict[str, Any]], endless: bool = False) -> None:
        self.rows, self.endless, self.at, self._begin = rows, endless, 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.at, self._begin = self._begin, 0
        while self.at < len(self.rows) or self.endless:
            self.at += 1
            yield self.rows[(self.at - 1) % len(self.rows)]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin = state["at"]
