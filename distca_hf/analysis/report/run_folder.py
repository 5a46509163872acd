"""Run folder: reads the traces of a training, one file of each rank, into figures of every reported micro-batch.

Files are read twice: once to note where the traces of each step are, then step by step. So only one step's traces are
in memory at a time.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple

from distca_hf.analysis.report.estimates import Predictor
from distca_hf.analysis.report.figures import (
    CallOfRanks,
    MemoryBar,
    Report,
    Seconds,
    StepFigures,
    chosen_calls,
    in_nodes,
    spread,
)
from distca_hf.analysis.report.straggler import (
    findings_of,
    most_telling,
    names_in_words,
    summary_of,
    waiting_for_servers,
)
from distca_hf.errors import ReportError
from distca_hf.trace_file import LONGEST_LINE_BYTES, is_json, may_begin_line, read_trace, step_of
from distca_hf.traces import FILES, FOLDER, SERVER_FILES, PassPart, RankTrace, Spent
from distca_hf.whole_file import lines_of, open_regular


# Most traces to read, over all ranks: a minute's work, step after step. If there are more, some steps are left out.
MOST_TRACES = 20_000
# Most seconds by which clocks of nodes differ.
CLOCKS_APART_SECONDS = 5.0
# A micro-batch of one part of the model on ranks that share documents: step, micro-batch, stage, chunk, tensor rank.
_Key = tuple[int, int, int, int, int]

KERNELS, EXCHANGES = (Spent.LOCAL, Spent.REMOTE), (Spent.SEND, Spent.COMBINE)


class _Line(NamedTuple):
    """One line of a file that is not empty: its number, and its first byte."""

    file: Path
    number: int
    begin: int


@dataclass(frozen=True)
class TraceIndex:
    """The steps of a folder. `steps`: numbers of the steps, rising. `unfinished`: files whose last line is cut off and
    left out."""

    steps: Sequence[int]
    num_traces: int
    unfinished: Sequence[Path]
    _lines: Mapping[int, Sequence[_Line]]

    @classmethod
    def of(cls, files: Iterable[Path]) -> "TraceIndex":
        """Reads files once, and notes where the traces of each step are."""
        lines: defaultdict[int, list[_Line]] = defaultdict(list)
        unfinished: list[Path] = []
        for file in files:
            for line, content in _whole_lines(file, unfinished):
                step = step_of(_text(file, content))
                if step is None:  # another form; it says itself what it is, or that it is wrong
                    step = _trace(line, content).step
                lines[step].append(line)
        return cls(sorted(lines), sum(map(len, lines.values())), unfinished, dict(lines))

    def traces_of(self, step: int) -> Iterator[RankTrace]:
        """Yields the traces of a step, in the order of files and lines."""
        for path, of_file in groupby(self._lines[step], key=lambda line: line.file):
            with _opened(path) as file:
                for line in of_file:
                    file.seek(line.begin)
                    yield _trace(line, next(lines_of(file, LONGEST_LINE_BYTES)))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from error


def _whole_lines(path: Path, unfinished: list[Path]) -> Iterator[tuple[_Line, bytes]]:
    """Yields lines that are not empty. Leaves out the last one if it begins like a trace and is incomplete; then adds
    the file to `unfinished`."""
    last, begin = None, 0
    with _opened(path) as file:
        for number, content in enumerate(lines_of(file, LONGEST_LINE_BYTES), 1):
            if last is not None:
                yield last
            last = (_Line(path, number, begin), content) if content.strip() else None
            begin += len(content)
    if last is None:
        return
    is_whole = last[1].endswith(b"\n") or is_json(last[1])
    if may_begin_line(_text(path, last[1])) and not is_whole:
        unfinished.append(path)
    else:
        yield last


def _trace(line: _Line, content: bytes) -> RankTrace:
    return read_trace(_text(line.file, content), f"{line.file} line {line.number}")


def _text(file: Path, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ReportError(f"{file} is not text: it is not as distca_hf writes it") from None


def read_folder(folder: Path, predictor: Predictor | None = None) -> Report:
    """Returns the report of a run. `folder`: of the traces, or the output folder that contains it. `predictor`:
    predicts seconds; None: from profiles of the run's GPUs."""
    predictor = predictor or Predictor(folder=folder)
    files: list[Path] = []
    for place in (folder, folder / FOLDER):  # ranks, then attention servers
        files = files or [*sorted(place.glob(FILES)), *sorted(place.glob(SERVER_FILES))]
    if not files:
        raise ReportError(
            f"{folder} has no traces ({FILES}, also looked for in {FOLDER}/): train with report_every_steps=100, or "
            "give the folder that report_folder named"
        )
    for file in files:
        if not (target := file.resolve()).is_relative_to(folder.resolve()):
            raise ReportError(
                f"{file} is a link to {target}, outside of {folder}: give the folder that the traces are in"
            )
    index = TraceIndex.of(files)
    if not index.steps:
        begun = f", and in {len(index.unfinished)} of them the beginning of one" if index.unfinished else ""
        raise ReportError(
            f"{files[0].parent} has no whole trace in {len(files)} files{begun}: no step was reported before training "
            "ended"
        )
    most = max(2, MOST_TRACES * len(index.steps) // index.num_traces)
    read = [index.steps[at] for at in spread(len(index.steps), most)]
    steps, left_out, newest, missing = [], 0, 0.0, set[str]()
    for step in read:
        traces = list(index.traces_of(step))
        of_step = max(traces, key=_of_trainers_first)
        by_micro_batch: defaultdict[_Key, list[RankTrace]] = defaultdict(list)
        for trace in traces:
            key = trace.step, trace.micro_batch, trace.stage, trace.chunk, trace.tensor_rank
            by_micro_batch[key].append(trace)
        for _, of_ranks in sorted(by_micro_batch.items()):
            latest = max(of_ranks, key=_of_trainers_first)
            # Ranks of a new run replace their own files. An earlier run in this folder may have left files of other
            # ranks, with later steps, stages or micro-batches: written before the new run's earlier steps.
            if latest.written < newest - CLOCKS_APART_SECONDS or latest.num_ranks != of_step.num_ranks:
                left_out += len(of_ranks)
                continue
            plan = latest.fingerprint, latest.num_ranks
            same = {trace.rank: trace for trace in of_ranks if (trace.fingerprint, trace.num_ranks) == plan}
            left_out += len(of_ranks) - len(same)
            steps.append(_figures(same, latest, predictor))
            missing |= {latest.name_of(rank) for rank in steps[-1].missing}
        newest = max(newest, of_step.written)
    notes = [*_notes(steps, left_out, missing), *predictor.lines()]
    if index.unfinished:
        names = ", ".join(file.name for file in index.unfinished)
        notes.append(f"The last line of {names} is cut off and left out: the rank was writing it, or was killed.")
    if len(read) < len(index.steps):
        notes.append(
            f"{len(read)} of {len(index.steps)} reported steps are read, spread evenly: there are too many traces."
        )
    return Report(
        title=f"Run {folder.resolve().name if folder.name != FOLDER else folder.resolve().parent.name}",
        source=str(folder),
        steps=steps,
        summary=summary_of(steps),
        notes=notes,
        begin_with=most_telling(steps),
    )


def _of_trainers_first(trace: RankTrace) -> tuple[bool, float]:
    """Returns a key that is largest for the latest trace; a server may have left one of a step that ran again."""
    return not trace.is_server, trace.written


def _figures(of_ranks: Mapping[int, RankTrace], any_trace: RankTrace, predictor: Predictor) -> StepFigures:
    ranks, all_ranks = range(any_trace.num_ranks), range(len(any_trace.work))
    missing = [rank for rank in all_ranks if rank not in of_ranks]
    predicted = predictor.predict(of_ranks, len(any_trace.work))
    seconds = _seconds(of_ranks, any_trace, predicted)
    # Who sends how much to whom: from the sender's trace, or if that is missing, from the receiver's.
    found = {(rank, other): size for rank, trace in of_ranks.items() for other, size in trace.sent_bytes}
    for rank, trace in of_ranks.items():
        for other, size in trace.received_bytes:
            found.setdefault((other, rank), size)
    sent = [(source, destination, size) for (source, destination), size in sorted(found.items())]
    numbers = {"stage": any_trace.stage, "chunk": any_trace.chunk, "tensor rank": any_trace.tensor_rank}
    parts = [f", {name} {number}" for name, number in numbers.items() if number]
    nodes_sent, shown = in_nodes(
        sent, any_trace.num_ranks, len(any_trace.work) - any_trace.num_ranks, any_trace.ranks_per_node
    )
    return StepFigures(
        label=f"step {any_trace.step}, micro-batch {any_trace.micro_batch}{''.join(parts)}",
        before=any_trace.before,
        after=any_trace.after,
        work_before=any_trace.work_before,
        work=any_trace.work,
        tokens_before=any_trace.tokens_before,
        step_work_before=() if any_trace.placed else any_trace.step_work_before,
        step_work=() if any_trace.placed else any_trace.step_work,
        tokens=[of_ranks[rank].tokens if rank in of_ranks else None for rank in ranks],
        num_ranks=any_trace.num_ranks,
        servers=any_trace.servers,
        sent=shown,
        speeds=any_trace.speeds,
        nodes_sent=nodes_sent,
        missing=missing,
        facts=[*_facts(of_ranks, any_trace), ("predicted with", predicted.source or "nothing")],
        findings=findings_of(any_trace, seconds, missing),
        seconds=seconds,
        calls=chosen_calls(_calls(of_ranks), any_trace.num_ranks),
        memory=[_memory(of_ranks[rank]) for rank in all_ranks if rank in of_ranks],
    )


def _facts(of_ranks: Mapping[int, RankTrace], trace: RankTrace) -> list[tuple[str, str]]:
    devices = sorted({one.device for one in of_ranks.values()})
    incomplete = [trace.name_of(rank) for rank, one in sorted(of_ranks.items()) if not one.is_complete]
    facts = [
        ("documents", f"{trace.documents:,}"),
        ("tokens", f"{trace.num_tokens:,}"),
        ("longest document", f"{trace.longest_document_tokens:,} tokens"),
        ("layers that attend", f"{trace.layers}"),
        ("devices", ", ".join(devices)),
        ("plan", trace.fingerprint),
    ]
    if trace.servers:
        speeds = trace.speeds[trace.num_ranks :] or (1.0,) * len(trace.servers)
        servers = zip(trace.servers, speeds, strict=True)
        facts.append(("attention servers (speeds)", ", ".join(f"{number} ({speed:.2f})" for number, speed in servers)))
    if incomplete:
        facts.append(("without all of backward", names_in_words(incomplete)))
    return facts


def _seconds(of_ranks: Mapping[int, RankTrace], any_trace: RankTrace, predicted: Seconds) -> Seconds:
    def spent(trace: RankTrace, uses: Sequence[Spent]) -> float:  # seconds that all calls of a rank spent on something
        return sum(us for call in trace.calls for use, us in call.spans if use in uses) / 1e6

    traces = [of_ranks.get(rank) for rank in range(len(any_trace.work))]
    attention, waiting, exchange = (
        [None if trace is None else spent(trace, uses) for trace in traces]
        for uses in (KERNELS, (Spent.WAIT,), EXCHANGES)
    )
    return replace(
        predicted,
        attention=attention,
        waiting=waiting,
        exchange=exchange,
        rest=[
            None if trace is None else max(0.0, trace.pass_seconds - sum(call.us for call in trace.calls) / 1e6)
            for trace in traces
        ],
        step=[None if trace is None else trace.step_seconds for trace in traces],
        waiting_for_servers=waiting_for_servers(of_ranks, any_trace.num_ranks),
    )


def _calls(of_ranks: Mapping[int, RankTrace]) -> list[CallOfRanks]:
    """Returns all attention calls, with the ranks of each side by side."""
    found: dict[tuple[PassPart, int], list[tuple[int, Sequence[tuple[str, float]]]]] = {}
    windows: dict[tuple[PassPart, int], int] = {}
    for rank, trace in sorted(of_ranks.items()):
        for call in trace.calls:
            found.setdefault((call.part, call.layer), []).append((rank, call.spans))
            windows[call.part, call.layer] = call.window_tokens
    return [CallOfRanks(part.value, layer, windows[part, layer], ranks) for (part, layer), ranks in found.items()]


def _memory(trace: RankTrace) -> MemoryBar:
    memory = trace.memory
    parts = [("in use at most", float(memory.peak_bytes))]
    if memory.reserved_bytes > memory.peak_bytes:
        parts.append(("held by torch in addition", float(memory.reserved_bytes - memory.peak_bytes)))
    return MemoryBar(trace.name_of(trace.rank), parts, float(memory.device_bytes))


def _notes(steps: Sequence[StepFigures], left_out: int, missing: Collection[str]) -> list[str]:
    notes = []
    if missing:
        where = "in some steps" if any(not step.missing for step in steps) else "in all steps"
        in_order = sorted(missing, key=lambda name: (name.split()[0], int(name.split()[1])))
        notes.append(
            f"No traces of {names_in_words(in_order)} ({where}): their files are on another machine, or they stopped "
            "before they wrote. Work comes from the plan, which all ranks know."
        )
    if left_out:
        notes.append(
            f"{left_out} traces of an earlier run in the same folder, or of steps that ran again, are left out."
        )
    return notes
