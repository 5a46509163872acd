"""Commands: `distca plan`, from a file of lengths to text, picture or JSON, with progress on stderr; and `distca env`,
versions, devices and attention kernels that can run, for bug reports."""

import gc
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from distca_hf.analysis.answer import Assumptions, make_answer
from distca_hf.analysis.epoch import divide_batch, pack_epoch, plan_epoch
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.first_step import make_report
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.memory import GIB, Checkpointing
from distca_hf.analysis.options import PlanOptions
from distca_hf.analysis.print_answer import print_answer
from distca_hf.analysis.profiles.cluster_profile import find_profile, gpu_gib_of
from distca_hf.analysis.request import PlanRequest
from distca_hf.analysis.tables import Terminal
from distca_hf.config import OverlongPolicy
from distca_hf.errors import ConfigError
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.version import __version__
from distca_hf.whole_file import replaced


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from distca_hf.analysis.answer import PlanAnswer


# Colours of work, of waiting, and of labels.
WORKING, WAITING, MUTED = "#2f6fb7", "#e3e7eb", "#59636e"


def check_can_draw(path: Path) -> None:
    """Checks that a picture can be drawn into a file, before anything is planned.

    Raises:
        ConfigError: matplotlib is missing, it does not support the format, or the folder does not exist.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'distca_hf[report]'") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(f"--plot {path} must end in one of {', '.join(f'.{name}' for name in sorted(formats))}")
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"--plot {path} is a folder, or in a folder that does not exist")


def draw_answer(answer: "PlanAnswer", path: Path) -> None:
    """Draws an answer into a file, which appears when it is complete.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = figure_of(answer)
    try:
        with replaced(path, named=True) as unfinished:
            figure.savefig(unfinished, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror or error}") from error


def figure_of(answer: "PlanAnswer") -> "Figure":
    """Returns a figure of three panels.

    Two show the work of every rank over the mean in the first optimizer step, before and after. The third is a
    histogram of the imbalance of all micro-batches in order.
    """
    from matplotlib.figure import Figure

    report = answer.step
    request, num_ranks = report.request, report.request.num_ranks
    before, after = report.imbalance_before, report.figures.imbalance
    figure = Figure(figsize=(min(16.0, 6.0 + 0.1 * num_ranks), 7.5), layout="constrained")
    in_order, planned, epoch = figure.subplots(3, 1)
    planned.sharex(in_order)
    planned.sharey(in_order)
    for panel, title, work in (
        (in_order, f"documents in order: the busiest rank has {before:.2f} times the mean", report.work_before),
        (planned, f"{request.layout} by distca: {after:.3f} times the mean", report.work),
    ):
        panel.bar(range(num_ranks), work * (num_ranks / max(1, int(work.sum()))), width=0.9)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_title(title, loc="left", fontsize="medium")
        panel.set_ylabel("work / mean")
        panel.set_xlabel("rank")
        panel.margins(x=0.01)
    epoch.hist(answer.imbalance_before, bins=40)
    spread = answer.epoch.imbalance_before
    epoch.set_title(f"all {answer.epoch.micro_batches:,} micro-batches in order", loc="left", fontsize="medium")
    epoch.set_xlabel(f"busiest rank / mean; {spread.mean:.2f} on average, {spread.worst:.2f} at most")
    epoch.set_ylabel("micro-batches")
    figure.suptitle(
        f"Attention work: {before:.2f} times the mean on the busiest of {num_ranks} ranks, then {after:.2f} times\n"
        f"{request.model.name}, {num_ranks} ranks x {request.tokens_per_rank:,} tokens, first optimizer step",
        x=0.01,
        ha="left",
    )
    return figure


