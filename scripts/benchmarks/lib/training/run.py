"""One training with Trainer in one of several modes (`MODES`), and its figures.

All have the same documents in every optimizer step, and the same weights at the beginning. All use AdamW, activation
checkpointing, and FSDP2 (on CPUs plain DDP). So their losses must follow each other.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from lib.model import LossModel, checkpointing_keywords, probe
from lib.options import add_kernel, add_model, check_packages
from lib.parser import add_device, add_out, count, names, not_negative, whole, write_figures
from lib.report import MFU, TOKENS_PER_SECOND
from lib.tables import Columns, figure, number, peak_gib, table_of
from lib.training.batches import Divided, LoaderBatches
from lib.training.batches import whole as whole_packs
from lib.wires import free_memory, largest, peak_flops, synchronize


MODES = {
    "distca": "an unmodified Trainer with plugin.attach",
    "ulysses": "documents are cut evenly; attention divides heads over all ranks, and its outputs are saved, too",
    "packing": "documents stay whole, each on the rank with the least attention work so far, with flash-attention",
    "given": "the packs of packing, whose rows are placed inside the model",
}
# On CPUs Accelerate has only DDP. The model itself names the layers to wrap.
FSDP: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True},
}


class StepTimes(TrainerCallback):
    """A clock of steps, device included: `seconds` of each so far."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self._device = device

    def on_step_begin(self, *_: object, **kwargs: object) -> None:
        """Waits for the device, and takes the time."""
        synchronize(self._device)
        self._began = time.perf_counter()

    def on_step_end(self, *_: object, **kwargs: object) -> None:
        """Waits for the device, and keeps the seconds since the step began."""
        synchronize(self._device)
        self.seconds.append(time.perf_counter() - self._began)


def common_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Returns arguments of `TrainingArguments` and `SFTConfig` that all trainings have."""
    on_cpu = options.device == "cpu"
    return {
        "output_dir": "bench_output",
        "max_steps": options.steps,
        "learning_rate": options.learning_rate,
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "use_liger_kernel": options.liger,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def training_arguments(options: argparse.Namespace, mode: str) -> TrainingArguments:
    """Returns arguments that differ in nothing between modes, but that `ulysses` saves attention by itself, as a
    plugin does it in the product's modes."""
    saves = mode == "ulysses" and options.checkpointed_attention == "save"
    return TrainingArguments(
        **common_arguments(options),
        per_device_train_batch_size=1,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.rising_steps,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs=checkpointing_keywords(saves),
        **({} if options.device == "cpu" else FSDP),
    )


def train_and_watch(trainer: Trainer, device: torch.device) -> int:
    """Trains; returns the most bytes that torch had given out at once meanwhile, 0 on CPUs."""
    if device.type != "cuda":
        trainer.train()
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    trainer.train()
    return torch.cuda.max_memory_allocated(device)


def train(mode: str, config: PreTrainedConfig, dataset: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """Trains in one mode from the first weights, on a dataset with the column `input_ids`. A collective call.

    Returns:
        figures, the same on all ranks: of every step `losses`, `seconds`, `tokens` and `model_flops` of a rank;
        `peak_bytes` and `held_before_bytes`; `peak_flops` per second; and `figures_of_plans`.
    """
    args = training_arguments(options, mode)
    device = args.device
    held_bytes = free_memory(device)
    torch.manual_seed(0)  # weights are the same in all modes and on all ranks
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="distca", dtype=torch.float32)
    shape = probe(LossModel(model))
    others = {"packing": options.packing_attention, "ulysses": "bench_heads"}
    if mode in others:
        model.set_attn_implementation(others[mode])
    plugin = distca_hf.DistCAPlugin(
        tokens_per_rank=options.tokens_per_rank,
        kernel=options.kernel,
        checkpointed_attention=options.checkpointed_attention,
    )
    times = StepTimes(device)
    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[times])
    # This rank's part of the mean over all labels, which Trainer scales in place. FSDP hands the loss out in bf16, in
    # steps of 1/16 at a loss of 11: too coarse to compare. After the model's own forward it is fp32: hooks run in
    # their order, and FSDP's comes later. Forward itself may be replaced any time, by Liger's.
    parts: list[torch.Tensor] = []
    model.register_forward_hook(lambda _, inputs, outputs: parts.append(outputs.loss.detach().clone()))
    loader = choose_batches(mode, trainer, plugin, dataset)
    peak_bytes, held_bytes = map(int, largest([train_and_watch(trainer, device), held_bytes], device))
    losses = torch.stack(parts)
    dist.all_reduce(losses)
    lengths = [[len(document.input_ids) for document in loader.documents(0, step)] for step in range(options.steps)]
    return {
        "mode": mode,
        "distributed_type": trainer.accelerator.distributed_type.name,
        "losses": losses.tolist(),
        "seconds": times.seconds,
        "peak_bytes": peak_bytes,
        "held_before_bytes": held_bytes,
        "tokens": [sum(held) / dist.get_world_size() for held in lengths],
        # Of a rank, counted as in `lib.report.Load`.
        "model_flops": [
            3 * (sum(held) * shape.linear_flops + shape.attention_flops(shape.pairs(held))) / dist.get_world_size()
            for held in lengths
        ],
        "peak_flops": peak_flops(device),
        **figures_of_plans(trainer, loader),
    }


