"""Times a training step of any Transformers decoder on a list of documents, in every way to share their attention.

    torchrun --nproc-per-node 4 scripts/bench_step.py --layers 4 --documents A --out a.json
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 4 scripts/bench_step.py --layers 2 --documents B --modes ideal,placed
    torchrun --nproc-per-node 2 scripts/bench_step.py --device cpu --config tiny.json --documents 512,8x64

A step is forward and backward of the model without its head, and FSDP's collectives; there is no optimizer. All modes
(`bench_step_modes` says what they are) run in one process with the same weights, documents, kernel and process groups,
and with equally many tokens per rank; one after the other, again and again, so that a device that slows down does so
for all. Before that, their attention is compared with exact attention (`bench_step_check`). Settings of the product
come from its environment variables, for example DISTCA_RECEIVED_KV=keep or DISTCA_KERNEL_TIMES=table.json.

In the table, each figure of the slowest or largest rank:

    step            median of the rounds, from a barrier until the device is done
    ÷ ideal         the same work, spread evenly, without any transfer
    ÷ floor         linear work as executed (recomputed under checkpointing) at the rate of a large matrix product,
                    attention once forward and once backward at the rate of the kernel on one document
    MFU             flops of the model, attention's included, nothing twice, of the device's bf16 peak
    exchanged       bytes that attention sends or receives, whichever is more, per step; FSDP's are not counted
    exposed         the step minus the same step on silent wires, where what would have arrived is a local copy of
                    random numbers; includes what exchanges make kernels beside them slower, and no difference in work
    peak            memory that torch had given out at once; of `ideal` with its made-up keys
    error           the largest one of output and gradients on short documents, as a part of what is allowed; if it is
                    above 1, or losses of the same tokens differ, the script exits with 1 at its end

Batches and plans of `placed` are made before: in training a loader's thread makes them beside the step before.
`fixed` plans inside the step, as an enabled model does with every batch.
"""

import argparse
import functools
import json
import os
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import transformers
from bench_step_attention import register_ways
from bench_step_check import check_modes
from bench_step_documents import (
    PRESETS,
    attended_pairs,
    check_lengths,
    parse_documents,
    random_tokens,
    smaller_lengths,
)
from bench_step_model import PRESETS as MODELS
from bench_step_model import Shape, build_model, prepare, probe, read_config
from bench_step_modes import BUILDERS, Place, build_mode
from bench_step_profile import trace_step
from bench_step_rates import Rates, kernel_for, measure_rates, peak_flops
from bench_step_report import Load, figures_of, table
from bench_step_rounds import Runner, equal_losses
from bench_step_wires import Wires

import distca_hf
from distca_hf.config import DistCAConfig


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    options = parse()
    device = open_group(options.device)
    measure(options, device)
    dist.barrier()  # gloo may hang if a group is destroyed while its last operation is being freed
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = argparse.BooleanOptionalAction
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--config", type=Path, help="config.json of a Transformers model")
    model.add_argument("--preset", choices=[*MODELS], default="llama3-8b")
    parser.add_argument("--layers", type=int, help="decoder layers, if not as many as the model has")
    parser.add_argument(
        "--documents", default="A", help=f"of a micro-step, as 131072,96x4096 or one of {', '.join(PRESETS)}"
    )
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps of a step, with equal lengths")
    parser.add_argument("--modes", help="comma-separated; by default all (sorted only with accumulation)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="rounds before these")
    parser.add_argument("--checkpointing", choices=["full", "saved", "none"], default="full")
    parser.add_argument("--fsdp", action=flag, default=True, help="without it gradients are not exchanged")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=[*DTYPES], help="by default bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--kernel", default=DistCAConfig().kernel)
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile decoder layers")
    parser.add_argument("--liger", action="store_true", help="norms, rotary embeddings and MLPs of liger_kernel")
    parser.add_argument("--check", action=flag, default=True, help="compare with exact attention first")
    parser.add_argument("--exposed", action=flag, default=True, help="time steps on silent wires, too")
    parser.add_argument("--peak-tflops", type=float, help="of the device, if its name does not tell")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a trace of every mode and rank")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    options = parser.parse_args()
    options.lengths = parse_documents(options.documents)
    options.dtype = DTYPES[options.dtype or ("bfloat16" if options.device == "cuda" else "float32")]
    every = [name for name in BUILDERS if name != "sorted" or options.accumulation > 1]
    options.modes = options.modes.split(",") if options.modes else every
    unknown = [name for name in options.modes if name not in BUILDERS]
    if unknown:
        parser.error(f"mode {unknown[0]!r} is none of {', '.join(BUILDERS)}")
    return options


