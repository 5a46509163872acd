"""One process of `distca profile`, as a launcher starts it on every GPU:

    torchrun --nproc-per-node 8 -m distca_hf.analysis.profiles --output cluster.json

With several nodes, start this line on each, with --nnodes and --rdzv-endpoint as for a training.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.analysis.profiles.grid import Grid
from distca_hf.analysis.profiles.layers import LayerSize
from distca_hf.analysis.profiles.main_figures import MainFigures, write
from distca_hf.analysis.profiles.measure import Measuring
from distca_hf.analysis.profiles.shipped import DEFAULT_FILE
from distca_hf.comm.measure_links import MeasuringRanks
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError, DistCAError, printable
from distca_hf.launched import launched_local_rank, launched_nodes, launched_world_size


def main(arguments: Sequence[str]) -> None:
    """Measures, and writes the file and prints its main figures on rank 0.

    Raises:
        SystemExit: bad input; with status 2 and one line.
    """
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
        grid = Grid.of_gpu(heads, LayerSize(model.size.hidden_size, round(model.size.mlp_size(model.heads)), *heads))
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
            _print(MainFigures.of(result, out), options.as_json)
    finally:
        ranks.close()


def _print(figures: MainFigures, as_json: bool) -> None:
    words = json.dumps(figures.as_json(), allow_nan=False) if as_json else "\n".join(figures.lines())
    sys.stdout.write(printable(f"{words}\n"))


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
        help="measure only links, and put them into this profile as those between nodes",
    )
    parser.add_argument("--remarks", default="", help="words for the file, such as NCCL_P2P_DISABLE=1")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print main figures as one JSON object")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
