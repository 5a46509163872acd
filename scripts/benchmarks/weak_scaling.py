"""Compares steps of placed documents on 2, 4, ... GPUs with one GPU at equal work: as many tokens and pairs.

    python scripts/benchmarks/weak_scaling.py --out scaling.json
    python scripts/benchmarks/weak_scaling.py --sizes 2 --repeats 1 -- --layers 4
    python scripts/benchmarks/weak_scaling.py --device cpu --sizes 2 --tokens-per-gpu 512 -- --preset tiny

It launches `attention_step.py` for one GPU and every number of GPUs, one after the other, and all of them `--repeats`
times. So a machine that slows down does so for all, and other GPUs do nothing meanwhile. What follows -- goes to each
launch.

Equal tokens are not equal work: documents that span GPUs have more attended pairs for each token. So N GPUs are
compared with one GPU that does the part of one of N in an even spread (`--share-tokens` of attention_step.py). It has
the same tokens and the same pairs, to the pair, and there is no other GPU, no collective and no exchange. Documents
are of two kinds:

    mix       drawn from a shipped sample of lengths, up to as long as all GPUs hold; rounded to few lengths
    copies    of the mix for one GPU. Every GPU could hold one copy whole: the easy case

In the table, of one micro-step: `one GPU ms` and `placed ms` are medians. `÷ one GPU` is the median of tokens per
second and GPU over those of one GPU at equal work, launch by launch, and `from, to` its smallest and largest value.
`ideal ÷ one GPU` is the same of an even spread over all GPUs without any exchange: what FSDP's collectives cost.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lib.parser import add_device, add_out, check_tokens, count, counts, parser_of, whole, write_figures
from lib.planning.mixes import mix_name
from lib.scaling import SHORTEST_TOKENS, Documents, Round, documents_of, row_of, table


STEP = Path(__file__).parent / "attention_step.py"
QUICK = ("--no-exposed", "--no-kernels")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--sizes", type=counts, help="numbers of GPUs, as 2,4; by default powers of two up to all of this host"
    )
    parser.add_argument("--tokens-per-gpu", type=whole, default=65_536, help="tokens of each GPU, a multiple of 128")
    parser.add_argument("--mix", type=mix_name, default="prolong_up", help="lengths, a name of lib/planning/mixes.py")
    parser.add_argument(
        "--seed", type=whole, default=2, help="of the mix; 2 has a document of more than half of all tokens"
    )
    parser.add_argument("--repeats", type=count, default=2, help="times that everything is launched, in turns")
    parser.add_argument("--rounds", type=count, default=2, help="steps measured in each launch, after one more")
    add_device(parser)
    add_out(parser, ", after every repeat")
    parser.add_argument(
        "step", nargs="*", metavar="-- OPTION", help="options of attention_step.py in place of --layers 4"
    )
    options = parser.parse_args()
    if options.tokens_per_gpu < SHORTEST_TOKENS or options.tokens_per_gpu % SHORTEST_TOKENS:
        parser.error(f"--tokens-per-gpu {options.tokens_per_gpu} is no multiple of {SHORTEST_TOKENS}")
    sizes = options.sizes or _sizes(torch.cuda.device_count())
    if not sizes:
        parser.error(f"this host has {torch.cuda.device_count()} GPUs, and weak scaling takes 2; or give --sizes")
    check_tokens(parser, max(sizes), options.tokens_per_gpu)
    one, *documents = documents_of(options.mix, sizes, options.tokens_per_gpu, options.seed)
    by_documents: list[tuple[Round, ...]] = [() for _ in documents]
    with TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            rounds = _measure(options, one, documents, repeat, Path(folder))
            by_documents = [(*before, now) for before, now in zip(by_documents, rounds, strict=True)]
            rows = [
                {**vars(each), "rounds": [vars(one) for one in of_each]}
                for each, of_each in zip(documents, by_documents, strict=True)
            ]
            write_figures(options, rows=rows)  # the next repeat may not come to its end
    print(f"{options.mix}, seed {options.seed}, {options.repeats} x {options.rounds} steps of each\n")
    print(table([row_of(each, of_each) for each, of_each in zip(documents, by_documents, strict=True)]), flush=True)


def _sizes(most: int) -> list[int]:
    """Returns powers of two from 2 up to a number of GPUs."""
    return [1 << power for power in range(1, most.bit_length())]


def _measure(
    options: argparse.Namespace, one: Documents, documents: Sequence[Documents], repeat: int, folder: Path
) -> list[Round]:
    """Launches one GPU with its part of all documents, then every number of GPUs; numbers are checked once.

    Args:
        one: documents of one GPU, which is its part of their copies, too.
    """
    check = "--check" if repeat == 0 else "--no-check"
    mixed = [each for each in documents if each.kind == "mix"]
    share = ["--share-tokens", str(options.tokens_per_gpu), "--modes", "ideal", check]
    of_copies, *of_mixed = _launch(options, 1, [one, *mixed], share, folder / f"{repeat}-alone.json")
    rounds = {}
    for gpus in sorted({each.gpus for each in documents}):
        of_size = [each for each in documents if each.gpus == gpus]
        shared = _launch(options, gpus, of_size, ["--modes", "ideal,placed", check], folder / f"{repeat}-{gpus}.json")
        for each, facts in zip(of_size, shared, strict=True):
            alone = of_copies if each.kind == "copies" else of_mixed[mixed.index(each)]
            rounds[each] = Round(alone["modes"]["ideal"], alone["load"], facts["load"], facts["modes"])
    return [rounds[each] for each in documents]


def _launch(
    options: argparse.Namespace, gpus: int, documents: Sequence[Documents], more: Sequence[str], out: Path
) -> list[dict[str, Any]]:
    """Returns the figures of every list of documents.

    Raises:
        SystemExit: the launch failed, or its numbers were wrong.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    given = [
        "--documents",
        ";".join(each.text for each in documents),
        "--rounds",
        str(options.rounds),
        "--warmup",
        "1",
    ]
    step = options.step or ["--layers", "4"]
    line = [*launcher, str(STEP), "--device", options.device, *given, *QUICK, *more, *step, "--out", str(out)]
    print(f"== {gpus} GPUs: {' '.join(more)}", flush=True)
    ended = subprocess.run(line, check=False)
    if ended.returncode:
        raise SystemExit(f"the launch on {gpus} GPUs ended with {ended.returncode}: {' '.join(line)}")
    files = [out, *(out.with_suffix(f".{number}.json") for number in range(1, len(documents)))]
    return [json.loads(file.read_text()) for file in files]


if __name__ == "__main__":
    main()
