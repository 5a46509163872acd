"""Times a training step of any Transformers decoder on a list of documents, in every way to share their attention.

    torchrun --nproc-per-node 4 scripts/benchmarks/attention_step.py --layers 4 --documents A --out a.json
    torchrun --nproc-per-node 8 scripts/benchmarks/attention_step.py --documents 'A:8;C:8' --modes ideal,placed
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 4 scripts/benchmarks/attention_step.py --documents 'A;B'
    torchrun --nproc-per-node 2 scripts/benchmarks/attention_step.py --device cpu --preset tiny --documents 512,8x64
    torchrun --nproc-per-node 4 -m distca_hf.run --attention-servers 1 \\
        scripts/benchmarks/attention_step.py --layers 4 --documents 131072,16x4096 --checkpointing saved

A step is forward and backward of the model without its head, and FSDP's collectives; there is no optimizer. All modes
run in one process with the same weights, documents, kernel and process groups, and with equally many tokens per rank;
one after the other, again and again, so that a device that slows down does so for all. Before that, their attention
is compared with exact attention (`lib/check.py`). If an error is above the allowed one, or losses of the same tokens
differ, the script exits with 1 at its end. Settings of the product come from its environment variables
(DISTCA_KV_RESIDENCY=refetch). Columns of the table: README.md.

With `--share-tokens 65536 --modes ideal` one process does what a rank of so many tokens does in `ideal` on many GPUs
(`all_gpus.sh OUT weak`). With --tp-size, --ep-size or both Transformers divides the model as it loads it.
--dp-replicate-size makes replicas that FSDP2 shards alike (HSDP), and that share documents. With --cluster a second
table has ratios of the modes, measured and simulated (`lib/planning/predicted.py`).

Batches and plans of `placed` are made before; batches of `given` are planned during the step before, as with Trainer.
With `--shares 4,2,1,1` its ranks have tokens in this proportion, as batches of unpacked rows do.

With attention servers (`lib/served.py`) the last processes serve, and the others train. `ideal` is the trainers'
linear work then, and of attention the share of one of all processes. Tokens per GPU and MFU are of all GPUs, also in
`alone`, which leaves servers idle. The script exits with 1 if a server was lost.
"""

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from distca_hf.launched import launched_servers
from lib import served
from lib.check import check_modes, check_numbers
from lib.divided import EvenExperts, data_ranks, is_divided
from lib.documents import check_lengths, random_tokens, smaller_lengths
from lib.model import read_config
from lib.modes import MODES, OF_PACKAGE
from lib.options import of_each_set, on_all_ranks, parse_shared, shared_options
from lib.parser import count, counts, magi_settings, profile_name, whole, write_figures
from lib.place import Place
from lib.planning import predicted
from lib.report import COLUMNS, facts_of, figures_of, load_of
from lib.rounds import Runner
from lib.tables import table_of


# Modes whose collectives go over all ranks.
BY_ALL_RANKS = {"ulysses", "context", *OF_PACKAGE}


def main() -> None:
    on_all_ranks(measure, parse())