def choose_batches(
    mode: str, trainer: Trainer, plugin: distca_hf.DistCAPlugin, dataset: Dataset
) -> distca_hf.PlacedLoader:
    """Gives the trainer the batches of a mode; returns the loader that packs them."""
    if mode == "distca":
        plugin.attach(trainer)
        return trainer.get_train_dataloader()
    device = trainer.args.device
    loader = plugin.dataloader(dataset, trainer.args.seed)
    divided = mode == "ulysses"
    pack = Divided(device, plugin.tokens_per_rank, plugin.kernel) if divided else partial(whole_packs, device=device)
    batches = LoaderBatches(loader, pack)
    trainer.get_train_dataloader = lambda: batches
    if mode == "given":
        distca_hf.enable(trainer.model, plugin, max(map(len, dataset.with_format("numpy")["input_ids"])))
    return loader


def figures_of_plans(trainer: Trainer, loader: distca_hf.PlacedLoader) -> dict[str, Any]:
    """Returns balance and times of all plans: of the loader, or of the enabled model if that makes them.

    `wait_share` is a part of the time, `plan_ms` milliseconds of a micro-batch; `imbalance_before` and `imbalance` of
    every plan are work of the busiest rank over the mean.
    """
    watch = watch_of(trainer.model)
    source = loader if watch is None or watch.planner is None else watch.planner
    facts, times = list(source.history), source.times
    return {
        "wait_share": loader.times.wait_share,
        "plan_ms": 1e3 * times.plan_seconds / max(1, times.micro_batches),
        "imbalance_before": [fact.imbalance_before for fact in facts],
        "imbalance": [fact.imbalance for fact in facts],
    }


COLUMNS: Columns = {
    "step ms": figure("step_seconds", 1e3, 0),
    "÷ first": figure("ratio_to_first", 1, 3),
    "tokens/s/GPU": TOKENS_PER_SECOND,
    "MFU %": MFU,
    "peak GiB": peak_gib,
    "held before GiB": lambda of: number(of["held_before_bytes"] if of["peak_bytes"] else None, 2**-30, 1),
    "loss at first": lambda of: number(of["losses"][0], 1, 4),
    "at last": lambda of: number(of["losses"][-1], 1, 4),
    "furthest from first mode": lambda of: of["furthest"],
    "planned max/mean": lambda of: number(statistics.mean(of["imbalance"]) if of["imbalance"] else None, 1, 4),
}


def furthest(run: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, int]:
    """Returns the largest difference of losses of the same step, NaN if one of them is NaN, and the first step that
    has it, counted from 1."""
    differences = [abs(a - b) for a, b in zip(run["losses"], other["losses"], strict=True)]
    at = max(range(len(differences)), key=lambda step: (math.isnan(differences[step]), differences[step]))
    return differences[at], at + 1


