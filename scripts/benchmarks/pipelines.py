"""Pipelines on the shipped lengths, simulated: division of steps by work, in Markdown tables.

    python scripts/benchmarks/pipelines.py [equal] [waits] [time] [--steps 6]

equal    micro-batches of equal work, and shaped ones, against what the schedule allows, by what no division of whole
         documents can go below
waits    utilisation of shaped interleaved steps, by what transfers between stages wait for
time     of dividing and shaping a step of 64 ranks x 16 micro-batches, on one core: the shortest and the longest of
         several, in seconds of the processor
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from distca_hf.analysis.epoch import PackedEpoch, pack_epoch
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.request import PlanRequest, preset
from distca_hf.arrays import IntArray
from distca_hf.flops import LLAMA_8B_COSTS, PassCosts
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.pipelines.schedules import Queues, Schedule
from distca_hf.pipelines.shaping import divide, shape_step, simulate, work_of_documents
from lib.parser import count, parse_tables, parser_of
from lib.planning.planners import K, print_row, table


TABLES = ("equal", "waits", "time")
MIXES = ("pretrain", "prolong")
# Upper ends of the classes of `least_heaviest`.
BOUNDS = (1.1, 1.7, 2.6, 4.0, np.inf)
# Bytes of a number between stages, in bf16, and bytes per second that a GPU sends.
WIRE_BYTES, WIRE_SPEED = 2, 50e9
ROUNDS = 5


def epoch_of(mix: str, request: PlanRequest) -> PackedEpoch:
    return pack_epoch(read_lengths(Path(mix)).tokens, request, seed=0)


def steps_of(packed: PackedEpoch, micro_batches: int, most: int) -> Iterator[list[IntArray]]:
    """Yields lengths of the micro-batches, as packed, of steps that are spread over an epoch."""
    steps = packed.epoch.num_micro_batches // micro_batches
    for step in np.unique(np.linspace(0, steps - 1, min(most, steps)).astype(int)).tolist():
        numbers = range(step * micro_batches, (step + 1) * micro_batches)
        yield [packed.document_tokens[packed.epoch.micro_batch(number)] for number in numbers]


def least_heaviest(document_tokens: IntArray, micro_batches: int) -> float:
    """Returns the least work of the heaviest micro-batch, over the mean, of any division of whole documents into
    micro-batches of equal tokens: that of the longest document with the shortest ones beside it; at least 1."""
    lengths = np.sort(document_tokens)
    work = work_of_documents(lengths)
    room = int(lengths.sum()) // micro_batches - int(lengths[-1])
    beside = int(np.searchsorted(np.cumsum(lengths[:-1]), room, side="right"))
    return max(1.0, int(work[-1] + work[:beside].sum()) * micro_batches / int(work.sum()))


def print_equal(most_steps: int) -> None:
    """Compares with equal work in every micro-batch, which whole documents may not allow."""
    ratios: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for mix, ranks, tokens, micro_batches in product(MIXES, (8, 16, 32, 64), (32 * K, 64 * K, 128 * K), (4, 8, 16)):
        request = PlanRequest(ranks, tokens, 8, micro_batches, preset("llama3-8b"), overlong="split")
        packed = epoch_of(mix, request)
        schedules = {
            name: Schedule(Pipeline(4, chunks), micro_batches)
            for name, chunks in (("1F1B", 1), ("2 chunks", 2), ("4 chunks", 4))
        }
        for batches in steps_of(packed, micro_batches, most_steps):
            lengths = np.concatenate(batches)
            work = work_of_documents(lengths)
            as_packed = np.split(np.arange(len(lengths)), np.cumsum([len(batch) for batch in batches])[:-1])
            even = divide(lengths, work, [1.0] * micro_batches, ranks * tokens) or as_packed
            bound = least_heaviest(lengths, micro_batches)
            of_class = next(most for most in BOUNDS if bound <= most)
            for name, schedule in schedules.items():
                sizes = ranks, tokens, LLAMA_8B_COSTS
                shaped = shape_step(lengths, work, as_packed, schedule, *sizes)
                ideal = float(simulate(schedule, np.full(micro_batches, work.sum() / micro_batches), *sizes))
                for way, groups in (("as packed", as_packed), ("equal", even), ("shaped", shaped)):
                    loads = np.array([int(work[group].sum()) for group in groups])
                    ratios[name, way][of_class].append(ideal / float(simulate(schedule, loads, *sizes)))
    table(
        "÷ what the schedule allows with equal work, by the least work of the heaviest micro-batch ÷ mean: "
        "smallest, median, largest",
        *("schedule, 4 stages", "micro-batches", *(f"≤ {most:g}" for most in BOUNDS)),
    )
    for (name, way), classes in ratios.items():
        cells = [classes[most] for most in BOUNDS]
        print_row(
            *(name, way),
            *(f"{min(one):.3f} {statistics.median(one):.3f} {max(one):.3f}" if one else "-" for one in cells),
        )
    print_row("steps", "", *(len(ratios["1F1B", "shaped"][most]) for most in BOUNDS))


def print_waits(most_steps: int) -> None:
    """Simulates steps that are shaped as in training, over other transports."""
    queues = [*Queues]
    table(
        "llama3-8b, 8 data ranks x 128K tokens, 8 micro-batches, 50 GB/s: shaped, GPUs compute, % of the time",
        *("lengths", "stages", "chunks", *(f"queues: {one}" for one in queues)),
    )
    model, micro_batches = preset("llama3-8b"), 8
    costs = model.pass_costs()
    assert costs is not None
    assert model.size is not None
    for mix in MIXES:
        any_pipeline = Pipeline(2)  # epochs are those of any other
        request = PlanRequest(8, 128 * K, 8, micro_batches, model, pipeline=any_pipeline)
        sizes = request.num_ranks, request.tokens_per_rank, costs
        hop_seconds = WIRE_BYTES * request.tokens_per_rank * model.size.hidden_size / WIRE_SPEED
        steps = [*steps_of(epoch_of(mix, request), micro_batches, most_steps)]
        for stages, chunks in product((2, 4, 8), (1, 2, 4)):
            pipeline = Pipeline(stages, chunks)
            part_layers = pipeline.layers_of_parts(model.size.layers)
            busy, seconds = 0.0, dict.fromkeys(queues, 0.0)
            for batches in steps:
                lengths = np.concatenate(batches)
                work = work_of_documents(lengths)
                as_packed = np.split(np.arange(len(lengths)), np.cumsum([len(batch) for batch in batches])[:-1])
                shaped = shape_step(lengths, work, as_packed, Schedule(pipeline, micro_batches), *sizes)
                loads = np.array([int(work[group].sum()) for group in shaped])
                busy += work_seconds(loads, *sizes) / stages
                for one in queues:
                    schedule = Schedule(pipeline, micro_batches, one)
                    seconds[one] += float(simulate(schedule, loads, *sizes, hop_seconds, part_layers))
            print_row(mix, stages, chunks, *(f"{100 * busy / seconds[one]:.1f}" for one in queues))


def work_seconds(work: IntArray, num_ranks: int, tokens_per_rank: int, costs: PassCosts) -> float:
    """Returns the seconds of a rank that computes all layers of all micro-batches."""
    passes = (costs.forward, costs.backward)
    tokens, pairs = len(work) * tokens_per_rank, int(work.sum()) / num_ranks
    return sum(tokens * one.token_seconds + pairs * one.pair_seconds for one in passes)


def print_times() -> None:
    table(
        "Dividing and shaping one step of 64 ranks x 128K tokens x 16 micro-batches",
        *("lengths", "documents", "stages", "chunks", "shortest s", "longest s"),
    )
    for mix in MIXES:
        request = PlanRequest(64, 128 * K, 8, 16, preset("llama3-8b"))
        (batches,) = steps_of(epoch_of(mix, request), 16, 1)
        lengths = np.concatenate(batches)
        as_packed = np.split(np.arange(len(lengths)), np.cumsum([len(batch) for batch in batches])[:-1])
        for stages, chunks in ((4, 1), (4, 4), (8, 4)):
            seconds = []
            for _ in range(ROUNDS):
                began = time.process_time()
                schedule = Schedule(Pipeline(stages, chunks), 16)
                shape_step(lengths, work_of_documents(lengths), as_packed, schedule, 64, 128 * K, LLAMA_8B_COSTS)
                seconds.append(time.process_time() - began)
            print_row(mix, f"{len(lengths):,}", stages, chunks, f"{min(seconds):.2f}", f"{max(seconds):.2f}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=count, default=6, help="optimizer steps of every row of equal and waits")
    options = parse_tables(parser, TABLES)
    if "equal" in options.tables:
        print_equal(options.steps)
    if "waits" in options.tables:
        print_waits(options.steps)
    if "time" in options.tables:
        print_times()


if __name__ == "__main__":
    main()
