"""Explain: shows as text, step by step, what one layer's attention does on a rank for a micro-batch.

    rank 1 of 2 holds 44 tokens: d2[0:24] d0[44:64]

    forward
      send     keys: 44 rows from rank 0
      local    d2[0:24] d0[44:64], causal                                510 pairs
      wait     keys
      remote   d0[44:64] to d0[0:44], all                                880 pairs

The lines are recorded, not derived from the plan: the attention operator itself runs, with a thread for each rank.
Each row holds its own name as numbers (document, token, head). The kernel is replaced by one that reads these names
and computes nothing. Each line begins with the use of time that `distca report` counts it as (`traces.Spent`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from distca_hf.comm.transport import AllToAll, Transport
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.errors import ConfigError
from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Outputs, Room, Saved, Spans
from distca_hf.layout import Layout
from distca_hf.placement.place import place
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.runtime.attention import Attended, attend, attend_backward
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.pending_traces import PassTrace
from distca_hf.testing import NotedTransport, run_ranks
from distca_hf.traces import Spent


# Numbers that a row holds for each head, in place of a key or query: document, token and head.
NAME_NUMBERS = 3
# Most tasks of a call, and ranks of an exchange, that a line names; it counts the others.
TASKS_SHOWN = 4
# Ranks, each of which is a thread.
MOST_RANKS = 1024
# Tokens times heads that fit in memory with some room: 16 million tokens of 8 heads.
MOST_NAMES = 2**27
# Width of the text before the pairs of a call, in characters.
TEXT_WIDTH = 56
# Printed after the ranks.
LEGEND = """\
d0[0:48]  tokens 0 to 47 of the first document
A to B    queries A attend to keys B
send      starts an exchange: rows to other ranks, and from them
wait      until its rows have arrived
local     attention of this rank's queries to this rank's keys
remote    attention with keys or queries from other ranks, and sending its results
rows      one for each token, or for each of its head groups if heads are divided
keys      with their values
queries   of tasks that move; in backward, the gradients of their outputs
results   outputs of these queries; in backward, the gradients of the queries
pairs     of a query and a key that it attends to, in one head"""


class Explained(NamedTuple):
    """What one rank does, as text. `holds`: the tokens that it holds, by document. `forward`, `backward`: a line for
    each kernel call, exchange and wait, in order."""

    holds: str
    forward: list[str]
    backward: list[str]


def explain(
    document_tokens: Sequence[int],
    num_ranks: int,
    mask: Mask = CAUSAL_MASK,
    kv_heads: int = 8,
    head_groups: int = 1,
    num_chunks: int = 1,
    refetches: bool = False,
) -> list[Explained]:
    """Returns what each rank does in one layer, for documents placed as `plugin.dataloader` places them. `kv_heads`:
    KV heads of the layer, and its query heads. `head_groups`: groups that the heads of very long documents may be
    divided into. `refetches`: whether keys are sent again in backward instead of being kept."""
    if kv_heads % head_groups:
        raise ConfigError(f"{kv_heads} KV heads do not divide into {head_groups} groups")
    if (tokens := sum(document_tokens)) * kv_heads > MOST_NAMES:
        raise ConfigError(
            f"{tokens:,} tokens x {kv_heads:,} KV heads are too many to follow: at most {MOST_NAMES:,}. Give fewer "
            "or shorter documents"
        )
    plan = plan_in_place(place(document_tokens, num_ranks, head_groups=head_groups), head_groups)
    return explain_plan(plan, mask, kv_heads, num_chunks, refetches)


def explain_plan(
    plan: Plan, mask: Mask = CAUSAL_MASK, kv_heads: int = 8, num_chunks: int = 1, refetches: bool = False
) -> list[Explained]:
    """Returns what each rank does in one layer with this mask. `plan`: of the full layers. Others as in `explain`."""
    layout = plan.layout
    config = DistCAConfig(kernel="reference", kv_residency="refetch" if refetches else "keep")
    spec = AttentionSpec(1.0, window_tokens=mask.window_tokens or 0, chunked=mask.chunked)

    def run(transport: Transport) -> Explained:
        rank, notes = transport.rank, _Notes()
        kinds = PinnedKinds.prepare(RoutedKinds.of(plan, rank, num_chunks, ((mask, 1),)))
        noted: Any = NotedTransport(transport, notes.started, notes.waited)
        live = LivePlan(0, kinds.planned(torch.device("cpu"), plan.fingerprint), noted, config)
        live.forward_pass.trace = notes
        live.lookup.kernel = lambda *given: _NotingKernel(notes, kv_heads, mask.window_tokens)  # type: ignore[method-assign]
        rows = torch.zeros(int(layout.rank_rows[rank]), kv_heads, NAME_NUMBERS, dtype=torch.float64)
        for document, start, stop, row in _segments(layout, rank):
            held = rows[row : row + stop - start]
            held[..., 0], held[..., 1] = document, torch.arange(start, stop)[:, None]
        rows[..., 2] = torch.arange(kv_heads)
        with torch.no_grad():
            out, lse, kept = attend(rows, rows, rows, spec, live)
            forward = notes.take()
            attend_backward(torch.zeros_like(out), Attended(rows, rows, rows, out, lse), kept, spec, live)
        segments = [f"d{document}[{start}:{stop}]" for document, start, stop, _ in _segments(layout, rank)]
        holds = f"{int(layout.rank_tokens[rank]):,} tokens: {_shortened(segments)}"
        return Explained(holds, forward, notes.take())

    return run_ranks(layout.num_ranks, run)


def explained(document_tokens: Sequence[int], num_ranks: int, rank: int | None, *of_layer: Any) -> str:
    """Returns what ranks do as text, with a legend. `rank`: the only rank to show; None for all. `of_layer`: further
    arguments of `explain`."""
    if num_ranks > MOST_RANKS:
        raise ConfigError(f"--gpus {num_ranks} is more than {MOST_RANKS}: each rank is a thread here")
    if rank is not None and rank >= num_ranks:
        raise ConfigError(f"rank {rank} is not one of {num_ranks}: ranks are 0 to {num_ranks - 1}")
    lines = []
    for number, of_rank in enumerate(explain(document_tokens, num_ranks, *of_layer)):
        if rank in (None, number):
            lines += [f"rank {number} of {num_ranks} holds {of_rank.holds}"]
            for title, part in (("forward", of_rank.forward), ("backward", of_rank.backward)):
                lines += ["", f"  {title}", *(f"    {line}" for line in part)]
            lines.append("")
    return "\n".join([*lines, LEGEND])


def documents_of(text: str) -> list[int]:
    """Returns the lengths of documents that a text lists: "2x32768,4096" are three documents."""
    lengths: list[int] = []
    for part in map(str.strip, text.split(",")):
        count, _, length = part.rpartition("x") if "x" in part else ("1", "", part)
        if not (length.isdecimal() and count.isdecimal() and 0 < int(count) <= MOST_NAMES):
            raise ConfigError(f"documents are lengths in tokens, as in 2x32768,4096; not {part!r}")
        lengths += [int(length)] * int(count)
    return lengths


def _segments(layout: Layout, rank: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields document, start, stop and first row of each segment of a rank."""
    mine = layout.segments_of(rank)
    columns = layout.segment_document, layout.segment_start, layout.segment_tokens, layout.segment_row
    for document, start, tokens, row in zip(*(column[mine].tolist() for column in columns), strict=True):
        yield document, start, start + tokens, row


