"""Which models Transformers divides between tensor or expert ranks, and how exactly they train with distca then, as a
section of a Markdown page.

    python scripts/models/divided.py [--only MODEL_TYPE ...] [--out sweep.PAGE.md]

Plans for tensor and expert ranks are read from the classes that AutoModelForCausalLM knows. A tiny model of each class
with a plan (as in `sweep.py`) is saved, and loaded with `DistributedConfig` on two tensor ranks of two data ranks, and
on two expert ranks. It trains one step on placed documents; loss and gradients must be those of the same documents
one by one with sdpa. One that differs makes the script exit with 1.
"""

import multiprocessing
import os
import re
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig

import distca_hf
import sweep
from distca_hf.analysis.check.tiny_config import LONGEST_TOKENS
from distca_hf.analysis.check.trial import CAPACITY_TOKENS, Step, documents_dataset, loss_alone
from distca_hf.errors import DistCAError
from distca_hf.integrations.models.check import check_model
from distca_hf.integrations.models.distributed import heads_divided_by
from distca_hf.integrations.models.structure import IMPLEMENTATION
from page_sections import add_classes, introduction, parser_of, write_section
from sweep import IN_DOUBLE, RANDOM_IN_TRAINING, TEXT, dtype_of, tiny_model


TENSOR = {"tp_size": 2, "fsdp_size": 2}
EXPERTS = {"ep_size": 2, "fsdp_size": 2}
# The beginning of a refusal: the class, which the table names already.
OPENING = re.compile(r"^\w+ cannot [^:]*: ")
# A difference that is rounding; others are told as text.
NUMBER = re.compile(r"^\d\.\de[+-]\d\d$")
# A class is given up after it. Ranks of a model that fails on some of them wait for each other.
HANG_SECONDS = 120.0

TABLE_HEAD = ("| tensor plan | two tensor ranks | two expert ranks | model types |", "|---|---|---|---|")


@dataclass(frozen=True)
class Trial:
    """One class, divided in one way."""

    detail: str  # the largest relative difference, or the reason why there is none
    heads_divided: bool | None = None  # whether a rank had a part of the heads; None if it did not come so far
    is_wrong: bool = False


NO_PLAN = Trial("no plan")


@dataclass(frozen=True)
class Outcome:
    """Results of one class, with either plan."""

    model_type: str
    tensor: Trial
    experts: Trial

    def cells(self) -> tuple[str, str, str]:
        """Returns its cells of the table, but for its name."""
        attention = {True: "by heads", False: "whole heads", None: "-"}[self.tensor.heads_divided]
        return attention, self.tensor.detail, self.experts.detail

    def group(self) -> tuple[str, ...]:
        """Returns what classes in one row of the table have in common: all but the sizes of small differences."""
        return *(NUMBER.sub("#", cell) for cell in self.cells()), str(self.model_type in IN_DOUBLE)


def row(outcomes: Sequence[Outcome]) -> str:
    """Returns the row of classes of one group, with their largest differences."""
    columns = zip(*(outcome.cells() for outcome in outcomes), strict=True)
    cells = [f"up to {max(of, key=float)}" if NUMBER.fullmatch(of[0]) else of[0] for of in columns]
    return f"| {' | '.join(cells)} | {', '.join(outcome.model_type for outcome in outcomes)} |"


def examine(config_class: type[PreTrainedConfig]) -> Outcome | None:
    """Tries the plans of a class; None if it has none, or does not run on distca."""
    try:
        if tiny_model(config_class).num_parameters() > sweep.MOST_PARAMETERS:
            return None
        model = tiny_model(config_class).build(IMPLEMENTATION)
        check_model(model, LONGEST_TOKENS)
    except Exception:
        return None  # `sweep.py` says why
    if not model.tp_plan and not model.ep_plan:
        return None
    plans = ((model.tp_plan, TENSOR), (model.ep_plan, EXPERTS))
    trials = [on_ranks(config_class, sizes) if plan else NO_PLAN for plan, sizes in plans]
    return Outcome(config_class.model_type, *trials)


def on_ranks(config_class: type[PreTrainedConfig], sizes: dict[str, int]) -> Trial:
    """Runs a step of a class on new ranks; the result is that of rank 0, or the first error."""
    context = multiprocessing.get_context("fork")  # everything is imported; this process itself computes nothing
    num_ranks = sizes["fsdp_size"] * sizes.get("tp_size", 1)
    # A rank that left would be an error of the others: processes of the pool stay, and are killed at the end.
    with tempfile.TemporaryDirectory() as folder, context.Pool(num_ranks) as pool:
        run = partial(_rank, num_ranks, config_class, sizes, Path(folder))
        said = pool.imap_unordered(run, range(num_ranks))
        try:
            trial = None
            while trial is None:
                trial = said.next(HANG_SECONDS)
            return trial
        except multiprocessing.TimeoutError:
            return Trial(f"no answer within {HANG_SECONDS:.0f} s")


