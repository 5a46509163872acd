"""Options that benchmarks of steps share: which model, on which device, trained in which way."""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from distca_hf.config import DistCAConfig, KernelName
from distca_hf.errors import ConfigError, PackingError, UnsupportedAttentionError
from lib.documents import GPUS, parse_documents
from lib.documents import PRESETS as DOCUMENTS
from lib.model import PRESETS as MODELS
from lib.parser import add_device, add_out, count, few, file_to_read, names, parser_of, whole


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` or `--preset`, and `--layers`, as `lib.model.read_config` takes them."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--config", type=file_to_read, help="config.json of a Transformers model")
    sizes = "sizes of the model, without --config; tiny: for CPUs"
    model.add_argument("--preset", choices=[*MODELS], default="llama3-8b", help=sizes)
    parser.add_argument("--layers", type=few, help="decoder layers, if not as many as the model has")


def add_kernel(parser: argparse.ArgumentParser) -> None:
    """Adds `--kernel`."""
    parser.add_argument("--kernel", choices=get_args(KernelName), default=DistCAConfig().kernel, help="as in settings")


def shared_options(description: str | None, modes: Mapping[str, str]) -> argparse.ArgumentParser:
    """Returns a parser with the options of a training step; a script adds its own. Modes are described in its help."""
    parser = parser_of(description, modes)
    add_model(parser)
    parser.add_argument(
        "--documents",
        default="A",
        help=f"of a step, as 131072,96x4096 or one of {', '.join(DOCUMENTS)}, for {GPUS} GPUs, or A:8 for 8; "
        "several sets with ; between them, measured one after the other: figures of the second go to OUT.1.json",
    )
    fitting = "comma-separated, see below; by default those that fit the other options"
    parser.add_argument("--modes", type=names(modes), help=fitting)
    parser.add_argument("--rounds", type=count, default=5, help="times that every mode is measured, in turns")
    parser.add_argument("--warmup", type=whole, default=2, help="rounds before these")
    kept = "full recomputes attention, too; saved keeps its outputs, offloaded keeps everything on the host"
    kinds = ["full", "saved", "offloaded", "none"]
    parser.add_argument("--checkpointing", choices=kinds, default="full", help=kept)
    parser.add_argument(
        "--fsdp", action=argparse.BooleanOptionalAction, default=True, help="without it gradients are not exchanged"
    )
    add_device(parser)
    parser.add_argument("--dtype", choices=[*DTYPES], help="by default bfloat16 on GPUs, float32 on CPUs")
    add_kernel(parser)
    parser.add_argument("--liger", action="store_true", help="norms, rotary embeddings and MLPs of liger_kernel")
    add_out(parser)
    parser.set_defaults(ep_size=1, tp_size=1, dp_replicate_size=1, offload=False)
    return parser


def parse_shared(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the options of a command line, and what follows from them: `sets` of lengths by name, `lengths` of the
    first, and `dtype` and `reduce_dtype` of torch; `modes` are None if nothing was said."""
    options = parser.parse_args()
    options.sets = read_documents(parser, options.documents)
    check_packages(parser, options)
    options.lengths = next(iter(options.sets.values()))
    options.dtype = DTYPES[options.dtype or ("bfloat16" if options.device == "cuda" else "float32")]
    options.reduce_dtype = options.dtype  # FSDP sums gradients in it, as with Accelerate's mixed_precision
    if options.checkpointing == "offloaded" and options.modes != ["placed"]:
        parser.error("--checkpointing offloaded is the product's own: give --modes placed")
    return options


def of_each_set(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yields the options of every set of documents: its name in `documents`, its lengths, and another file for
    figures."""
    for number, (name, lengths) in enumerate(options.sets.items()):
        out = options.out and (options.out.with_suffix(f".{number}.json") if number else options.out)
        yield argparse.Namespace(**{**vars(options), "documents": name, "lengths": lengths, "out": out})


def read_documents(parser: argparse.ArgumentParser, text: str) -> dict[str, list[int]]:
    """Returns the lengths of every set of `--documents`, by its name. Ends with a message if they cannot be read."""
    try:
        return {name: parse_documents(name) for name in text.split(";")}
    except ValueError:
        words = f"write tokens as 131072,96x4096, or one of {', '.join(DOCUMENTS)}, with ; between sets"
        parser.error(f"--documents {text!r}: {words}")


def check_packages(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with a message if Liger's kernels are asked for and not installed."""
    asked = {"--liger": options.liger, "--head liger": getattr(options, "head", "") == "liger"}
    words = next((words for words, is_asked in asked.items() if is_asked), None)
    if words and find_spec("liger_kernel") is None:
        parser.error(f"{words} needs the package liger-kernel, which is not installed here: leave it out")


def _open_group(device_type: str, bind: bool) -> torch.device:
    """Opens the process group, bound to this rank's device or not; returns the device. Without a launcher there is one
    process."""
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        alone = {"store": TCPStore("127.0.0.1", 0, is_master=True), "rank": 0, "world_size": 1}
    if device_type == "cpu":
        dist.init_process_group("gloo", **alone)
        return torch.device("cpu")
    place, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= num_gpus:
        raise SystemExit(f"process {place} of this host has no GPU: there are {num_gpus}; launch as many processes")
    device = torch.device("cuda", place)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device if bind else None, **alone)
    return device


def on_all_ranks(
    measure: Callable[[argparse.Namespace, torch.device], None], options: argparse.Namespace, *, bind: bool = True
) -> None:
    """Measures on this rank's device, between the beginning and the end of the process group. That is bound to the
    device if `bind`; NCCL opens groups of some ranks only if it is not. Exits if the product refuses the options."""
    try:
        measure(options, _open_group(options.device, bind))
    except (ConfigError, PackingError, UnsupportedAttentionError) as error:
        raise SystemExit(str(error)) from error
    dist.barrier()
    dist.destroy_process_group()
