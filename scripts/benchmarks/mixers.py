"""Measures layers with a state on one device: cut documents against whole ones, packs against a row for each document.

    python scripts/benchmarks/mixers.py
    python scripts/benchmarks/mixers.py --device cpu --tokens 512 --pack 24x16 --rounds 1 --hidden-size 64

Each family is one layer's mixer, forward and backward, with the kernels that are installed. For the first table one
document is whole, and then in so many fragments, all of them on this device: their states are folded as between
ranks. Errors are of the output, and the largest of a gradient, against the same layer in fp32 by Transformers' own
functions; the second one over the first one should be at most 1.5. For the second table a pack of documents goes
through the mixer in one call for all of them, and in batches of documents of about the same length.

Times are medians of the rounds, of both ways in turns. Before them, Triton compiles kernels, for KDA for minutes. The
folder TRITON_CACHE_DIR keeps them.
"""

import argparse
import copy
import inspect
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import distca_hf  # noqa: F401 (registers its attention)
from distca_hf.integrations.models.carried_mixers import carried_forward, halo_tokens_of
from distca_hf.integrations.models.mixer_calls import DocumentRows
from distca_hf.integrations.models.mixers import mixers_of
from lib.documents import parse_documents, spelled_out
from lib.parser import add_device, count, names, parser_of
from lib.tables import head, row
from lib.trainer_batches import rows_on_one_device
from lib.wires import synchronize


# Sizes of a layer, as in models of about 30 billion parameters; families and what their configurations call sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    name: json.loads((Path(__file__).parent / f"presets/mixers/{name}.json").read_text())
    for name in ("qwen3_5_text", "kimi_linear", "nemotron_h", "jamba", "lfm2")
}
Forward = Callable[[torch.Tensor], torch.Tensor]


class Run(NamedTuple):
    """Numbers of one forward and backward pass: output, and gradients of the input and of each parameter."""

    output: torch.Tensor
    gradients: list[torch.Tensor]

    def error(self, exact: "Run") -> tuple[float, float]:
        """Returns relative errors of the output, and the largest one of a gradient."""
        pairs = zip((self.output, *self.gradients), (exact.output, *exact.gradients), strict=True)
        output, *gradients = (float((x.double() - y.double()).norm() / y.double().norm()) for x, y in pairs)
        return output, max(gradients)


def mixer_of(family: str, hidden_size: int, divide_heads: int, device: torch.device) -> nn.Module:
    """Returns the mixer of a layer in bf16, or in fp32 on CPUs, with weights of usual size."""
    divided = {
        name: size // divide_heads if "_heads" in name or name == "n_groups" else size
        for name, size in FAMILIES[family].items()
    }
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0}
    config = AutoConfig.for_model(family, hidden_size=hidden_size, **sizes, **divided)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    (mixer,) = mixers_of(model).values()
    return mixer.to(torch.bfloat16 if device.type == "cuda" else torch.float32).train()


def carried(mixer: nn.Module, segments: list[tuple[int, int, int]], device: torch.device) -> Forward:
    """Returns the mixer on segments (document, start, stop), all on this device."""
    rows = rows_on_one_device(segments, halo_tokens_of(mixer), device)
    return carried_forward(mixer, lambda: rows, "mixer")


def without_kernels(mixer: nn.Module) -> Forward:
    """Returns the mixer in fp32, by the functions that Transformers calls if no kernel is installed."""
    mixer = copy.deepcopy(mixer).float()
    forward: Any = inspect.unwrap(type(mixer).forward)
    names = {
        name: inspect.unwrap(value) if inspect.isfunction(value) else value
        for name, value in forward.__globals__.items()
    }
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    bound: Forward = own.__get__(mixer)
    return bound


def run(mixer: nn.Module, forward: Forward, x_1TD: torch.Tensor, gradient: torch.Tensor) -> Run:
    """Runs forward and backward."""
    x_1TD = x_1TD.detach().requires_grad_()
    for parameter in mixer.parameters():
        parameter.grad = None
    output = forward(x_1TD)
    output.backward(gradient.to(output.dtype))
    gradients = [x_1TD.grad, *(parameter.grad for parameter in mixer.parameters())]
    return Run(output.detach(), [x for x in gradients if x is not None])


