"""The way of a length: the files that a document's length crosses are those of docs/design.md, and no others."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from datasets import Dataset

import distca_hf
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.prepare import Cursor
from distca_hf.config import DistCAConfig
from distca_hf.placement.place import place
from distca_hf.planning.kernel_calls import KernelCall
from distca_hf.testing import LoopbackTransport, run_ranks
from support.commands import REPOSITORY


PACKAGE = Path(distca_hf.__file__).parent
PAGE = (REPOSITORY / "docs" / "design.md").read_text()
LENGTH = 1013  # no other number of these micro-batches is it
ONE_RANK = [1200, 40, LENGTH, 1100, 64, 96, 80, 120, 300, 64, 71, 900]  # one rank holds the document
TWO_RANKS = [40, LENGTH, 64, 96, 80, 120, 300, 64, 71]  # it is cut


@dataclass
class Call:
    """A call from one file of the package to another: whether the length is an argument, and is in the result."""

    caller: str
    line: int
    file: str
    function: str
    comes: bool
    leaves: bool = False


class Tracer:
    """Follows some numbers through the calls of this thread, until there are kernel calls with them."""

    def __init__(self, numbers: set[int]) -> None:
        self.numbers = numbers
        self.events: list[tuple[bool, Call]] = []  # calls (True) and returns, in order
        self._open: list[Call] = []
        self._ended = False

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        file = file_of(frame)
        if self._ended or file is None or event not in ("call", "return"):
            return
        if event == "call":
            code, caller = frame.f_code, frame.f_back
            while caller is not None and file_of(caller) is None:
                caller = caller.f_back
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            given = frame.f_locals if code.co_name == "__post_init__" else set(names) - {"self", "cls"}
            comes = any(self.has(frame.f_locals[name]) for name in given)
            where = ("", 0) if caller is None else (str(file_of(caller)), caller.f_lineno)
            self._open.append(Call(*where, file, code.co_qualname, comes))
            self.events.append((True, self._open[-1]))
        elif self._open:
            made = frame.f_locals["self"] if frame.f_code.co_name in ("__init__", "__post_init__") else value
            self._open[-1].leaves = self.has(made)
            self.events.append((False, self._open.pop()))
            # Once the offsets are made, nothing is followed further.
            self._ended = isinstance(value, tuple) and bool(value) and type(value[0]) is KernelCall and self.has(value)

    def has(self, value: object, depth: int = 4) -> bool:
        """Whether a value is one of the numbers, or holds it, also as the difference of two offsets."""
        if isinstance(value, np.ndarray) and value.dtype.kind == "i":
            offsets = np.diff(value).tolist() if value.ndim == 1 else []
            return not self.numbers.isdisjoint({*value.ravel().tolist(), *offsets})
        if isinstance(value, list | tuple) and depth:
            return any(self.has(one, depth - 1) for one in value)
        if type(value).__module__.startswith("distca_hf") and not isinstance(value, type) and depth:
            slots = [getattr(value, name, None) for name in getattr(value, "__slots__", ())]
            return any(self.has(one, depth - 1) for one in (*slots, *getattr(value, "__dict__", {}).values()))
        return type(value) is int and value in self.numbers


@cache
def file_of_code(filename: str, function: str) -> str | None:
    path = Path(filename)
    within = path.is_relative_to(PACKAGE) and not function.startswith("<")  # comprehensions belong to their function
    return path.relative_to(PACKAGE).as_posix() if within else None


def file_of(frame: FrameType) -> str | None:
    """The file of a function of the package, as the page names it."""
    return file_of_code(frame.f_code.co_filename, frame.f_code.co_name)


def trace(lengths: list[int], tokens_per_rank: int) -> Tracer:
    """Traces a micro-batch on the rank, of two, that holds the end of the document."""
    layout = place(lengths, 2)
    held = np.flatnonzero(layout.segment_document == lengths.index(LENGTH))
    start, stop = layout.segment_start[held], layout.segment_stop[held]
    tracer = Tracer({*start.tolist(), *stop.tolist(), *(stop - start).tolist()} - {0})
    config = DistCAConfig(tokens_per_rank=tokens_per_rank, pad_to_multiple_of=1)
    dataset = Dataset.from_dict({"input_ids": [[7] * length for length in lengths]})

    def prepare(transport: LoopbackTransport) -> None:
        # The other thread leaves its profile function as it is: the interpreter refuses to set two at a time.
        traced = transport.rank == layout.segment_rank[held[stop.argmax()]]
        if traced:
            sys.setprofile(tracer)
        try:
            loader = PlacedLoader(dataset, PlacedPlanner(config, 2), transport, torch.device("cpu"), shuffle=False)
            loader.preparer.prepare(loader._packed(Cursor()), Cursor())
        finally:
            if traced:
                sys.setprofile(None)

    run_ranks(2, prepare)
    return tracer


def way(tracer: Tracer, counts: Callable[[str], bool]) -> list[str]:
    """Files in the order in which the length comes to them, and comes back. A line that calls often counts once."""
    stays: list[str] = []
    seen: set[tuple[str, int, str]] = set()
    counted: list[Call] = []
    for begins, call in tracer.events:
        line = (call.caller, call.line, call.function)
        if begins and call.leaves and (call.comes or not stays) and call.file != call.caller and line not in seen:
            if counts(call.file) and counts(call.caller):
                seen.add(line)
                counted.append(call)
                stays += [call.caller, call.file]
        elif not begins and any(call is one for one in counted):
            stays.append(call.caller)
    return [file for at, file in enumerate(stays) if at == 0 or stays[at - 1] != file]


def in_folders(file: str) -> bool:
    """Files of the package itself hold words that all folders share; ranks as threads are of the tests."""
    return "/" in file and not file.startswith("testing/")


def without_the_search(file: str) -> bool:
    """Inside of `place` a document is one of many pieces in a pool."""
    return in_folders(file) and (not file.startswith("placement/") or file == "placement/place.py")


def of_the_page(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


SECTION = of_the_page("The way of a length")
TABLE = re.findall(r"^\| `(\S+)` \|", SECTION, re.MULTILINE)


@pytest.mark.parametrize(
    ("lengths", "tokens_per_rank", "counts", "others"),
    [
        (ONE_RANK, 2560, without_the_search, []),
        (TWO_RANKS, 1024, without_the_search, ["planning/remote_kv.py", "planning/transfers.py"]),
        (
            ONE_RANK,
            2560,
            in_folders,
            [f"placement/{name}.py" for name in ("piece_pool", "heuristics", "accordion")],
        ),
    ],
    ids=["held by one rank", "cut", "with the search of placement"],
)
def test_the_page_lists_the_files_that_a_length_crosses(
    lengths: list[int], tokens_per_rank: int, counts: Callable[[str], bool], others: list[str]
) -> None:
    stays = way(trace(lengths, tokens_per_rank), counts)
    files = list(dict.fromkeys(stays))

    assert sorted(files) == sorted([*TABLE, *others])
    assert others or files == TABLE
    assert f"{len(files)} files, {len(stays) - len(files)} returns" in SECTION
    assert all(f"`{file}`" in SECTION for file in others)


def test_the_way_is_short() -> None:
    stays = way(trace(ONE_RANK, 2560), without_the_search)

    assert len(set(stays)) <= 12
    assert len(stays) - len(set(stays)) <= 20
