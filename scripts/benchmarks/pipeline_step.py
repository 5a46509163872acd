"""Times steps of a pipeline against what their simulation predicts: plain, as packed, and shaped.

    torchrun --nproc-per-node 2 scripts/benchmarks/pipeline_step.py --layers 8 --lengths pretrain
    torchrun --nproc-per-node 2 scripts/benchmarks/pipeline_step.py --device cpu --preset tiny --tokens-per-rank 256

Ranks are two stages or more of a Llama with random weights (`lib/pipeline.py`). An optimizer step has documents
of the shipped lengths: the first ones of an epoch of a sample. Those that are too long are split. Loaders are the
product's:

    plain        documents fill the ranks of a stage in order, which wait for the busiest one; with several data ranks
    as packed    documents of a micro-batch are placed
    shaped       they are also divided anew among the micro-batches, by simulated time (`pipeline=`)

Predicted seconds come from runs without a pipeline. Each part of the model runs on a light, a middle and a heavy
micro-batch. Seconds of a micro-batch of no attended pairs and of a pair are fitted to that, for each part, forward and
backward. The step follows from the simulation of the schedule (`distca_hf/pipelines/schedules.py`). A hop between
stages is timed, too; DDP's sums of gradients are left out. There is no optimizer, so that all steps have the same
loss; if losses differ, the script exits with 1.

Shaping itself knows no measured times: it divides by the costs that the loader assumes of every such model. The
vocabulary is small by default, so that the last part is about as long as the others.
"""

import argparse
import shutil
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import datasets
import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset

import distca_hf
from distca_hf import Pipeline
from distca_hf.arrays import IntArray
from distca_hf.layout import Layout
from distca_hf.pipelines.schedules import Queues, Schedule
from distca_hf.pipelines.stages import StepInputs
from distca_hf.placement.place import fill_in_order
from lib.options import on_all_ranks
from lib.parser import count, parser_of
from lib.pipeline import PartTimes, Stages, StepSetup, add_pipeline, write_model
from lib.report import equal_losses, machine_facts
from lib.tables import head, row
from lib.wires import WiredPlugin, Wires, free_memory


COLUMNS = (
    *("schedule", "micro-batches", "heaviest ÷ mean", "predicted ms", "measured ms", "÷ predicted"),
    *("÷ as packed: predicted", "measured"),
)


@dataclass(frozen=True)
class Step:
    """Micro-batches of a step."""

    inputs: StepInputs
    pairs: IntArray  # `[micro_batches]` attended pairs of a layer, of the busiest data rank
    tokens: int  # tokens of all ranks, without padding


