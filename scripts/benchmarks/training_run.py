"""Trains a model with Trainer on batches that each hold one very long document, in several modes, and compares losses.

    torchrun --nproc-per-node 8 scripts/benchmarks/training_run.py --liger --steps 50
    torchrun --nproc-per-node 8 scripts/benchmarks/training_run.py --preset qwen3-4b --liger --steps 50
    torchrun --nproc-per-node 4 scripts/benchmarks/training_run.py --layers 4 --vocabulary 32000 \\
        --tokens-per-rank 65536 --modes distca,given,packing
    torchrun --nproc-per-node 2 scripts/benchmarks/training_run.py --device cpu --preset tiny --tokens-per-rank 256

Modes train one after the other in one process. All begin with the same random weights and have the same documents in
every optimizer step. All use AdamW, bf16, FSDP2 and activation checkpointing; on CPUs fp32 and DDP. So their losses
must follow each other: if one is further than --most-difference from that of the first mode, the script exits with 1
at its end. At a high learning rate from the first step on, rounding decides at which step losses of random weights
jump. So the rate is low, and with --rising-steps it begins at 0.

With --checkpointed-attention save only `packing` recomputes attention (`recompute` is like for like), and the peak of
`ulysses` holds attention outputs in both layouts, which is this program's choice. Columns of the table: README.md.
"""

import argparse
import random

import torch
import torch.distributed as dist
from datasets import Dataset

from lib.baselines.attention import register_ways
from lib.model import read_config
from lib.parser import MOST, add_tokens_per_rank, count, parser_of, whole, words
from lib.report import machine_facts
from lib.training.run import MODES, add_training, parse_training, run_modes, train, training_arguments


SHORT_TOKENS = (512, 1024, 2048, 4096, 8192)
MOST_WORDS = 32_000
STEP, NOISE = 7, 8


def main() -> None:
    options = parse()
    register_ways()
    device = training_arguments(options, "distca").device  # opens the process group
    num_ranks = dist.get_world_size()
    capacity_tokens = num_ranks * options.tokens_per_rank
    long_tokens = options.long_tokens or capacity_tokens // 2 + 128
    if not long_tokens <= capacity_tokens <= MOST // options.steps:
        raise SystemExit(
            f"{num_ranks} ranks of {options.tokens_per_rank} tokens hold {capacity_tokens}: fewer than the long "
            f"document's {long_tokens}, or more than {MOST} in {options.steps} steps"
        )
    config = read_config(options, long_tokens)
    if options.vocabulary:
        config.vocab_size = options.vocabulary
    dataset = training_documents(options.steps, long_tokens, capacity_tokens, config.vocab_size)
    facts = [
        *machine_facts(device),
        f"{config.model_type}, {config.num_hidden_layers} layers, vocabulary {config.vocab_size}",
        f"{options.tokens_per_rank} tokens per rank and step, a document of {long_tokens} in each",
        f"checkpointed attention {options.checkpointed_attention}" + ", liger" * options.liger,
        f"learning rate {options.learning_rate}"
        + f", reached after {options.rising_steps} rising steps" * bool(options.rising_steps),
    ]
    run_modes(options, facts, lambda mode: train(mode, config, dataset, options))


def training_documents(micro_batches: int, long_tokens: int, capacity_tokens: int, vocabulary: int) -> Dataset:
    """Returns documents whose tokens follow a rule that can be learnt: each is 7 above the one before, and some noise.

    Each micro-batch has a long document: if that has more than half of the capacity, there is no room for two. Tokens
    are among the first 32,000 of the vocabulary: those that never come are unlearnt first.
    """
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    lengths = []
    for _ in range(micro_batches):
        lengths.append(long_tokens)
        left = capacity_tokens - long_tokens
        while left:
            lengths.append(min(left, rng.choice(SHORT_TOKENS)))
            left -= lengths[-1]
    words = min(vocabulary, MOST_WORDS)
    rows = []
    for length in lengths:
        noise = torch.randint(0, NOISE, (length,), generator=generator)
        start = torch.randint(0, words, (1,), generator=generator)
        rows.append(((start + STEP * torch.arange(length) + noise) % words).to(torch.int32).numpy())
    return Dataset.from_dict({"input_ids": rows})


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, MODES)
    add_training(parser, MODES, "distca,ulysses", 3e-5)
    add = parser.add_argument
    add("--vocabulary", type=words, help="tokens of the vocabulary, if not as many as the model has")
    add("--rising-steps", type=whole, default=0, help="steps over which the learning rate rises to its value, from 0")
    add_tokens_per_rank(parser, 131_072)
    add("--long-tokens", type=count, help="of the long document of a batch; by default just over half of all tokens")
    add("--packing-attention", default="flash_attention_4", help="attn_implementation of packing")
    kept = ["save", "offload", "recompute"]
    add("--checkpointed-attention", choices=kept, default="save", help="as in settings")
    options = parse_training(parser)
    if options.checkpointed_attention == "offload" and "ulysses" in options.modes:
        parser.error("--checkpointed-attention offload is the product's own: leave ulysses out of --modes")
    return options


if __name__ == "__main__":
    main()
