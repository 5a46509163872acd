"""Drawn rows: a dataset's transform makes them on access (`set_transform`). All columns come from one run.

A transform may draw at random from the generators of `random`, `numpy.random` and torch. They are seeded for every row
with the loader's seed, the epoch and the row, and restored afterwards. So every rank that holds a part of a document,
and a resumed run, sees the same row. All threads of a process share the generators: only the thread that trains may
draw, or another process.
"""

import random
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distca_hf.data.rows import (
    KNOWN_COLUMNS,
    ONE_PER_ROW,
    TOKEN_COLUMNS,
    Draws,
    Reading,
    Values,
    announced_lengths,
    is_media,
    media_refusal,
    read_column,
)
from distca_hf.errors import PackingError


if TYPE_CHECKING:
    from datasets import Dataset

# Integers of 32 bits in a seed.
SEED_INTEGERS = 8


class DrawnRows:
    """Rows that a transform makes on access. A column `length` must announce their lengths. With epoch and row, `seed`
    decides what a transform draws at random.

    Attributes: see `StoredRows`; columns are the first row's.

    Raises:
        PackingError: no lengths are announced, or the first row cannot be drawn.
    """

    def __init__(self, dataset: "Dataset", reading: Reading, seed: int) -> None:
        self._dataset, self._reading, self._seed = dataset, reading, seed
        lengths = announced_lengths(dataset)
        if lengths is None:
            raise PackingError(
                "the dataset makes its tokens on access (set_transform), so lengths must be in an integer column "
                "'length'; or tokenise it once with dataset.map"
            )
        self.lengths = lengths
        has_documents = "seq_lengths" in dataset.column_names and reading.looks_at("seq_lengths")
        self.documents = read_column(dataset, "seq_lengths") if has_documents else None
        self.shown: frozenset[str] = frozenset()
        with generators_left_alone():
            first = self._drawn(0, epoch=0)
        self.names, self.inputs = frozenset(first), inputs_of(first)

    def draw(self, rows: Iterable[int], epoch: int) -> Draws:
        """Draws whole rows as they are in an epoch."""
        with generators_left_alone():
            draws = {row: self._drawn(row, epoch) for row in rows}
        for row, drawn in draws.items():
            if (inputs := inputs_of(drawn)) != self.inputs:
                raise PackingError(
                    f"row {row}: the dataset's transform gives {in_words(inputs)} in addition to tokens, and "
                    f"{in_words(self.inputs)} for row 0; give every row the same inputs of the model"
                )
        return draws

    def _drawn(self, row: int, epoch: int) -> Values:
        seed_generators(self._seed, epoch, row)
        try:
            made = self._dataset[[row]]
        except Exception as error:
            error.add_note(f"distca_hf: the dataset's transform raised this at row {row}")
            raise
        self.shown |= made.keys()
        row_of: dict[str, Any] = {}
        for name, of_rows in made.items():
            if not self._reading.looks_at(name, f"row {row}: ") or name == "length":
                continue
            if len(of_rows) != 1:
                raise PackingError(
                    f"row {row}: the dataset's transform makes {len(of_rows)} rows of it (column {name!r}), of which "
                    "only one could be used; make one row of each, or use dataset.map"
                )
            value = row_of[name] = of_rows[0]
            if name == "seq_lengths":  # all documents are placed before a row is drawn
                announced = [int(self.lengths[row])] if self.documents is None else self.documents[row].as_py()
                if value is not None and list(map(int, value)) != announced:
                    raise PackingError(
                        f"row {row}: the dataset's transform gives seq_lengths {list(value)}, and documents of "
                        f"{announced} tokens were announced. Documents must be known before rows are made: store "
                        "their lengths in a column 'seq_lengths' (a list per row)"
                    )
        maker = "the dataset's transform"
        tokens = int(self.lengths[row])
        return values_of(row_of, self._reading, f"row {row}: ", maker, tokens, f"column 'length' announces {tokens}")