class _Notes(PassTrace):
    """Lines of one rank. A text waits until the trace says what its time was spent on, which begins the line."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._lines: list[str] = []

    def note(self, text: str) -> None:
        self._texts.append(text)

    def started(self, asked: AllToAll) -> None:
        parts = [_rows_of_ranks(asked.send_counts, "to"), _rows_of_ranks(asked.receive_counts, "from")]
        self.note(f"{_what(asked)}: {'; '.join(filter(None, parts)) or 'no rows of this rank, only of others'}")

    def waited(self, asked: AllToAll) -> None:
        self.note(_what(asked))

    def spent(self, use: Spent) -> None:
        self._lines += [f"{use.name.lower():8} {text}" for text in self._texts]
        self._texts.clear()

    def take(self) -> list[str]:
        """Returns and clears the lines so far."""
        lines, self._lines = self._lines, []
        return lines


def _what(asked: AllToAll) -> str:
    return asked.where.split(", ")[-1]


def _rows_of_ranks(counts: Sequence[int], direction: str) -> str:
    """Returns "3 rows to rank 0, 4 to rank 2"; empty without rows."""
    found = [f"{count:,} {direction} rank {rank}" for rank, count in enumerate(counts) if count]
    return _shortened(found, ", ").replace(f" {direction}", f" rows {direction}", 1)


@dataclass
class _NotingKernel:
    """A kernel that notes its calls and computes nothing. `num_heads`: KV heads of the layer. `window_tokens`: of the
    layer's sliding window; None without one."""

    notes: _Notes
    num_heads: int
    window_tokens: int | None

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        self._note(inputs.q_TNH, inputs.k_SGH, spans, spec)
        out, lse = room.made(inputs)
        return out.zero_(), lse.zero_()

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        self._note(saved.q_TNH, saved.k_SGH, spans, spec)
        for gradient in gradients:
            gradient.zero_()

    def _note(self, q: torch.Tensor, k: torch.Tensor, spans: Spans, spec: AttentionSpec) -> None:
        tasks: list[str] = []
        pairs = 0
        bounds = zip(spans.queries, spans.queries[1:], spans.keys, spans.keys[1:], strict=False)
        for first_query, last_query, first_key, last_key in bounds:
            queries, keys = last_query - first_query, last_key - first_key
            pairs += _pairs(queries, keys, spec)
            if len(tasks) <= TASKS_SHOWN:
                names = [_name(q[first_query:last_query]), _name(k[first_key:last_key])]
                tasks.append(" to ".join(dict.fromkeys(names)))  # once if queries and keys are of the same tokens
        how = ["causal" if spec.causal else "all"] if not spec.window_tokens else []
        how += [f"in a window of {self.window_tokens}"] if spec.window_tokens else []
        heads = {int(head) for head in k[0, :, 2]} if len(k) else set()
        how += [f"heads [{min(heads)}:{max(heads) + 1}]"] if 0 < len(heads) < self.num_heads else []
        more = len(spans.queries) - 1 - TASKS_SHOWN
        self.notes.note(f"{', '.join([_shortened(tasks, count=more), *how]):{TEXT_WIDTH}} {pairs:,} pairs")


def _name(rows: torch.Tensor) -> str:
    """Returns document and tokens of rows that are consecutive tokens of one document, as in "d0[0:48]"."""
    document, tokens = int(rows[0, 0, 0]), rows[:, 0, 1]
    return f"d{document}[{int(tokens.min())}:{int(tokens.max()) + 1}]"


def _pairs(queries: int, keys: int, spec: AttentionSpec) -> int:
    """Counts the attended pairs of a task in one head."""
    if not spec.causal and not spec.window_tokens:
        return queries * keys
    at = np.arange(queries, dtype=np.int64)
    if spec.causal:
        attended = keys - queries + at + 1
        return int(np.minimum(attended, spec.window_tokens or keys).sum())
    return int(np.minimum(spec.window_tokens + queries - 1 - at, keys).sum())


def _shortened(texts: Sequence[str], separator: str = " ", count: int | None = None) -> str:
    """Joins the first texts, and says how many more there are."""
    more = len(texts) - TASKS_SHOWN if count is None else count
    return separator.join([*texts[:TASKS_SHOWN], *([f"and {more:,} more"] if more > 0 else [])])