def seconds(runs: Sequence[Callable[[], Run]], rounds: int, device: torch.device) -> list[float]:
    """Returns the median time of each run, in turns; each is run once before."""
    times: list[list[float]] = [[] for _ in runs]
    for of_run, one in [*zip(times, runs, strict=True)] * (rounds + 1):
        synchronize(device)
        began = time.perf_counter()
        one()
        synchronize(device)
        of_run.append(time.perf_counter() - began)
    return [statistics.median(of_run[1:]) for of_run in times]


def cut_row(mixer: nn.Module, options: argparse.Namespace, device: torch.device) -> list[str]:
    """Compares a document in fragments with the same one whole; returns cells of the table."""
    borders = np.linspace(0, options.tokens, options.fragments + 1).astype(int).tolist()
    x_1TD = torch.randn(1, options.tokens, options.hidden_size, device=device).to(next(mixer.parameters()).dtype)
    gradient = torch.randn_like(x_1TD)
    ways = (
        carried(mixer, [(0, 0, options.tokens)], device),
        carried(mixer, [(0, start, stop) for start, stop in pairwise(borders)], device),
    )
    runs = [partial(run, mixer, way, x_1TD, gradient) for way in ways]
    errors = ["-"] * 4
    if options.errors:
        exact_forward: Any = without_kernels(mixer)
        exact = run(exact_forward.__self__, exact_forward, x_1TD.float(), gradient)
        whole, cut = (one().error(exact) for one in runs)
        errors = [
            text
            for of_one, of_other in zip(whole, cut, strict=True)
            for text in (f"{of_one:.2e}", f"{of_other / of_one:.2f}" if of_one else "-")
        ]
        del exact, exact_forward
    of_whole, of_cut = seconds(runs, options.rounds, device)
    return [*errors, f"{1e3 * of_whole:.1f}", f"{of_cut / of_whole:.2f}"]


def pack_row(mixer: nn.Module, options: argparse.Namespace, device: torch.device) -> list[str]:
    """Compares one call for a pack with rows of each document; returns cells of the table."""
    lengths = parse_documents(options.pack)
    x_1TD = torch.randn(1, sum(lengths), options.hidden_size, device=device).to(next(mixer.parameters()).dtype)
    together = carried(mixer, [(number, 0, tokens) for number, tokens in enumerate(lengths)], device)
    rows, own = DocumentRows(np.array(lengths), 1, sum(lengths), device), type(mixer).forward.__get__(mixer)

    def apart(x_1TD: torch.Tensor) -> Any:
        return rows.mix(own, (x_1TD,), {})

    runs = [partial(run, mixer, way, x_1TD, torch.randn_like(x_1TD)) for way in (together, apart)]
    difference, _ = runs[0]().error(runs[1]())
    of_one, of_rows = seconds(runs, options.rounds, device)
    return [f"{1e3 * of_one:.1f}", f"{of_rows / of_one:.2f}", f"{difference:.1e}"]


def main() -> None:
    parser = parser_of(__doc__)
    add, either = parser.add_argument, argparse.BooleanOptionalAction
    add("--families", type=names(FAMILIES, "family"), default=",".join(FAMILIES), help="comma-separated")
    add("--tokens", type=count, default=32_768, help="of the document that is cut")
    add("--fragments", type=count, default=8, help="equally long parts of it")
    add("--pack", default="8192,4x2048,16x512,64x128", help="lengths of a pack's documents")
    add("--hidden-size", type=count, default=4096, help="of the model")
    add("--divide-heads", type=count, default=1, help="by this, to compute in fp32 with less memory")
    add("--errors", action=either, default=True, help="compare with fp32")
    add("--rounds", type=count, default=5, help="times that every way is measured, in turns")
    add_device(parser)
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; hidden {options.hidden_size}")
    mixers = {
        family: mixer_of(family, options.hidden_size, options.divide_heads, device) for family in options.families
    }
    cut = f"One document of {options.tokens:,} tokens, whole and in {options.fragments} fragments"
    of_cut = ("error, whole", "cut ÷ whole", "of gradients, whole", "cut ÷ whole", "whole, ms", "time, cut ÷ whole")
    pack, of_pack = f"A pack of {spelled_out(options.pack)}", ("one call, ms", "a row each ÷ one call", "difference")
    for title, columns, row_of in ((cut, of_cut, cut_row), (pack, of_pack, pack_row)):
        print(f"\n{title}\n\n{head(('family', *columns))}", flush=True)
        for family, mixer in mixers.items():
            print(row([family, *row_of(mixer, options, device)]), flush=True)


if __name__ == "__main__":
    main()
