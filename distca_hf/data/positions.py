"""Positions: a place in the data, saved by a loader, and checked field by field before it is used.

    identity     the dataset, and all that decides the order of its documents: equal, or refused
    sizes        of micro-batches and optimizer steps: whole numbers in range
    place        epoch, micro-batch, parts that were taken in other sizes: whole numbers in range
    checksum     of all these fields and of the documents before this place

The documents before a place follow from the other fields. So the checksum finds a changed field, and a step that would
be divided in another way than when it began.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.errors import ConfigError


# Most parts of an epoch in other sizes, one for each resumption: each of them is packed again.
MOST_PARTS = 100
# Largest whole numbers: seeds of NumPy have 32 bits, and an epoch may be followed by another.
MOST_EPOCHS, MOST = 2**32 - 2, 2**62
# Odd numbers of 64 bits that mix the number of a document (SplitMix64).
FIRST_FACTOR, SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class SavedPosition:
    """Fields of a saved position, except those that identify the dataset."""

    capacity_tokens: int
    num_ranks: int
    micro_steps: int
    # The fields of `Cursor`, which describes them.
    epoch: int
    micro_batch: int
    taken: tuple[tuple[int, int], ...]
    steps_from: int
    pipeline: tuple[int, ...]  # stages and chunks; empty without a pipeline

    @classmethod
    def read(cls, state: Mapping[str, Any], identity: Mapping[str, object], longest_tokens: int) -> "SavedPosition":
        """Reads what `with_checksum` returned. Raises ConfigError if the position is of another dataset or order, or a
        field is missing, has the wrong type or is out of range; names it."""
        check_identity(state, identity)
        numbers = {name: whole_number(name, state.get(name), least=1) for name in ("num_ranks", "micro_steps")}
        numbers["epoch"] = whole_number("epoch", state.get("epoch"), most=MOST_EPOCHS)
        numbers["micro_batch"] = whole_number("micro_batch", state.get("micro_batch"))
        numbers["steps_from"] = whole_number("steps_from", state.get("steps_from"), most=numbers["micro_batch"])
        capacity_tokens = whole_number("capacity_tokens", state.get("capacity_tokens"), least=longest_tokens)
        parts = list_field("taken", state.get("taken"))
        taken = []
        for part in parts:
            if not isinstance(part, list | tuple) or len(part) != 2:
                refuse_field("taken", parts, "pairs of tokens and micro-batches")
            taken.append((whole_number("taken", part[0], least=longest_tokens), whole_number("taken", part[1])))
        stages = list_field("pipeline", state.get("pipeline"))
        pipeline = tuple(whole_number("pipeline", number, least=1) for number in stages)
        return cls(capacity_tokens=capacity_tokens, taken=tuple(taken), pipeline=pipeline, **numbers)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that decide which documents are in a micro-batch of an epoch."""
        return {name: getattr(self, name) for name in ("capacity_tokens", "num_ranks", "micro_steps")}

    @property
    def is_within_epoch(self) -> bool:
        """Whether some micro-batches of its epoch were taken."""
        return bool(self.micro_batch or self.taken)

    def check_sizes(self, now: Mapping[str, int], stages: tuple[int, ...], whole_documents: bool) -> None:
        """Checks that a position within an optimizer step or an epoch was saved with the present sizes, if its
        micro-batches depend on them. With whole documents they depend on ranks and their tokens, in a pipeline also on
        the micro-batches of a step. Raises ConfigError if it was saved with other sizes; names both."""
        into_step = (self.micro_batch - self.steps_from) % self.micro_steps
        if self.sizes != now and into_step:
            raise ConfigError(
                f"the position was saved after {into_step} of {self.micro_steps} micro-batches of an optimizer step "
                f"(micro_batch={self.micro_batch}, steps_from={self.steps_from}), with {self.sizes}; this loader has "
                f"{now}. Save at the end of a step, or resume with the same sizes"
            )
        saved, here = {**self.sizes, "pipeline": self.pipeline}, {**now, "pipeline": stages}
        same_room = all(saved[name] == here[name] for name in ("capacity_tokens", "num_ranks"))
        depends = {
            "whole documents": whole_documents and not same_room,
            "a pipeline": bool(self.pipeline or stages) and saved != here,
        }
        for kind in (kind for kind, differs in depends.items() if differs and self.is_within_epoch):
            raise ConfigError(
                f"the position was saved in the middle of an epoch of {kind} (micro_batch={self.micro_batch}, "
                f"{len(self.taken)} parts taken), with {saved}; this loader has {here}. Resume with the same ranks "
                "and tokens_per_rank and in the same steps, or from the end of an epoch"
            )