def parse() -> argparse.Namespace:
    parser = shared_options(__doc__, {name: kind.words for name, kind in MODES.items()} | served.MODES)
    add, either = parser.add_argument, argparse.BooleanOptionalAction
    add("--check", action=either, default=True, help="compare with exact attention first")
    add("--cluster", type=profile_name, help="simulate ratios from this profile, too: h100, h200 or a file")
    add("--ep-size", type=count, default=1, help="ranks that divide experts (lib/divided.py)")
    add("--even-experts", action="store_true", help="experts that the token chooses (lib/divided.py)")
    add("--tp-size", type=count, default=1, help="ranks that divide layers, as one data rank")
    add("--dp-replicate-size", type=count, default=1, help="replicas that FSDP2 shards alike (HSDP)")
    add("--shares", type=counts, default=(), help="tokens of ranks of local, given and moved in proportion")
    add("--share-tokens", type=whole, default=0, metavar="T", help="one process: a rank of T tokens in `ideal`")
    settings = (
        "of mode magi, each a mode: most tokens of a chunk, 0 for as many as the package chooses, and stages of "
        "transfers, as 0:1,512:1,2048:2; 512:1 is as NeMo AutoModel sets it"
    )
    add("--magi-settings", type=magi_settings, default=["0:1"], help=settings)
    options = parse_shared(parser)
    with_servers = ["ideal", *served.MODES]
    if sum(launched_servers()):
        options.modes = options.modes or with_servers
        if not {*options.modes} <= {*with_servers}:
            parser.error(f"with attention servers there are the modes {', '.join(with_servers)}")
        for name in ("tp_size", "ep_size", "dp_replicate_size", "share_tokens", "cluster"):
            if vars(options)[name] != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} is for steps without attention servers")
    elif not served.MODES.keys().isdisjoint(options.modes or ()):
        parser.error("no attention server was launched: start it with distca_hf.run --attention-servers")
    if options.dp_replicate_size > 1 and not options.fsdp:
        parser.error("--dp-replicate-size is of FSDP2")
    if is_divided(options):
        if not options.fsdp or options.liger:
            parser.error("--ep-size and --tp-size are measured with FSDP2, and without liger's layers")
        options.reduce_dtype = torch.float32  # Transformers has it so
    if options.share_tokens and options.modes != ["ideal"]:
        parser.error("--share-tokens is the part of a rank in --modes ideal")
    left_out = {*OF_PACKAGE, "moved", "unchecked"}
    if options.tp_size > 1:
        left_out |= BY_ALL_RANKS
        if not BY_ALL_RANKS.isdisjoint(options.modes or ()):
            parser.error(f"--tp-size is measured without {', '.join(sorted(BY_ALL_RANKS))}")
    options.modes = options.modes or [name for name in MODES if name not in left_out]
    for name in sorted(OF_PACKAGE.keys() & {*options.modes}):
        pip, *packages = OF_PACKAGE[name]
        for package in packages:
            if find_spec(package) is None:
                parser.error(f"mode {name} needs {package} (pip install {pip}), which is not installed")
        if options.checkpointing == "saved":
            parser.error(f"mode {name} is not an operator: leave --checkpointing saved out")
    if "zigzag" in options.modes and options.dtype == torch.float32:
        # The package's zigzag sums fp32 gradients in tensors that it makes by casting: in fp32 those are its buffers.
        parser.error("mode zigzag has wrong gradients in float32: give --dtype bfloat16")
    if "magi" in options.modes:
        place = options.modes.index("magi")
        options.modes[place : place + 1] = [f"magi@{setting}" for setting in options.magi_settings]
    return options


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Builds the model once, and measures on one set of documents after the other. Exits if documents cannot be
    divided, or numbers were wrong."""
    num_ranks, longest = data_ranks(options), max(max(lengths) for lengths in options.sets.values())
    num_servers, connection = sum(launched_servers()), served.Connection()
    for lengths in options.sets.values():
        check_lengths(lengths, sharing(lengths, options) + num_servers)
        if sum(lengths) % num_ranks:
            raise SystemExit(f"{sum(lengths)} tokens of all documents cannot be divided by {num_ranks} ranks")
    if options.share_tokens and num_ranks > 1:
        raise SystemExit(f"--share-tokens is for one process, and there are {num_ranks}")
    if len(options.shares) not in (0, num_ranks):
        raise SystemExit(f"--shares has {len(options.shares)} numbers, and there are {num_ranks} data ranks")
    config = read_config(options, longest)
    with_servers = {"servers": num_servers, "plugins": connection.plugin} if num_servers else {}
    place = Place.build(config, options, device, shares=options.shares, **with_servers)
    if options.even_experts:
        EvenExperts(place.model.causal_lm)
    most_tokens = max(sum(lengths) for lengths in options.sets.values())
    runner = served.ServedRunner(place, place.enable(most_tokens // num_ranks, longest, options))
    with closing(connection):
        for of_set in of_each_set(options):
            of_place = replace(place, share_of=sharing(of_set.lengths, options))
            measure_documents(of_set, config, of_place, runner, connection)
            connection.check_servers(device)


def sharing(lengths: Sequence[int], options: argparse.Namespace) -> int:
    """Returns how many data ranks share documents: all of the job, or as many as `--share-tokens` asks for."""
    if not options.share_tokens:
        return data_ranks(options)
    num_ranks, rest = divmod(sum(lengths), options.share_tokens)
    if rest:
        raise SystemExit(f"documents of {sum(lengths)} tokens do not fill ranks of {options.share_tokens} tokens")
    return num_ranks


def measure_documents(
    options: argparse.Namespace, config: Any, place: Place, runner: Runner, connection: served.Connection
) -> None:
    """Checks, times, and reports on rank 0."""
    lengths, device, num_ranks = options.lengths, place.device, place.share_of
    smaller = smaller_lengths(lengths, num_ranks + place.servers)
    errors = check_modes(options.modes, place, smaller, connection.build) if options.check else {}
    tokens = random_tokens(lengths, config.get_text_config().vocab_size)
    modes = [connection.build(name, place, tokens) for name in options.modes]
    measured = runner.run(modes, options.warmup, options.rounds)
    if dist.get_rank() == 0:
        load = load_of(options, place.shape, num_ranks, device, place.servers)
        figures = figures_of(measured, errors, load)
        parts = [f"the part of one rank of {num_ranks}"] * bool(options.share_tokens)
        parts += [f"{num_ranks} trainers + {place.servers} servers"] * bool(place.servers)
        header = "; ".join([*facts_of(options, config, load.tokens, device), *parts])
        print(f"{header}\n\n{table_of(COLUMNS, figures)}", flush=True)
        plan = next((served.plan_in_words(mode) for mode in modes if mode.name == "served"), "")
        if {*served.MODES} <= measured.keys():
            faster = measured["alone"].step_seconds / measured["served"].step_seconds
            print(f"\nalone ÷ served {faster:.3f}; {plan}", flush=True)
        planners = {mode.name: mode.planner for mode in modes if mode.planner}
        planning = {name: median(planner.planning_seconds) for name, planner in planners.items()}
        for name, seconds in planning.items():
            words = f"chunks of {planners[name].chunk_tokens:,} tokens, planned in {1e3 * seconds:.1f} ms of the host"
            print(f"\n{name}: {words}, apart from the step", flush=True)
        ratios: predicted.Ratios = {}
        if options.cluster and (reason := predicted.why_not_simulated(options)):
            print(f"\nno simulation: {reason}", flush=True)
        elif options.cluster:
            seconds_of = {name: figure["step_seconds"] for name, figure in figures.items()}
            ratios = predicted.ratios_of(options, config, seconds_of, num_ranks)
            print(f"\n{predicted.table_of_ratios(ratios)}", flush=True)
        facts = {"header": header, "load": vars(load), "errors": errors, "modes": figures}
        write_figures(options, **facts, planning_seconds=planning, simulated=ratios, plan=plan)
    losses = {mode.name: measured[mode.name].loss for mode in modes if mode.exact}
    check_numbers(errors, losses, options.dtype)


if __name__ == "__main__":
    main()