def furthest_in_words(run: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns the largest difference of losses, and its step if they differ."""
    difference, step = furthest(run, other)
    return f"{difference:.1e}" + f" (step {step})" * (difference != 0)


def step_figures(run: Mapping[str, Any], warmup: int) -> dict[str, float | None]:
    """Returns medians of the steps of a training after those of the warmup: `step_seconds`, `tokens_per_second` of a
    GPU, and `utilisation` as a part of the peak, None if that is not known."""
    timed = range(warmup, len(run["seconds"]))
    peak = run["peak_flops"]
    return {
        "step_seconds": statistics.median(run["seconds"][step] for step in timed),
        "tokens_per_second": statistics.median(run["tokens"][step] / run["seconds"][step] for step in timed),
        "utilisation": statistics.median(run["model_flops"][step] / run["seconds"][step] / peak for step in timed)
        if peak
        else None,
    }


def table(
    runs: Sequence[Mapping[str, Any]],
    warmup: int,
    figures_of: Callable[[Mapping[str, Any], int], Mapping[str, Any]] = step_figures,
    columns: Columns = COLUMNS,
    other_documents: Collection[str] = (),
) -> str:
    """Returns a Markdown table with a row for each training; the first one is what the others are compared with."""
    figures: dict[str, dict[str, Any]] = {}
    for run in runs:
        is_other = run["mode"] in other_documents and run is not runs[0]
        own = {**run, **figures_of(run, warmup)}
        own["furthest"] = "other documents" if is_other else furthest_in_words(runs[0], run)
        first = next(iter(figures.values()), own)
        own["ratio_to_first"] = own["step_seconds"] / first["step_seconds"]
        own["speed_to_first"] = own["tokens_per_second"] / first["tokens_per_second"]
        figures[run["mode"]] = own
    return table_of(columns, figures)


def run_modes(
    options: argparse.Namespace,
    facts: Sequence[str],
    train_mode: Callable[[str], dict[str, Any]],
    figures_of: Callable[[Mapping[str, Any], int], Mapping[str, Any]] = step_figures,
    columns: Columns = COLUMNS,
    other_documents: Collection[str] = (),
) -> None:
    """Trains in one mode after the other; prints all after each, because the next one may run out of memory. Exits if
    a loss is further from that of the first mode than `--most-difference`.

    Args:
        facts: parts of the first line.
        train_mode: trains in a mode, and returns its figures.
        figures_of: figures of a mode's steps, but for so many first ones.
        columns: of the table of all figures so far.
        other_documents: modes with other documents, whose losses are others.
    """
    runs: list[dict[str, Any]] = []
    for mode in options.modes:
        runs.append(train_mode(mode))
        if dist.get_rank() == 0:
            shown = table(runs, options.warmup, figures_of, columns, other_documents)
            print("\n".join(["; ".join(facts), "", shown]) + "\n", flush=True)
            write_figures(options, header="; ".join(facts), runs=runs)
    limit = options.most_difference
    wrong = {
        run["mode"]: furthest_in_words(runs[0], run)
        for run in runs[1:]
        if run["mode"] not in other_documents and not furthest(runs[0], run)[0] <= limit
    }
    dist.barrier()
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(f"losses differ from those of {runs[0]['mode']} by more than {limit}: {wrong}")


def add_training(parser: argparse.ArgumentParser, known: Collection[str], modes: str, learning_rate: float) -> None:
    """Adds options of trainings in one of the known modes, with these defaults."""
    parser.add_argument("--modes", type=names(known), default=modes, help="comma-separated, see below")
    add_model(parser)
    parser.add_argument("--steps", type=count, default=20, help="to train")
    parser.add_argument("--warmup", type=whole, default=3, help="steps whose times do not count")
    parser.add_argument("--learning-rate", type=not_negative, default=learning_rate, help="of AdamW")
    parser.add_argument("--liger", action="store_true", help="Liger's kernels and fused loss, in all modes")
    add_kernel(parser)
    add_device(parser)
    parser.add_argument("--most-difference", type=not_negative, default=1e-2, help="of losses of the same step")
    add_out(parser, ", after every mode")


def parse_training(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the options of a command line."""
    options = parser.parse_args()
    check_packages(parser, options)
    if options.steps <= options.warmup:
        parser.error(f"--steps {options.steps} leaves none to time after --warmup {options.warmup}")
    return options
