"""Times whole training steps of a whole model, as users train: as plain packs, and placed by the product.

    torchrun --nproc-per-node 4 scripts/benchmarks/model_step.py --documents 131072,32x4096 --liger --head liger
    torchrun --nproc-per-node 1 scripts/benchmarks/model_step.py --preset qwen3-4b --documents 16384,12x4096 --liger
    torchrun --nproc-per-node 2 scripts/benchmarks/model_step.py --device cpu --preset tiny --documents 256,4x64

A step is forward and backward of all layers, the head and the loss (`lib/whole_model.py`), FSDP's collectives,
and AdamW; weights and its state are fp32, everything in between is bf16. Both modes run in one process with the same
weights, documents, kernel and process groups, one after the other, again and again. Documents must fill all ranks. If
one of them does not fit a rank, `local` is left out, and that is said. If losses of modes differ, the script exits
with 1 at its end. Columns of the table: README.md.
"""

import argparse

import torch
import torch.distributed as dist

from lib.documents import random_tokens
from lib.model import read_config
from lib.options import on_all_ranks, parse_shared, shared_options
from lib.parser import write_figures
from lib.place import Place
from lib.report import MFU, STEP_MS, TOKENS_PER_SECOND, equal_losses, facts_of, load_of, rates_of
from lib.tables import Columns, figure, peak_gib, table_of
from lib.whole_model import HEADS, MODES, TrainingRunner, build_planned, fitting_modes, use_head


COLUMNS: Columns = {
    "step ms": STEP_MS,
    "tokens/s/GPU": TOKENS_PER_SECOND,
    "MFU %": MFU,
    "peak GiB": peak_gib,
    "loss": figure("loss", 1, 4),
    "planned max/mean": figure("imbalance", 1, 4),
    "longest document": figure("longest_document_tokens", 1, 0),
}


def main() -> None:
    on_all_ranks(measure, parse())


def parse() -> argparse.Namespace:
    parser = shared_options(__doc__, MODES)
    parser.add_argument("--head", choices=HEADS, default="none", help="none is Transformers' own")
    parser.set_defaults(checkpointing="saved")
    return parse_shared(parser)


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Builds, times, and reports on rank 0. Exits if documents cannot be divided, or losses differ."""
    num_ranks, lengths = dist.get_world_size(), options.lengths
    if len(options.sets) > 1:
        raise SystemExit(f"{len(options.sets)} sets of documents; a model is timed on one")
    if sum(lengths) % num_ranks:
        raise SystemExit(f"{sum(lengths)} tokens of all documents cannot be divided evenly by {num_ranks} ranks")
    tokens_per_rank = sum(lengths) // num_ranks
    config = read_config(options, max(lengths))
    place = Place.build(config, options, device)
    use_head(place.model, options.head)
    place.enable(tokens_per_rank, max(lengths), options)
    documents = random_tokens(lengths, config.get_text_config().vocab_size)
    names = options.modes or fitting_modes(lengths, num_ranks)
    steps = options.warmup + options.rounds
    planned = {name: build_planned(name, place, documents, steps) for name in names}
    runner = TrainingRunner(place)
    measured = runner.run([mode for mode, _ in planned.values()], options.warmup, options.rounds)
    if dist.get_rank() == 0:
        load = load_of(options, place.shape, num_ranks, device)
        figures = {
            name: rates_of(measured[name], load) | {"imbalance": imbalance, "longest_document_tokens": max(lengths)}
            for name, (_, imbalance) in planned.items()
        }
        header = "; ".join([*facts_of(options, config, load.tokens, device), f"head {options.head}, fused AdamW"])
        if not options.modes and "local" not in names:
            print(f"local is left out: a document of {max(lengths)} tokens does not fit a rank of {tokens_per_rank}")
        print(f"{header}\n\n{table_of(COLUMNS, figures)}", flush=True)
        write_figures(options, header=header, load=vars(load), modes=figures)
    losses = {name: mode.loss for name, mode in measured.items()}
    if not equal_losses([*losses.values()], options.dtype):
        raise SystemExit(f"losses of the same tokens differ: {losses}")


if __name__ == "__main__":
    main()