def main() -> None:
    parser = parser_of(__doc__)
    add_pipeline(parser, folder="pipeline_step_output")
    awaited = "what transfers between stages wait for; with torch 2.11 and more than two stages: stages"
    parser.add_argument("--queues", type=Queues, choices=[*Queues], default=Queues.PAIRS, help=awaited)
    parser.add_argument("--rounds", type=count, default=3, help="times that every step is measured, in turns")
    options = parser.parse_args()
    # Stages exchange among some ranks of the job; as in examples/pipeline.py no group is bound to a device.
    on_all_ranks(measure, options, bind=False)


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Measures one schedule after the other; rank 0 prints, and writes the model and removes it. Exits if the folder
    is there already, numbers of ranks or documents do not fit, or losses of the same tokens differ."""
    datasets.disable_progress_bars()
    setup = StepSetup.open(options, device)
    if dist.get_rank() == 0:
        print_header(options, setup.config, setup.documents, device)
        write_model(options.folder, setup.config, device)
    dist.barrier()
    try:
        losses, notes = measure_pipelines(options, setup, device)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(options.folder)
    if dist.get_rank() == 0:
        print("", *notes, sep="\n", flush=True)
    if not equal_losses(losses, torch.bfloat16 if device.type == "cuda" else torch.float32):
        raise SystemExit(f"losses of the same tokens differ: {losses}")


def measure_pipelines(
    options: argparse.Namespace, setup: StepSetup, device: torch.device
) -> tuple[list[float], list[str]]:
    """Prints the lines of all schedules; returns the loss of each way, and a note about each schedule."""
    # Without a pipeline the loader pads rows to a multiple of `pad_to_multiple_of`, and so to one shape, too.
    tokens = options.tokens_per_rank
    # All micro-batches of a step are taken before the first one runs; a loader warns of more than it makes ahead.
    settings = {"tokens_per_rank": tokens, "pad_to_multiple_of": tokens, "prefetch": options.micro_batches}
    opener = distca_hf.DistCAPlugin(**settings)
    opener.use_mesh(setup.mesh, data="data", stages="stage")
    # Groups are opened before a stage waits for another one.
    plugin = WiredPlugin(Wires(opener.transport(device), device), **settings)
    plugin.use_mesh(setup.mesh, data="data", stages="stage")
    losses: list[float] = []
    notes: list[str] = []
    for pipeline in setup.pipelines:
        stages = Stages(options.folder, plugin, pipeline, setup.mesh, device, options.micro_batches)
        of_ways, note = compare(options, stages, pipeline, setup.documents)
        losses += of_ways
        notes.append(note)
        del stages
        free_memory(device)  # before the next parts are read
    return losses, notes


def print_header(options: argparse.Namespace, config: Any, documents: Dataset, device: torch.device) -> None:
    """Prints versions, machine, model and documents, and the beginning of the table."""
    lengths = [len(ids) for ids in documents["input_ids"]]
    facts = [
        *machine_facts(device),
        f"{options.stages} stages x {dist.get_world_size() // options.stages} data ranks",
        f"{config.model_type}, {config.num_hidden_layers} layers, vocabulary {config.vocab_size}",
        f"{options.micro_batches} micro-batches of {options.tokens_per_rank} tokens per data rank",
        f"{options.lengths}, {len(lengths)} documents, {sum(lengths)} tokens, longest {max(lengths)}",
    ]
    print(f"{'; '.join(facts)}\n\n{head(COLUMNS, text_columns=2)}", flush=True)


def compare(
    options: argparse.Namespace, stages: Stages, pipeline: Pipeline, documents: Dataset
) -> tuple[list[float], str]:
    """Prints lines of the table for a schedule; returns the loss of each way, and a note about the prediction."""
    ways = ("plain", "as packed", "shaped") if stages.data_ranks > 1 else ("as packed", "shaped")
    steps = {way: read_step(options, way, stages, pipeline, documents) for way in ways}
    tokens = {way: step.tokens for way, step in steps.items()}
    if len(set(tokens.values())) > 1:
        raise SystemExit(f"ways have other tokens: {tokens}")
    # Lines through times of a light, a middle and a heavy micro-batch.
    packed, by_pairs = steps["as packed"], np.argsort(steps["as packed"].pairs, kind="stable")
    chosen = sorted({int(by_pairs[place]) for place in (0, len(by_pairs) // 2, -1)})
    times = PartTimes.fit(packed.pairs[chosen], stages.part_seconds(packed.inputs, chosen, options.rounds))
    hop_seconds, schedule = stages.hop_seconds(), Schedule(pipeline, options.micro_batches, options.queues)
    predicted = {
        way: float(schedule.step_seconds_of_parts(*times.of(step.pairs), hop_seconds)) for way, step in steps.items()
    }
    rounds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, float] = {}
    for _ in range(1 + options.rounds):  # one to warm up
        for way, step in steps.items():
            seconds, losses[way] = stages.step(step.inputs)
            rounds[way].append(seconds)
    measured = {way: statistics.median(seconds[1:]) for way, seconds in rounds.items()}
    name = "1F1B" if pipeline.chunks == 1 else f"interleaved, {pipeline.chunks} chunks"
    for way, step in steps.items():
        both = predicted[way], measured[way]
        ratios = measured[way] / predicted[way], *(one[way] / one["as packed"] for one in (predicted, measured))
        cells = [f"{step.pairs.max() / step.pairs.mean():.2f}", *(f"{1e3 * one:.1f}" for one in both)]
        if dist.get_rank() == 0:
            print(row([name, way, *cells, *(f"{ratio:.3f}" for ratio in ratios)]), flush=True)
    spread = max((max(seconds[1:]) - min(seconds[1:])) / measured[way] for way, seconds in rounds.items())
    hop, spread_text = f"a hop {1e3 * hop_seconds:.2f} ms", f"rounds of a step within {100 * spread:.1f} %"
    return [*losses.values()], f"{name}: {times.in_words()}; {hop}; {spread_text}"


def read_step(options: argparse.Namespace, way: str, stages: Stages, pipeline: Pipeline, documents: Dataset) -> Step:
    """Returns the micro-batches of the step as the product's loader makes them; exits if the documents need more than
    a step has. A collective call."""
    shaped = {"pipeline": pipeline, "micro_steps": options.micro_batches} if way == "shaped" else {}

    def in_order(document_tokens: IntArray, num_ranks: int, **settings: object) -> Layout:
        return fill_in_order(document_tokens, num_ranks)

    with mock.patch("distca_hf.batches.placed.place", in_order) if way == "plain" else nullcontext():
        loader = stages.plugin.dataloader(documents, shuffle=False, model=stages.outline, **shaped)
        if len(loader) != options.micro_batches:
            reason = f"{options.micro_batches} micro-batches do not hold all documents, {len(loader)} do"
            raise SystemExit(f"{way}: {reason}: choose another --seed")
        batches = list(loader)
    pairs = np.array([max(batch["distca_plan"].facts.work) for batch in batches])
    tokens = torch.stack([batch["attention_mask"].sum() for batch in batches]).sum()
    dist.all_reduce(tokens)
    return Step(StepInputs.of(batches), pairs, int(tokens))


if __name__ == "__main__":
    main()
