"""Commands: `distca plan`, from a file of lengths to text, picture or JSON, with progress on stderr; and `distca env`,
versions, devices and attention kernels that can run, for bug reports."""

import gc
import importlib.metadata
import platform
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.table import Table

from distca_hf.analysis.answer import Assumptions, make_answer
from distca_hf.analysis.epoch import divide_batch, pack_epoch, plan_epoch
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.first_step import make_report
from distca_hf.analysis.memory import GIB, Checkpointing
from distca_hf.analysis.options import PlanOptions
from distca_hf.analysis.print_answer import print_answer
from distca_hf.analysis.profiles.cluster_profile import find_profile, gpu_gib_of
from distca_hf.analysis.request import PlanRequest, pipeline_of
from distca_hf.analysis.tables import PlanProgress, Terminal, print_json
from distca_hf.config import OverlongPolicy
from distca_hf.errors import ConfigError
from distca_hf.version import __version__
from distca_hf.whole_file import replaced


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from distca_hf.analysis.answer import PlanAnswer


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


# Packages on which bugs have depended: those that training imports, and those that bring kernels.
PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "trl", "peft", "deepspeed"),
    *("liger-kernel", "flash-attn-4", "flash-attn"),
)


def run_plan(options: PlanOptions, tokens_per_rank: int) -> None:
    """Runs `distca plan`. Output is printed at the very end, so that an error leaves nothing behind.

    Raises:
        ConfigError: an option, the model, or the picture's path is wrong.
        PackingError: lengths cannot be read, or do not fit.
    """
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed} must be at least 0")
    shape = find_model(options.model)
    policy = cast(OverlongPolicy, options.overlong)  # the request refuses any other
    stages = pipeline_of(options.pipeline, options.chunks)
    world = options.gpus, tokens_per_rank, options.ranks_per_node, options.micro_steps
    request = PlanRequest(*world, shape, options.layout, policy, options.bytes_limit, stages)
    kept = cast(Checkpointing, options.checkpointing)  # likewise
    gpu_gib = gpu_gib_of(find_profile(options.cluster), options.gpu_gib)
    assumptions = Assumptions(kept, options.liger, gpu_gib, options.seed, options.cluster)
    if shape.size is not None:
        assumptions.simulation(request)  # refuses what cannot be simulated before anything is read
    if options.plot is not None:
        check_can_draw(options.plot)
    progress = PlanProgress()
    with progress.shown():
        documents = progress.read_lengths(options.lengths)
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
        print_json(answer.as_json())
    else:
        print_answer(answer, Terminal())


def print_environment(console: Console) -> None:
    """Runs `distca env`: prints versions of packages, devices, and kernels in order of preference."""
    import torch  # which `distca plan` does not need

    from distca_hf.kernels.registry import KERNELS

    console.print(f"distca_hf {__version__}, Python {platform.python_version()}, {platform.platform()}")
    versions = Table("package", "version")
    for package in PACKAGES:
        try:
            versions.add_row(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions.add_row(package, "-")
    console.print(versions)
    if not torch.cuda.is_available():
        console.print(f"devices: CPU only; torch was built for CUDA {torch.version.cuda or '-'}")
    else:
        console.print(f"devices: {torch.cuda.device_count()} GPUs")
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            memory = f"{gpu.total_memory / GIB:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
            console.print(f"GPU {index}: {gpu.name}, {memory}")
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        console.print(f"CUDA {torch.version.cuda or '-'}, ROCm {torch.version.hip or '-'}, NCCL {nccl}")
    kernels = Table(
        "kernel", "runs on", "here", title="attention kernels, in order of preference", title_justify="left"
    )
    for kernel, entry in KERNELS.items():
        device = entry.capabilities.device_type
        there = "available" if device != "cuda" or torch.cuda.is_available() else "installed, needs a GPU"
        kernels.add_row(kernel, device or "any device", entry.missing() or there)
    console.print(kernels)