def check_identity(state: Mapping[str, Any], identity: Mapping[str, object]) -> None:
    """Checks that a position is of the same data and order. Raises ConfigError if it is not; names the field and both
    values."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"the saved loader position is a {type(state).__name__}, and not a mapping of fields")
    if ("readers" in state) != ("readers" in identity):
        kinds = ("a map-style dataset", "a stream")
        raise ConfigError(
            f"the saved loader position is of {kinds['readers' in state]}, and this loader reads "
            f"{kinds['readers' in identity]}, in another order. Resume with data of the same kind, or begin it anew, "
            "without a position"
        )
    for name, value in identity.items():
        if type(state.get(name)) is not type(value) or state[name] != value:
            raise ConfigError(
                f"the saved loader position is of {name}={_shown(state.get(name))}, this loader has {value!r}; "
                "resume with the same dataset, seed, policy for overlong documents, kind of model (whole "
                "documents) and version of distca_hf"
            )


def with_checksum(fields: Mapping[str, object], documents: int) -> dict[str, object]:
    """Returns the fields of a position with their checksum. `documents` is the `sum_of_documents` of the earlier
    documents of this epoch."""
    text = json.dumps([fields, documents % 2**64], sort_keys=True)
    return {**fields, "checksum": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}


def check_checksum(state: Mapping[str, Any], own: Mapping[str, object], documents: int) -> None:
    """Checks that a position was saved with these fields, and after these documents. Raises ConfigError if it was not;
    names the fields.

    Args:
        state: after `SavedPosition.read`.
        own: a position of the loader that reads it: only its fields count.
        documents: `sum_of_documents` of the earlier documents, as the other fields say.
    """
    fields = {name: state[name] for name in own if name != "checksum"}
    found = with_checksum(fields, documents)["checksum"]
    if state.get("checksum") != found:
        shown = ", ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        raise ConfigError(
            f"the saved loader position has checksum={_shown(state.get('checksum'))}, and its fields and the "
            f"documents before it have {found!r}: one of them was changed ({shown}), or an optimizer step that had "
            "begun is divided in another way here (windows or nodes differ). Resume from another checkpoint, or from "
            "the end of a step"
        )


def sum_of_documents(documents: IntArray) -> int:
    """Returns a checksum of a set of documents. The checksum of two sets together is the sum of both, modulo 2^64."""
    mixed = documents.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * FIRST_FACTOR
    mixed = (mixed ^ (mixed >> np.uint64(27))) * SECOND_FACTOR
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def whole_number(name: str, value: object, least: int = 0, most: int = MOST) -> int:
    """Returns a field that must be a whole number of this range; refuses another by name."""
    if type(value) is not int or not least <= value <= most:
        refuse_field(name, value, f"whole numbers from {least} to {most}")
    return value


def list_field(name: str, value: object, most: int = MOST_PARTS) -> list[Any] | tuple[Any, ...]:
    """Returns a field that must be a list of at most this many; refuses another by name."""
    if not isinstance(value, list | tuple) or len(value) > most:
        refuse_field(name, value, f"a list of at most {most}")
    return value


def refuse_field(name: str, value: object, wanted: str) -> NoReturn:
    """Raises the error of a field with a wrong value."""
    raise ConfigError(f"the saved loader position has {name}={_shown(value)}; expected {wanted}")


def _shown(value: object) -> str:
    """Returns a value as a short text."""
    try:
        return repr(value)[:60]
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists
        return f"a {type(value).__name__} that cannot be shown"
