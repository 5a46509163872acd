"""Tables: parts of printed answers: the terminal, progress on it, tables without lines, numbers with units, and texts
that several share."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from distca_hf.analysis.fit import Room
from distca_hf.analysis.memory import SHARDING_NAMES, Memory, gradient_bytes
from distca_hf.analysis.simulate.result import Result
from distca_hf.analysis.training_setup import GIB, Sharding
from distca_hf.arrays import IntArray
from distca_hf.errors import printable


T = TypeVar("T")
# Names of parts of memory, by their fields.
PART_NAMES = {
    "state": "weights, AdamW, kept gradients",
    "gathered": "gathered weights, gradients",
    "kept": "activations kept",
    "computed": "work space: a layer or logits",
    "received": "keys and values of other ranks",
}
# Width of text without a terminal, the same as most terminals.
COLUMNS = 80


class Terminal(Console):
    """A console that reads no markup, and shows no control characters except its own."""

    def __init__(self, stderr: bool = False) -> None:
        width = None if Console(stderr=stderr).is_terminal else COLUMNS
        super().__init__(stderr=stderr, width=width, markup=False)

    def render(self, *arguments: Any) -> Iterator[Segment]:
        for segment in super().render(*arguments):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class PlanProgress:
    """A line on stderr with the present stage, if that is a terminal; it disappears at the end."""

    def __init__(self) -> None:
        console = Terminal(stderr=True)
        label = TextColumn("{task.description}", markup=False)
        columns = (label, BarColumn(None), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def shown(self) -> Progress:
        """Returns a context in which the line is shown."""
        return self._progress

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        """Shows a stage of unknown length."""
        task = self._progress.add_task(label, total=None)
        yield
        self._progress.remove_task(task)

    @contextmanager
    def counting(self, label: str, total: int) -> Iterator[Callable[[Iterable[T]], Iterator[T]]]:
        """Shows how many of some items are done; yields a function that passes them on."""
        task = self._progress.add_task(label, total=total)

        def count(items: Iterable[T]) -> Iterator[T]:
            for item in items:
                yield item
                self._progress.advance(task)

        yield count
        self._progress.remove_task(task)

    def over(self, label: str, items: Sequence[int]) -> Iterable[int]:
        with self.counting(label, len(items)) as count:
            yield from count(items)


def of_lengths(source: str, tokens: IntArray, thing: str = "document") -> str:
    """Returns the beginning of a sentence: how many documents or other things there are, and how long they are."""
    counts = f"{counted(len(tokens), thing)}, {counted(int(tokens.sum()), 'token')}"
    return f"{source}: {counts}, the longest has {int(tokens.max()):,}"


def print_json(content: Mapping[str, object]) -> None:
    """Prints one JSON object on one line."""
    sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")


# Ways of activation checkpointing, as text.
CHECKPOINTING = {
    "saved": "layers checkpointed, attention's outputs kept",
    "offloaded": "layers checkpointed, their inputs and attention's outputs on the host",
    "recomputed": "layers checkpointed, attention computed twice",
    "none": "no activation checkpointing",
}


def block(title: str, table: Table, *notes: str) -> RenderableType:
    """Returns a title, a table and notes below it, which may be wider than the table."""
    return Group(Text(title, style="bold"), table, *notes)


def print_blocks(console: Console, blocks: Iterable[RenderableType]) -> None:
    """Prints blocks with an empty line between them."""
    for number, each in enumerate(blocks):
        if number:
            console.print()
        console.print(each, highlight=False)


def plain_table(*columns: str) -> Table:
    """Returns a table without lines: names that may wrap, then right-aligned numbers that never do."""
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    table.add_column("", overflow="fold", min_width=7)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def memory_table(ways: Mapping[Sharding, Memory], parts: Mapping[str, str], room: Room, num_ranks: int) -> Table:
    """Returns the table of GiB per GPU, by part and by way to shard weights, and of a node's host if it has any.
    `parts`: text for the fields that are shown."""
    table = plain_table(*(SHARDING_NAMES[sharding] for sharding in ways))
    for part, label in parts.items():
        table.add_row(label, *(in_gib(getattr(memory, part)) for memory in ways.values()))
    table.add_row("peak", *(in_gib(memory.total) for memory in ways.values()))
    fits = ("yes" if memory.total <= room.gpu_bytes else "no" for memory in ways.values())
    table.add_row(f"fits in {in_gib(room.gpu_bytes)}", *fits)
    if any(memory.host for memory in ways.values()):
        nodes = [room.node_bytes(memory, num_ranks) for memory in ways.values()]
        gpus = counted(min(num_ranks, room.ranks_per_node), "GPU")
        table.add_row(f"on the host of a node ({gpus})", *map(in_gib, nodes))
        if room.host_gib is not None:
            host_bytes = room.host_gib * GIB
            table.add_row(f"fits in {in_gib(host_bytes)}", *("yes" if node <= host_bytes else "no" for node in nodes))
    return table


def in_tiles(mlp_tokens: int, attention_kv_heads: int) -> str:
    """Returns on how many tokens MLPs run at a time, and attention on how many heads, as parts of a sentence; empty
    if they run on all."""
    mlps = f"MLPs on {counted(mlp_tokens, 'token')} at a time (--mlp-tokens); " if mlp_tokens else ""
    heads = f"attention on {counted(attention_kv_heads, 'KV head')} at a time (--attention-kv-heads); "
    return mlps + heads * bool(attention_kv_heads)


def of_host(ways: Mapping[Sharding, Memory], state_on_host: bool) -> str:
    """Returns what waits on the host of a GPU, as text; empty if nothing does."""
    memory, note = ways["fsdp2"], ""
    if memory.host:
        note = (
            f" On the host, for each GPU: {in_gib(memory.host_kept)} GiB of activations, {in_gib(memory.host_state)} "
            "of weights, gradients and AdamW; processes and data are not counted."
        )
    if state_on_host:
        note += " With --offload-params ZeRO-3 is not estimated."
    return note


def ways_table(simulated: Result) -> Table:
    """Returns the table of ways to train, the slowest first."""
    table = plain_table("x plain", "GiB", "fits", "bytes")
    for way in sorted(simulated.ways, key=lambda way: way.times_as_fast):
        table.add_row(
            way.label + ("" if way.whole else " *"),
            f"{way.times_as_fast:.2f}",
            in_gib(way.memory_bytes),
            "yes" if way.fits else "no",
            in_bytes(max(way.received_bytes, way.state_bytes)),
        )
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


def accumulation(parameters: int, ranks: int, micro_steps: int) -> str:
    """Returns what each way to train keeps of gradients between micro-steps, as text; empty without accumulation."""
    if micro_steps == 1:
        return ""
    fsdp2, synced, ddp, zero2, zero3 = (
        in_gib(gradient_bytes(way, parameters, parameters // ranks, micro_steps))
        for way in ("fsdp2", "fsdp2_synced", "ddp", "zero2", "zero3")
    )
    return (
        f" Between {micro_steps} micro-steps Trainer does not sync gradients: with FSDP2 each GPU keeps all of them, "
        f"{fsdp2} GiB in bf16. Synced (sync_each_batch=True in gradient_accumulation_kwargs of accelerator_config) it "
        f"keeps {synced} GiB, and syncs {micro_steps} times as often. DDP keeps {ddp}, ZeRO-2 {zero2}, ZeRO-3 {zero3}."
    )