def open_group(device_type: str) -> torch.device:
    """The process group, and this rank's device."""
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Builds, checks, times, and reports on rank 0.

    Raises:
        SystemExit: documents that cannot be divided, or numbers that were wrong.
    """
    datasets.disable_progress_bars()
    num_ranks, lengths = dist.get_world_size(), options.lengths
    check_lengths(lengths, num_ranks)
    register_ways()
    config = read_config(options, max(lengths))
    model = build_model(config, options, device)
    shape = probe(model)
    kernel = kernel_for(shape, options.kernel, device, options.dtype)
    wires = Wires(distca_hf.DistCAPlugin().transport(device), device)
    place = Place(wires, device, options.kernel, options.dtype, model, shape)
    distca_hf.enable(model, place.plugin(sum(lengths) // num_ranks), max(lengths))
    prepare(model, options, device)

    smaller = smaller_lengths(lengths, num_ranks)
    errors = check_modes(options.modes, place, smaller) if options.check else {}
    rates = measure_rates(shape, kernel, max(lengths), device, options.dtype)
    window = random_tokens(lengths, options.accumulation, config.get_text_config().vocab_size)
    runner = Runner(model, wires, device)
    modes = [build_mode(name, place, window) for name in options.modes]
    measured = runner.run(modes, options.warmup, options.rounds, options.exposed)
    if options.profile:
        for mode in modes:
            runner.select(mode)
            path = options.profile / f"{mode.name}-rank{wires.rank}.json.gz"
            trace_step(functools.partial(runner.step, mode), kernel, device, path)
            runner.leave(mode)
    if dist.get_rank() == 0:
        load = load_of(options, shape, num_ranks, device)
        figures = figures_of(measured, rates, load)
        header = header_of(options, config, rates, load, device)
        print(f"{header}\n\n{table(figures, errors)}", flush=True)
        if options.out:
            facts = {"header": header, "rates": vars(rates), "load": vars(load), "errors": errors, "modes": figures}
            options.out.write_text(json.dumps({"options": {k: str(v) for k, v in vars(options).items()}, **facts}))
    losses = {mode.name: measured[mode.name].loss for mode in modes if mode.exact}
    wrong = {name: row for name, row in errors.items() if not all(error <= 1 for error in row.values())}
    if wrong:
        raise SystemExit(f"attention differs from exact attention, as a part of what is allowed: {wrong}")
    if not equal_losses([*losses.values()], options.dtype):
        raise SystemExit(f"losses of the same tokens differ: {losses}")


def load_of(options: argparse.Namespace, shape: Shape, num_ranks: int, device: torch.device) -> Load:
    """What a step asks of a rank."""
    tokens = options.accumulation * sum(options.lengths) / num_ranks
    pairs = options.accumulation * shape.layers * attended_pairs(options.lengths) / num_ranks
    linear = tokens * shape.linear_flops
    return Load(
        tokens=int(tokens),
        model_flops=3 * (linear + pairs * shape.flops_of_pair),
        executed_linear_flops=(3 + (options.checkpointing != "none")) * linear,
        pairs=pairs,
        peak_flops=1e12 * options.peak_tflops if options.peak_tflops else peak_flops(device),
    )


def header_of(options: argparse.Namespace, config: Any, rates: Rates, load: Load, device: torch.device) -> str:
    """Versions, device, and what was run, in a line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    p2p = os.environ.get("NCCL_P2P_DISABLE")
    floor_seconds = rates.floor_seconds(load.executed_linear_flops, load.pairs)
    facts = [
        f"distca_hf {distca_hf.__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        f"{dist.get_world_size()} x {name}" + (f", NCCL_P2P_DISABLE={p2p}" if p2p else ""),
        f"{config.model_type}, {config.get_text_config().num_hidden_layers} layers",
        str(options.dtype).removeprefix("torch."),
        f"documents {PRESETS.get(options.documents, options.documents)}",
        f"{load.tokens} tokens per rank and step in {options.accumulation} micro-steps",
        f"checkpointing {options.checkpointing}, {'FSDP2' if options.fsdp else 'no FSDP'}"
        + (f", compiled by {options.compile}" if options.compile else "")
        + (", liger" if options.liger else ""),
        f"{rates.kernel} {rates.forward_pairs / 1e9:.4g} / {rates.backward_pairs / 1e9:.4g} billion pairs/s forward / "
        f"backward, matrices {rates.matrix_flops / 1e12:.4g} TF/s, floor {1e3 * floor_seconds:.1f} ms",
    ]
    return "; ".join(facts)


if __name__ == "__main__":
    main()
