"""Report of the quickstart: bars while it trains, then a table of all steps, a picture, and next steps."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import TextWrapper

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from distca_hf.planning.plan import PlanFacts
from distca_hf.whole_file import replaced


# Colours of work, of waiting, and of labels.
WORKING, WAITING, MUTED = "#2f6fb7", "#e3e7eb", "#59636e"


class TrainingBar:
    """Progress of a training: a bar in a terminal, elsewhere a line for every quarter. One rank shows it."""

    def __init__(self, title: str, steps: int, shown: bool) -> None:
        self._title, self._steps, self._shown = title, steps, shown
        self._done = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("steps, loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            disable=not (shown and Console().is_terminal),
        )

    def __enter__(self) -> "TrainingBar":
        self._task = self._progress.add_task(self._title, total=self._steps, loss="-")
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def advance(self, loss: float) -> None:
        """Shows that a step with this loss is done."""
        self._done += 1
        self._progress.update(self._task, advance=1, loss=f"{loss:.3f}")
        if (
            self._shown
            and self._progress.disable
            and self._done * 4 // self._steps > (self._done - 1) * 4 // self._steps
        ):
            print(f"{self._title}: step {self._done} of {self._steps}, loss {loss:.3f}", flush=True)


@dataclass(frozen=True)
class Step:
    """One optimizer step of both trainings.

    Attributes:
        losses, gradient_norms: of distca and of sdpa.
        facts: how its documents were placed.
        bytes_sent: by all ranks together.
    """

    losses: tuple[float, float]
    gradient_norms: tuple[float, float]
    facts: PlanFacts
    bytes_sent: int

    @property
    def loss_difference(self) -> float:
        return abs(self.losses[0] - self.losses[1])

    @property
    def norm_difference(self) -> float:
        """Difference of both norms, as a part of the norm."""
        return abs(self.gradient_norms[0] / self.gradient_norms[1] - 1)


def print_steps(steps: Sequence[Step]) -> None:
    """Prints a line for each step, 80 columns wide."""
    table = Table(title="The same batches, trained twice", box=SIMPLE_HEAD, title_justify="left")
    for heading in (
        "step",
        "loss,\ndistca",
        "loss,\nsdpa",
        "gradient\nnorm,\ndistca",
        "gradient\nnorm,\nsdpa",
        "busiest rank,\nin order",
        "busiest rank,\nplaced",
        "MB\nsent",
    ):
        table.add_column(heading, justify="right")
    for number, step in enumerate(steps, 1):
        losses = (f"{loss:.6f}" for loss in step.losses)
        norms = (f"{norm:.4f}" for norm in step.gradient_norms)
        balance = (f"{step.facts.imbalance_before:.2f}", f"{step.facts.imbalance:.2f}")
        table.add_row(str(number), *losses, *norms, *balance, f"{step.bytes_sent / 1e6:.1f}")
    Console(width=80).print(table)
    print("busiest rank: its attention work over the mean; all ranks wait for it\n")


def print_summary(steps: Sequence[Step], lengths: Sequence[int], output: Path) -> None:
    """Prints a summary and next steps."""
    facts = [step.facts for step in steps]
    in_order = sum(fact.imbalance_before for fact in facts) / len(facts)
    placed = sum(fact.imbalance for fact in facts) / len(facts)
    spanning = sum(sum(fact.key_rows_sent) > 0 for fact in facts)
    documents = sum(fact.num_documents for fact in facts) / len(facts)
    saw = (
        f"Documents of {min(lengths):,} to {max(lengths):,} tokens: functions and whole modules of Python. Of the "
        f"{documents:.0f} documents in a batch one or two are long.",
        "The same training twice. sdpa attended to each document by itself; distca spread documents over both ranks. "
        f"Losses differ by {max(step.loss_difference for step in steps):.1e} at most, gradient norms by "
        f"{max(step.norm_difference for step in steps):.1e} of themselves.",
        f"Packed in order, the busiest rank has {in_order:.2f} times the mean attention work, and the other waits for "
        f"it. Placed by distca: {placed:.2f} times.",
        f"In {spanning} of {len(steps)} batches a document was on both ranks, and its keys and values were sent.",
        "Nothing about speed: both ranks run on one CPU. Speed on GPUs: docs/will-it-help.md.",
    )
    console = Console()
    command = Path(os.path.relpath(sys.executable)).with_name("distca")
    following = (
        f"Look at {output}: balance.png shows work and waiting in every batch, steps.json has all figures.",
        f"Open {output / 'model'} with from_pretrained: an ordinary Llama and its tokenizer.",
        "Plan a training on documents, without a GPU. For these (for yours: another folder or file, and "
        "ranks and tokens per rank of your training):",
        f"  {command} plan {output / 'data' / 'dataset'} --gpus 2 --tokens-per-rank 4096 --seed 42",
        "Train a model of yours: docs/quickstart.md has a script, docs/trainer.md more.",
    )
    bullet = TextWrapper(min(100, console.width), "- ", "  ", break_on_hyphens=False, break_long_words=False)
    for title, lines in (("Results", saw), ("Next steps", following)):
        console.print(f"[bold]{title}")
        for line in lines:
            is_command = line.startswith("  ")  # stays in one line, so that it can be copied
            print(line if is_command else bullet.fill(line))
        print()


def report(steps: Sequence[Step], lengths: Sequence[int], output: Path) -> None:
    """Prints everything, and writes the picture and the figures of all steps."""
    print_steps(steps)
    if find_spec("matplotlib"):
        work = [step.facts.work for step in steps]
        draw_balance([step.facts.work_before for step in steps], work, output / "balance.png")
    else:
        print("no picture, because matplotlib is not installed: pip install matplotlib\n")
    figures = [
        {
            "losses": step.losses,
            "gradient_norms": step.gradient_norms,
            "imbalance_in_order": step.facts.imbalance_before,
            "imbalance_placed": step.facts.imbalance,
            "bytes_sent": step.bytes_sent,
        }
        for step in steps
    ]
    with replaced(output / "steps.json") as unfinished:
        unfinished.write_text(json.dumps(figures, indent=1))
    print_summary(steps, lengths, output)


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
