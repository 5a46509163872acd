"""Times a training step of trainers with attention servers, and of the same trainers without them.

    torchrun --standalone --nproc-per-node 4 -m distca_hf.run --attention-servers 1 \\
        scripts/benchmarks/server_step.py --layers 4 --documents 131072,16x4096 --out served.json
    torchrun --standalone --nproc-per-node 2 -m distca_hf.run --attention-servers 1 \\
        scripts/benchmarks/server_step.py --device cpu --preset tiny --documents 256,4x64

The last processes serve; the others train: forward and backward of the model without its head, and FSDP's
collectives, as in `attention_step.py`. All modes run in one process with the same weights, documents and
kernel, one after the other, again and again. Before that, their attention is compared with exact attention. Settings
of the product come from its environment variables. Without DISTCA_SERVER_SPEED the plan takes servers to be as fast as
trainers, as in the first steps of a training; that of a second set of documents takes the speeds measured by then.

In the table, each figure of the slowest or largest trainer:

    step        median of the rounds, from a barrier until the device is done
    ÷ ideal     1 + what the step takes beyond an even split
    alone ÷     how much faster servers make the trainers
    sent        bytes that a trainer sends to others for attention, per step
    peak        memory that torch had given out at once; of `ideal` with its made-up keys
    error       the largest one of output and gradients on short documents, over the allowed one

While kernels are compiled a server is silent: set DISTCA_TIMEOUTS_HEARTBEAT_LIMIT_SECONDS=60 in a first run.

The script exits with 1 if an error is above 1, losses of the same tokens differ, or a server was lost.
"""

import argparse
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import datasets
import torch
import torch.distributed as dist

from distca_hf.launched import launched_servers
from lib.baselines.attention import register_ways
from lib.check import check_modes, check_numbers
from lib.documents import check_lengths, random_tokens, smaller_lengths
from lib.header import facts_of
from lib.model import Backbone, build_model, probe, read_config
from lib.modes import Mode, Place
from lib.options import of_each_set, on_all_ranks, parse_shared, shared_options
from lib.parser import write_figures
from lib.report import STEP_MS
from lib.served import MODES, Connection, ServedRunner
from lib.tables import Columns, figure, peak_gib, table_of


COLUMNS: Columns = {
    "step ms": STEP_MS,
    "÷ ideal": figure("ratio_to_ideal", 1, 3),
    "alone ÷": figure("ratio_of_alone", 1, 3),
    "sent GB": figure("sent_bytes", 1e-9, 3),
    "peak GiB": peak_gib,
    "error ÷ allowed": figure("largest_error", 1, 2),
}


def main() -> None:
    on_all_ranks(measure, parse())


def parse() -> argparse.Namespace:
    parser = shared_options(__doc__, MODES)
    parser.set_defaults(checkpointing="saved")
    options = parse_shared(parser, MODES)
    options.modes = options.modes or [*MODES]
    return options


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Builds the model once, and measures on one set of documents after the other. Exits if no server was launched,
    documents cannot be divided, or numbers were wrong."""
    datasets.disable_progress_bars()
    num_servers, num_trainers = sum(launched_servers()), dist.get_world_size()
    if num_servers == 0:
        raise SystemExit(
            "no attention server was launched: start it with distca_hf.run --attention-servers, see --help"
        )
    for lengths in options.sets.values():
        check_lengths(lengths, num_trainers + num_servers)
        if sum(lengths) % num_trainers:
            raise SystemExit(f"{sum(lengths)} tokens of all documents cannot be divided by {num_trainers} trainers")
    register_ways()
    longest = max(max(lengths) for lengths in options.sets.values())
    config = read_config(options, longest)
    model = Backbone(build_model(config, options, device))
    shape = probe(model)
    place, connection = Place.open(model, shape, options, device, servers=num_servers), Connection()
    tokens_per_rank = max(sum(lengths) for lengths in options.sets.values()) // num_trainers
    plugin = replace(place, plugins=connection.plugin).plugin(tokens_per_rank)
    place.enable(plugin, longest, options)
    runner = ServedRunner(model, plugin, place.wires, device)
    with closing(connection):
        for of_set in of_each_set(options):
            measure_documents(of_set, config, place, runner, connection)


def measure_documents(
    options: argparse.Namespace, config: Any, place: Place, runner: ServedRunner, connection: Connection
) -> None:
    """Checks, times, and reports on rank 0. Exits if numbers were wrong, or a server was lost."""
    lengths, device, num_ranks = options.lengths, place.device, place.wires.world_size
    smaller = smaller_lengths(lengths, num_ranks + place.servers)
    errors = check_modes(options.modes, place, smaller, connection.build)
    tokens = random_tokens(lengths, 1, config.get_text_config().vocab_size)
    modes = {name: connection.build(name, place, tokens) for name in options.modes}
    measured = runner.run([*modes.values()], options.warmup, options.rounds, exposed=False)
    sent_bytes = {name: runner.sent_bytes(mode) for name, mode in modes.items()}
    transport = connection.transport(device)
    if dist.get_rank() == 0:
        facts = facts_of(options, config, sum(lengths) // num_ranks, device)
        header = "; ".join([f"{num_ranks} trainers + {place.servers} servers", *facts])
        seconds = {name: one.step_seconds for name, one in measured.items()}
        figures = {
            name: {
                **asdict(one),
                "step_seconds": seconds[name],
                "ratio_to_ideal": seconds[name] / seconds["ideal"] if "ideal" in seconds else None,
                "ratio_of_alone": seconds["alone"] / seconds[name] if "alone" in seconds else None,
                "sent_bytes": sent_bytes[name],
                "largest_error": max(errors[name].values()),
            }
            for name, one in measured.items()
        }
        print(f"{header}\n\n{table_of(COLUMNS, figures)}\n\n{plan_in_words(modes)}", flush=True)
        write_figures(options, header=header, errors=errors, modes=figures, plan=plan_in_words(modes))
    if transport is not None and transport.servers_lost:
        raise SystemExit(f"{transport.servers_lost} servers were lost: times are not of {place.servers} servers")
    losses = {mode.name: measured[mode.name].loss for mode in modes.values() if mode.exact}
    check_numbers(errors, losses, options.dtype)


def plan_in_words(modes: Mapping[str, Mode]) -> str:
    """Returns a line about the plan with servers as it is at the end; "" without one."""
    if "served" not in modes:
        return ""
    [batch] = modes["served"].batches
    facts = batch["distca_plan"].facts
    speeds = ", ".join(f"{speed:.2f}" for speed in facts.speeds)
    work = ", ".join(f"{work / sum(facts.work):.3f}" for work in facts.work)
    balance = f"longest planned time {facts.imbalance:.4f} x an even split"
    return f"parts of attention, those of servers last: {work}; speeds {speeds}; {balance}"


if __name__ == "__main__":
    main()
