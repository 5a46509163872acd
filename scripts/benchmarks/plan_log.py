"""Trains an epoch on documents of given lengths, and compares the log with the answer of `distca plan`.

    torchrun --nproc-per-node 8 scripts/benchmarks/plan_log.py examples/lengths/prolong.json.gz --shorter 64

Rank 0 calls the command with the same documents, ranks, tokens per rank and seed. The model is tiny and runs on CPUs:
imbalance depends on lengths alone. `--shorter` divides all lengths, so that an epoch of hundreds of millions of tokens
takes minutes: it has as many micro-batches of as many documents as full lengths have on ranks that hold as many times
more tokens.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import distca_hf
from distca_hf.analysis.lengths import read_lengths
from distca_hf.arrays import ceil_div
from distca_hf.errors import PackingError
from lib.model import small_llama
from lib.parser import add_tokens_per_rank, count, lengths_file, parse_launched, parser_of


SEED = 42
VOCABULARY = 64
FIGURES = ("imbalance_before", "imbalance")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("lengths", type=lengths_file, help="file of document lengths, as distca plan reads it")
    parser.add_argument("--shorter", type=count, default=64, help="divide all lengths by it")
    add_tokens_per_rank(parser, 2048)
    options = parse_launched(parser)
    lengths = ceil_div(read_lengths(options.lengths).tokens, options.shorter)
    try:
        logged = train(lengths, options.tokens_per_rank)
    except PackingError as error:  # documents are too long for so many ranks and tokens
        raise SystemExit(f"{error}; or give a larger --shorter") from error
    if dist.get_rank() == 0:
        said = plan(lengths, dist.get_world_size(), options.tokens_per_rank)["whole_epoch"]
        print(f"{options.lengths.name}: {len(logged)} logged steps, {said['micro_batches']} planned micro-batches")
        for figure in FIGURES:
            mean = float(np.mean([log[f"distca/{figure}"] for log in logged]))
            print(
                f"{figure}: logged {mean:.4f}, said {said[figure]['mean']:.4f}, {said[figure]['mean'] / mean - 1:+.2%}"
            )
    dist.barrier()
    dist.destroy_process_group()


def train(lengths: np.ndarray, tokens_per_rank: int) -> list[dict[str, Any]]:
    """Trains one epoch, and returns the log of every step."""
    datasets.disable_progress_bars()
    ids = np.random.default_rng(0).integers(0, VOCABULARY, int(lengths.max()), dtype=np.int32)
    dataset = datasets.Dataset.from_dict({"input_ids": [ids[:length] for length in lengths]})
    model = small_llama("distca", VOCABULARY, hidden_size=16, layers=1, heads=2)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            seed=SEED,
            num_train_epochs=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        distca_hf.DistCAPlugin(tokens_per_rank=tokens_per_rank, metrics="all").attach(trainer)
        trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


def plan(lengths: np.ndarray, num_ranks: int, tokens_per_rank: int) -> dict[str, Any]:
    """Returns the answer of `distca plan` for the same training."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.json"
        path.write_text(json.dumps(lengths.tolist()))
        options = ["--gpus", num_ranks, "--tokens-per-rank", tokens_per_rank, "--seed", SEED, "--json"]
        command = [Path(sys.executable).parent / "distca", "plan", path, *options]
        return json.loads(subprocess.run([*map(str, command)], capture_output=True, check=True, text=True).stdout)


if __name__ == "__main__":
    main()
