"""One process of `distca profile`, as a launcher starts it on every GPU:

    torchrun --nproc-per-node 8 -m distca_hf.analysis.profiles --output cluster.json

With several nodes, start this line on each, with --nnodes and --rdzv-endpoint as for a training.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.profiles.cluster_profile import DEFAULT_FILE, ClusterProfile, LinkTimes
from distca_hf.analysis.profiles.curves import kernel_times_of
from distca_hf.analysis.profiles.measure import Grid, Measuring
from distca_hf.analysis.profiles.measure_links import MeasuringRanks
from distca_hf.config import DistCAConfig, KernelName
from distca_hf.cost import causal_pairs
from distca_hf.errors import ConfigError, DistCAError, printable
from distca_hf.flops import ATTENTION_BACKWARD
from distca_hf.launched import launched_local_rank, launched_nodes, launched_world_size
from distca_hf.whole_file import replaced


if TYPE_CHECKING:
    from distca_hf.analysis.options import ProfileOptions


# Processes on a machine without GPUs.
CPU_PROCESSES = 2


def launch_line(options: "ProfileOptions") -> list[str]:
    """Returns the command with which `distca profile` measures on this node."""
    gpus = torch.cuda.device_count()
    if not options.cpu and not gpus:
        raise ConfigError("this machine has no GPU to measure; --cpu shows with tiny sizes how it works")
    number = options.processes if options.processes is not None else CPU_PROCESSES if options.cpu else gpus
    if number < 1:
        raise ConfigError(f"--processes {number} must be at least 1")
    if not options.cpu and number > gpus:
        raise ConfigError(f"--processes {number}: this machine has {gpus} GPUs")
    DistCAConfig(kernel=cast(KernelName, options.kernel))  # refuses any other
    find_model(options.model)
    if options.as_between_nodes is not None:
        ClusterProfile.load(options.as_between_nodes)
        if number < 2:
            raise ConfigError(f"--as-between-nodes with --processes {number}: the network needs two processes or more")
    target = options.as_between_nodes or options.output
    if target.is_dir():
        raise ConfigError(f"{target} cannot be written: it is a folder")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{target} cannot be written: its folder is missing")
    line = ["torchrun", "--nproc-per-node", str(number), "-m", "distca_hf.analysis.profiles"]
    line += ["--as-between-nodes" if options.as_between_nodes else "--output", str(target)]
    line += ["--model", options.model, "--kernel", options.kernel, *["--cpu"] * options.cpu]
    return [*line, *["--remarks", options.remarks] * bool(options.remarks), *["--json"] * options.as_json]


def main_figures(profile: ClusterProfile, file: Path) -> dict[str, Any]:
    """Returns a profile in short.

    Returns:
        `file`; `device`, `kernel`, `processes`, `nodes` and `date`, see `Made`; `matrix_flops`: operations per second
        of a large matrix product; `attention_tokens`: queries of the longest document that was measured;
        `attention_forward_flops`, `attention_backward_flops`: operations per second for that document;
        `layer_tokens_per_second`: tokens that one layer without attention computes forward and backward, kept in
        between, of the first measured layer in its largest call; `within_node`, `between_nodes`: links, None if not
        measured: bytes per second of the largest size, and seconds of an exchange of the smallest.
    """
    made, attention = profile.made, profile.attention[0]
    layer, pairs = profile.layers[0], causal_pairs(0, int(attention.square_tokens[-1]))
    flops = 2.0 * 2 * attention.head_dim * attention.heads * float(pairs)  # two products for each pair

    def of_links(links: LinkTimes | None) -> dict[str, float] | None:
        if links is None:
            return None
        kinds, most = ("exchange", "all_gather", "reduce_scatter"), links.num_bytes[-1]
        rates = {f"{kind}_bytes_per_second": most / getattr(links, kind)[-1] for kind in kinds}
        return {"ranks": links.ranks, **rates, "exchange_latency_seconds": links.exchange[0]}

    return {
        "file": str(file),
        **{name: getattr(made, name) for name in ("device", "kernel", "processes", "nodes", "date")},
        "matrix_flops": profile.rates.matrix_flops,
        "attention_tokens": int(attention.square_tokens[-1]),
        "attention_forward_flops": flops / attention.square_forward[-1],
        "attention_backward_flops": ATTENTION_BACKWARD * flops / attention.square_backward[-1],
        "layer_tokens_per_second": layer.tokens[-1] / (layer.kept[-1] + layer.backward[-1]),
        "within_node": of_links(profile.within_node),
        "between_nodes": of_links(profile.between_nodes),
    }


def in_words(figures: Mapping[str, Any]) -> str:
    """Returns the main figures as lines."""
    names = "matrix_flops", "attention_forward_flops", "attention_backward_flops"
    matrix, forward, backward = (f"{figures[name] / 1e12:.3g}" for name in names)
    lines = [
        f"{figures['file']}: {figures['processes']} x {figures['device']}, {figures['kernel']}, {figures['date']}",
        f"matrix products {matrix} TFLOP/s; attention over {figures['attention_tokens']:,} tokens {forward} forward, "
        f"{backward} backward",
        f"a layer without attention, forward and backward: {figures['layer_tokens_per_second']:,.0f} tokens/s",
    ]
    for name, links in (("within a node", figures["within_node"]), ("between nodes", figures["between_nodes"])):
        measured = "not measured"
        if links is not None:
            kinds = "exchange", "all_gather", "reduce_scatter"
            exchange, gather, reduce = (f"{links[f'{kind}_bytes_per_second'] / 1e9:.3g}" for kind in kinds)
            measured = (
                f"{exchange} GB/s exchanged, {gather} gathered, {reduce} reduced; an exchange takes "
                f"{links['exchange_latency_seconds'] * 1e6:.0f} us or more"
            )
        lines.append(f"links {name}: {measured}")
    return "\n".join(lines)


def write(profile: ClusterProfile, path: Path) -> None:
    """Writes a profile; the file can also be given to the setting `kernel_times`."""
    content = profile.as_json() | {"kernel_times": kernel_times_of(profile.attention[0])}
    try:
        with replaced(path, named=path != DEFAULT_FILE) as unfinished:
            unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def main(arguments: Sequence[str]) -> None:
    """Measures, and writes the file and prints its main figures on rank 0."""
    options = _parse(arguments)
    try:
        _measure(options, shlex.join(["torchrun", "-m", "distca_hf.analysis.profiles", *arguments]))
    except DistCAError as error:
        sys.stderr.write(printable(f"distca: {' '.join(str(error).split())}\n"))
        raise SystemExit(2) from error


def _measure(options: argparse.Namespace, command: str) -> None:
    profile = ClusterProfile.load(options.as_between_nodes) if options.as_between_nodes else None
    model = find_model(options.model, tries=False)
    heads = model.heads.query, model.heads.key_value, model.heads.dim
    if options.cpu:
        grid = Grid.of_cpu(heads)
    elif model.size is None:
        raise ConfigError(f"--model {options.model}: its sizes are not known, so no layer of it can be measured")
    else:
        grid = Grid.of_gpu(heads, (model.size.hidden_size, round(model.size.mlp_size(model.heads)), *heads))
    world_size = launched_world_size()
    ranks = MeasuringRanks.open(launched_local_rank(), world_size, world_size // launched_nodes(), options.cpu)
    try:
        measuring = Measuring(ranks, grid, options.kernel, command, options.remarks)
        if profile is None:
            result, out = measuring.whole(), options.output
        elif ranks.num_ranks == 1:
            raise ConfigError("--as-between-nodes needs two ranks or more; give --processes 2")
        else:
            result, out = measuring.links_of(profile), options.as_between_nodes
        if ranks.rank == 0:
            write(result, out)
            figures = main_figures(result, out)
            text = json.dumps(figures, allow_nan=False) if options.as_json else in_words(figures)
            sys.stdout.write(printable(f"{text}\n"))
    finally:
        ranks.close()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="distca_hf.analysis.profiles", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_FILE, help="file to write")
    parser.add_argument("--model", default="llama3-8b", help="model whose heads and layer are measured")
    parser.add_argument("--kernel", default=DistCAConfig().kernel, help="attention kernel, as in settings")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes over gloo, without a GPU")
    parser.add_argument(
        "--as-between-nodes",
        type=Path,
        metavar="PROFILE",
        help="measure only the network, and put it into this profile as that between nodes",
    )
    parser.add_argument("--remarks", default="", help="a remark for the file, such as NCCL_P2P_DISABLE=1")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print main figures as one JSON object")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