def _rank(
    num_ranks: int, config_class: type[PreTrainedConfig], sizes: dict[str, int], folder: Path, rank: int
) -> Trial | None:
    """Runs one rank: returns a Trial if it is rank 0 or has failed, else None."""
    sweep.be_quiet()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=HANG_SECONDS / 2)
    )
    try:
        return _step_on_rank(config_class, sizes, folder / "model")
    except DistCAError as error:
        return Trial(_short(OPENING.sub("", str(error))))
    except Exception as error:
        return Trial(_short(f"Transformers: {type(error).__name__}: {error}"))


def _step_on_rank(config_class: type[PreTrainedConfig], sizes: dict[str, int], folder: Path) -> Trial | None:
    """Runs the step; rank 0 compares it."""
    if dist.get_rank() == 0:
        tiny_model(config_class).build("eager").save_pretrained(folder)
    dist.barrier()
    model = _load(config_class, folder, IMPLEMENTATION, distributed_config=DistributedConfig(**sizes))
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS // sizes["fsdp_size"], pad_to_multiple_of=32)
    distca_hf.enable(model, plugin, LONGEST_TOKENS)
    (batch,) = plugin.dataloader(documents_dataset(), device="cpu", model=model)
    loss = model(**batch).loss
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    found = Step(float(mean) / dist.get_world_size(), _whole_gradients(model))
    plain = _load(config_class, folder, _plain(config_class, folder), distributed_config=DistributedConfig(**sizes))
    without = Step(loss_alone(plain), _whole_gradients(plain))  # every data rank runs all documents
    if dist.get_rank() > 0:
        return None
    alone = _load(config_class, folder, _plain(config_class, folder))
    expected = Step(loss_alone(alone), _whole_gradients(alone))
    difference, upstream = found.difference(expected), without.difference(expected)
    by_heads = heads_divided_by(model) > 1
    if difference <= sweep.LARGEST_DIFFERENCE:
        return Trial(f"{difference:.1e}", by_heads)
    if not upstream <= sweep.LARGEST_DIFFERENCE:
        return Trial(f"Transformers: {upstream:.1e} without distca, {difference:.1e} with it", by_heads)
    return Trial(f"{sweep.WRONG} {difference:.1e}", by_heads, is_wrong=True)


def _plain(config_class: type[PreTrainedConfig], folder: Path) -> str:
    """Returns the implementation to compare with: sdpa, or eager for a class that does not know sdpa."""
    try:
        _load(config_class, folder, "sdpa")
    except ValueError:
        return "eager"
    return "sdpa"


def _load(config_class: type[PreTrainedConfig], folder: Path, implementation: str, **arguments: Any) -> Any:
    model = TEXT.auto_class.from_pretrained(
        folder, attn_implementation=implementation, dtype=dtype_of(config_class), **arguments
    )
    return model.train(config_class.model_type not in RANDOM_IN_TRAINING)


def _whole_gradients(model: torch.nn.Module) -> torch.Tensor:
    """Returns gradients of all parameters, one after the other, gathered from all ranks; zeros if there is none."""
    whole = []
    for _, parameter in sorted(model.named_parameters()):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        whole.append((gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).flatten())
    return torch.cat(whole)


def _short(reason: str) -> str:
    return textwrap.shorten(reason.replace("|", "/"), sweep.REASON_CHARACTERS, placeholder=" ...")


def section(outcomes: Sequence[Outcome]) -> str:
    """Returns the outcomes in Markdown."""
    groups = defaultdict(list)
    for outcome in sorted(outcomes, key=lambda outcome: outcome.model_type):
        groups[outcome.group()].append(outcome)
    rows = map(row, sorted(groups.values(), key=len, reverse=True))
    return "\n".join([introduction("divided"), *TABLE_HEAD, *rows]) + "\n"


def main() -> None:
    parser = parser_of(__doc__)
    add_classes(parser)
    options = parser.parse_args()
    sweep.check_model_types(parser, options.only, [TEXT])
    sweep.be_quiet()
    outcomes = []
    for config_class in TEXT.config_classes(options.only):
        outcome = examine(config_class)
        if outcome is not None:
            print(row([outcome]), flush=True)
            outcomes.append(outcome)
    out = options.out or (None if options.only else sweep.PAGE)
    if out is not None:
        write_section(out, section(outcomes))
    if any(trial.is_wrong for outcome in outcomes for trial in (outcome.tensor, outcome.experts)):
        sys.exit(1)


if __name__ == "__main__":
    main()