def values_of(row: Mapping[str, Any], reading: Reading, where: str, maker: str, tokens: int, because: str) -> Values:
    """Returns the columns of a row that count, as arrays. Raises PackingError if a column cannot be used; names it."""

    def numbers(name: str, value: Any, kinds: str) -> NDArray[Any]:
        """Returns the values of a column, one for each token of the row."""
        try:
            values = _as_array(value)
        except ValueError as error:
            raise PackingError(f"{where}{maker} gives {name!r} as lists of unequal lengths") from error
        if name == "labels" and values.ndim == 0:
            raise PackingError(f"{where}column {name!r} {ONE_PER_ROW}")
        if values.ndim != 1 or (values.dtype.kind not in kinds and values.size) or len(values) != tokens:
            raise PackingError(
                f"{where}{maker} gives {name!r} of {values.dtype} with shape {values.shape}; "
                f"{because} {'numbers' if 'f' in kinds else 'integers'}"
            )
        return values

    made: dict[str, NDArray[Any]] = {}
    for name, value in row.items():
        if name in TOKEN_COLUMNS:
            if value is not None:
                made[name] = numbers(name, value, "iub").astype(np.int64)
        elif name in KNOWN_COLUMNS:
            continue
        elif is_media(name) and not isinstance(value, str | int | float | None):
            raise PackingError(f"{where}{media_refusal([name])}")
        elif _holds_numbers(value) and reading.check([name], where):
            of_model = numbers(name, value, "iubf")
            made[name] = of_model.astype(np.float32 if of_model.dtype.kind == "f" else np.int64)
    if "input_ids" not in made:
        raise PackingError(f"{where}{maker} gives no 'input_ids', only {list(row)}")
    return made


def seed_generators(*numbers: int) -> None:
    """Seeds the generators of `random`, `numpy.random` and torch, but not those of GPUs."""
    seed = np.random.SeedSequence([number % (1 << 64) for number in numbers]).generate_state(SEED_INTEGERS)
    random.seed(seed.tobytes())
    np.random.seed(seed)
    if (torch := _torch()) is not None:
        torch.default_generator.manual_seed(int(seed[:2].view(np.uint64)[0]) >> 1)


@contextmanager
def generators_left_alone() -> Iterator[None]:
    """Restores the generators of `random`, `numpy.random` and torch at the end of a `with` block."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


def random_states(device: Any = None) -> dict[str, Any]:
    """Returns states of the generators of `random`, `numpy.random`, torch and, if one is given, a `torch.device`."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    if (torch := _torch()) is not None:
        states["torch"] = torch.get_rng_state()
    if device is not None and device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Any], device: Any = None) -> None:
    """Restores what `random_states` returned, including a device's state if there is one of its type."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch = _torch()
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if device is not None and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def _torch() -> Any:
    """Returns torch if this process uses it: reading lengths does not need it."""
    return sys.modules.get("torch")


def _as_array(value: Any) -> NDArray[Any]:
    """Returns numbers as an array. For lists of whole numbers this takes a third of NumPy's time."""
    if isinstance(value, list) and value and isinstance(value[0], int):
        with suppress(struct.error):  # other values follow, or larger ones
            return np.frombuffer(struct.pack(f"{len(value)}q", *value), dtype=np.int64)
    return np.asarray(value)


def _holds_numbers(value: Any) -> bool:
    """Returns whether a value that a transform gives for a row is a number, or an array or lists of numbers."""
    if value is None or isinstance(value, str | bytes | Mapping):
        return False
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal lengths, which no collator makes a tensor of
        return False
    return array.dtype.kind in "iubf" and array.size > 0


def inputs_of(drawn: Values) -> Mapping[str, np.dtype[Any]]:
    """Returns dtypes of the further inputs of the model that a row holds, by name."""
    return {name: values.dtype for name, values in drawn.items() if name not in KNOWN_COLUMNS}


def in_words(inputs: Mapping[str, np.dtype[Any]]) -> str:
    """Returns inputs as text."""
    return ", ".join(f"{name!r} ({dtype})" for name, dtype in inputs.items()) or "nothing"