def draw_balance(work_before: Sequence[Sequence[int]], work: Sequence[Sequence[int]], path: Path) -> None:
    """Draws the attention time of every micro-batch of a run, before and after placement.

    A bar is the mean work of the ranks, 1.0, and on top of it the time of waiting for the busiest rank.

    Args:
        work_before, work: `[micro_batches][ranks]` attended pairs.
        path: file to write; its ending decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, panels = pyplot.subplots(
        2, 1, figsize=(min(16.0, 5.0 + 0.16 * len(work)), 5.2), sharex=True, sharey=True, layout="constrained"
    )
    shares = []
    for panel, title, batches in zip(
        panels, ("Packed in order", "Placed by distca"), (work_before, work), strict=True
    ):
        busiest = [max(batch) * len(batch) / max(1, sum(batch)) for batch in batches]
        shares.append(1 - len(busiest) / sum(busiest))
        places = range(1, 1 + len(busiest))
        panel.bar(places, [1.0] * len(busiest), 0.8, color=WORKING, label="mean work of the ranks")
        waiting = [value - 1.0 for value in busiest]
        style = {"color": WAITING, "hatch": "////", "edgecolor": "#a3aeb9", "linewidth": 0.0}
        panel.bar(places, waiting, 0.8, bottom=1.0, label="waiting for the busiest rank", **style)
        panel.set_title(f"{title}: {100 * shares[-1]:.0f} % waiting", loc="left", fontsize="medium")
        panel.set_ylabel("attention time\n(1 = mean work)", color=MUTED)
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].set_xlabel("micro-batch", color=MUTED)
    panels[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[1].set_xlim(0.4, len(work) + 0.6)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    before, after = (f"{100 * share:.0f} %" for share in shares)
    title = f"{before} of attention time is waiting; placed by distca: {after}"
    figure.suptitle(title, x=0.01, ha="left", fontsize="large", fontweight="bold", wrap=True)
    with replaced(path) as unfinished:
        figure.savefig(unfinished, dpi=120)
    pyplot.close(figure)


T = TypeVar("T")
# The model of all measured tables (docs/performance.md).
DEFAULT_MODEL = "llama3-8b"
# Packages on which bugs have depended: those that training imports, and those that bring kernels.
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "trl",
    "peft",
    "deepspeed",
    "liger-kernel",
    "flash-attn-4",
    "flash-attn",
)


def run_plan(options: PlanOptions, tokens_per_rank: int) -> None:
    """Runs `distca plan`. Output is printed at the very end, so that an error leaves nothing behind.

    Raises:
        ConfigError: an option, the model, or the picture's path is wrong.
        PackingError: lengths cannot be read, or do not fit.
    """
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed} must be at least 0")
    shape = find_model(options.model or DEFAULT_MODEL)
    policy = cast(OverlongPolicy, options.overlong)  # the request refuses any other
    stages = pipeline_of(options.pipeline, options.chunks)
    world = options.gpus, tokens_per_rank, options.ranks_per_node, options.micro_steps
    request = PlanRequest(*world, shape, options.layout, policy, options.bytes_limit, stages)
    kept = cast(Checkpointing, options.checkpointing)  # likewise
    gpu_gib = gpu_gib_of(find_profile(options.cluster)) if options.gpu_gib is None else options.gpu_gib
    assumptions = Assumptions(kept, options.liger, gpu_gib, options.seed, options.cluster)
    if shape.size is not None:
        assumptions.simulation(request)  # refuses what cannot be simulated before anything is read
    if options.plot is not None:
        check_can_draw(options.plot)
    progress = PlanProgress()
    with progress.shown():
        with progress.stage(f"reading {options.lengths.name}"):
            documents = read_lengths(options.lengths)
        with progress.stage(f"packing {len(documents.tokens):,} documents"):
            if options.lengths_are_batch:
                packed = divide_batch(documents.tokens, request).as_epoch()
            else:
                packed = pack_epoch(documents.tokens, request, options.seed)
        # Planning is timed: the garbage collector must not spend that time on objects of imports and reading.
        gc.collect()
        gc.freeze()
        step = make_report(request, packed.first_step(options.micro_steps), documents.source)
        plans = plan_epoch(
            request, packed.document_tokens, packed.epoch, lambda steps: progress.over("planning an epoch", steps)
        )
        with progress.stage("other numbers of tokens per rank" if stages is None else "simulating the pipeline"):
            answer = make_answer(step, plans, packed, documents.tokens, assumptions, options.compare)
    if options.plot is not None:
        draw_answer(answer, options.plot)
    if options.as_json:
        sys.stdout.write(json.dumps(answer.as_json(), allow_nan=False) + "\n")
    else:
        print_answer(answer, Terminal())


def pipeline_of(stages: int | None, chunks: int | None) -> Pipeline | None:
    """Returns the pipeline that was asked for.

    Raises:
        ConfigError: a number is out of range, or needs --pipeline.
    """
    if stages is None:
        if chunks is not None:
            raise ConfigError(f"--chunks {chunks} needs --pipeline, which is not given")
        return None
    try:
        return Pipeline(stages, 1 if chunks is None else chunks)
    except ConfigError as error:
        raise ConfigError(f"--pipeline {stages}{'' if chunks is None else f' --chunks {chunks}'}: {error}") from error


class PlanProgress:
    """A line on stderr with the present stage, if that is a terminal; it disappears at the end."""

    def __init__(self) -> None:
        console = Terminal(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the line until the block ends, with or without an error."""
        with self._progress:
            yield

    @contextmanager
    def stage(self, words: str) -> Iterator[None]:
        """Shows a stage of unknown length."""
        task = self._progress.add_task(words, total=None)
        yield
        self._progress.remove_task(task)

    @contextmanager
    def counting(self, words: str, total: int) -> Iterator[Callable[[Iterable[T]], Iterator[T]]]:
        """Shows how many of some items are done; yields a function that hands them on."""
        task = self._progress.add_task(words, total=total)

        def count(items: Iterable[T]) -> Iterator[T]:
            for item in items:
                yield item
                self._progress.advance(task)

        yield count
        self._progress.remove_task(task)

    def over(self, words: str, items: Sequence[int]) -> Iterable[int]:
        """Yields items, and shows how many are done."""
        with self.counting(words, len(items)) as count:
            yield from count(items)


def print_environment(console: Console) -> None:
    """Runs `distca env`: prints versions of packages, devices, and kernels in order of preference."""
    import torch  # which `distca plan` does not need

    from distca_hf.kernels.registry import KERNELS

    console.print(f"distca_hf {__version__}, Python {platform.python_version()}, {platform.platform()}")
    versions = Table("package", "version")
    for package in PACKAGES:
        versions.add_row(package, _version(package))
    console.print(versions)
    for line in _devices():
        console.print(line)
    kernels = Table(
        "kernel", "runs on", "here", title="attention kernels, in order of preference", title_justify="left"
    )
    for kernel, entry in KERNELS.items():
        device = entry.capabilities.device_type
        there = "available" if device != "cuda" or torch.cuda.is_available() else "installed, needs a GPU"
        kernels.add_row(kernel, device or "any device", entry.missing() or there)
    console.print(kernels)


def _version(package: str) -> str:
    """Returns the installed version of a package, or a dash."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def _devices() -> list[str]:
    """Returns a line for each GPU and one for the libraries between them, or one line if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return [f"devices: CPU only; torch was built for CUDA {torch.version.cuda or '-'}"]
    lines = [f"devices: {torch.cuda.device_count()} GPUs"]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        lines.append(
            f"GPU {index}: {gpu.name}, {gpu.total_memory / GIB:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [*lines, f"CUDA {torch.version.cuda or '-'}, ROCm {torch.version.hip or '-'}, NCCL {nccl}"]
