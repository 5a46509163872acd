"""Commands: `distca plan`, from a file of lengths to text, picture or JSON, with progress on stderr; and `distca env`,
versions, devices and attention kernels that can run, for bug reports."""

import gc
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from distca_hf.analysis.answer import make_answer
from distca_hf.analysis.epoch import divide_batch, pack_epoch, plan_epoch
from distca_hf.analysis.estimates import Assumptions
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.first_step import make_report
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.memory import GIB, Checkpointing
from distca_hf.analysis.options import PlanOptions
from distca_hf.analysis.pictures import check_can_draw, draw_answer
from distca_hf.analysis.print_answer import print_answer
from distca_hf.analysis.profiles.shipped import find_profile, gpu_gib_of
from distca_hf.analysis.request import PlanRequest
from distca_hf.analysis.tables import Terminal
from distca_hf.config import OverlongPolicy
from distca_hf.errors import ConfigError
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.version import __version__


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
