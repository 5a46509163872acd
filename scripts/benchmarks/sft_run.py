"""Trains a model with TRL's SFTTrainer on documents of real lengths: by itself, and with distca_hf attached.

    torchrun --nproc-per-node 2 scripts/benchmarks/sft_run.py --steps 50
    torchrun --nproc-per-node 2 scripts/benchmarks/sft_run.py --device cpu --preset tiny --longest 256 --steps 3 \\
        --warmup 1 --modes padded,attached-padded

Modes train one after the other in one process, from the same random weights. All of them but `packing` have the same
documents in every step: their losses must follow each other. (Padded batches count the first token of each document
as a label, so theirs are a little smaller.) If one is further than --most-difference from that of the first mode, the
script exits with 1 at its end. Settings are those of TRL (activation checkpointing, bf16 on GPUs) under DDP. On CPUs
`plain` attends across documents: TRL asks for FlashAttention there.

In the table, each figure of the slowest or largest rank:

    step                        median of the steps after --warmup, from a barrier until the device is done
    tokens/s/GPU                all tokens over all time of these steps
    tokens max/mean             of the ranks' batches, mean over these steps
    host ms                     median of the host's time from a step's batches until the embedding is called, of the
                                rank that comes last: it waits for no other
    peak                        memory that torch had given out at once
    furthest from first mode    largest difference of a step's logged loss, and at which step
"""

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import distca_hf
from distca_hf.analysis.lengths import read_lengths
from lib.documents import random_tokens
from lib.header import machine_facts
from lib.model import read_config
from lib.options import add_kernel, add_model
from lib.parser import (
    add_device,
    add_out,
    at_least_two,
    chosen_modes,
    count,
    not_negative,
    parser_of,
    whole,
)
from lib.tables import markdown, number
from lib.training.run import StepTimes, free_memory, furthest_in_words, run_modes


MODES = {
    "plain": "padding_free=True: a step's documents in one row, whole on their rank",
    "packing": "packing=True: packs of --longest tokens, as many as a batch has on average; other documents in a step",
    "attached": "plain, with plugin.attach: rows are placed inside the model",
    "padded": "as SFTTrainer is without any setting: padded batches",
    "attached-padded": "padded, with plugin.attach",
}
COLUMNS = (
    *("mode", "step ms", "÷ first", "tokens/s/GPU", "speed ÷ first", "tokens max/mean", "host ms", "peak GiB"),
    *("loss at first", "at last", "furthest from first mode"),
)


class HostTimes:
    """Times of the host between the batches of a step in its hands and the first call of its embedding.

    Attributes:
        seconds: `[steps]` so far.
        tokens: `[steps]` of this rank's batches, padding left out.
    """

    def __init__(self, trainer: SFTTrainer) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self._began: float | None = None
        self._take = trainer.get_batch_samples
        trainer.get_batch_samples = self._batch_samples
        trainer.model.get_input_embeddings().register_forward_pre_hook(self._note)

    def _batch_samples(self, *args: Any) -> Any:
        batches, num_items = self._take(*args)
        for_each = (batch.get("attention_mask", torch.ones_like(batch["input_ids"])) for batch in batches)
        self.tokens.append(sum(int(mask.sum()) for mask in for_each))
        self._began = time.perf_counter()
        return batches, num_items

    def _note(self, module: nn.Module, args: object) -> None:
        if self._began is not None:
            self.seconds.append(time.perf_counter() - self._began)
            self._began = None


def main() -> None:
    options = parse()
    args = sft_config(options, "plain", 0)
    device, num_ranks = args.device, args.world_size  # opens the process group
    longest, batch_size = options.longest, options.batch_size
    lengths = cycled(read_lengths(options.lengths).tokens.clip(2, longest).tolist(), options)
    config = read_config(options, longest)
    [documents] = random_tokens(lengths[: options.steps * batch_size * num_ranks], 1, config.vocab_size)
    mean_tokens = sum(map(len, documents)) / len(documents)
    facts = [
        *machine_facts(device),
        f"{config.model_type}, {config.num_hidden_layers} layers, vocabulary {config.vocab_size}",
        f"{batch_size} documents of {options.lengths} up to {longest} tokens per rank and step, mean "
        f"{mean_tokens:.0f}",
        f"learning rate {options.learning_rate}",
    ]
    packs = max(1, round(batch_size * mean_tokens / longest))
    dataset = Dataset.from_dict({"input_ids": documents})
    run_modes(options, facts, lambda mode: train(mode, config, dataset, packs, options), table, {"packing"})


def cycled(lengths: list[int], options: argparse.Namespace) -> list[int]:
    """Returns lengths in an order drawn once, again and again until they are enough."""
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    needed = options.steps * options.batch_size * dist.get_world_size()
    return [lengths[order[place % len(order)]] for place in range(needed)]


def sft_config(options: argparse.Namespace, mode: str, packs: int) -> SFTConfig:
    """Returns settings of a mode.

    Args:
        packs: of a batch of `packing`.
    """
    on_cpu, is_packing = options.device == "cpu", mode == "packing"
    return SFTConfig(
        output_dir="bench_output",
        max_steps=options.steps,
        per_device_train_batch_size=packs if is_packing else options.batch_size,
        max_length=options.longest if is_packing else None,
        packing=is_packing,
        padding_free=mode in ("plain", "attached"),
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        use_cpu=on_cpu,
        bf16=not on_cpu,
        use_liger_kernel=options.liger,
        train_sampling_strategy="sequential",
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def train(
    mode: str, config: PreTrainedConfig, documents: Dataset, packs: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains in one mode from the first weights. A collective call.

    Args:
        mode: one of `MODES`.
        documents: column `input_ids`.
        packs: of a batch of `packing`.

    Returns:
        figures, the same on all ranks: `losses`, `seconds` and `host_seconds` of every step, `tokens` of every step
        and rank, and `peak_bytes`.
    """
    args = sft_config(options, mode, packs)
    device = args.device
    free_memory(device)
    torch.manual_seed(0)
    is_attached = mode.startswith("attached")
    with device:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),  # SFTTrainer changes it
            attn_implementation="distca" if is_attached else options.attention,
            dtype=torch.float32,
        )
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    times = StepTimes(device)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=documents,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>"),
        callbacks=[times],
    )
    if is_attached:
        distca_hf.DistCAPlugin(kernel=options.kernel).attach(trainer)
    host = HostTimes(trainer)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer.train()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    most = torch.tensor([*times.seconds, peak], dtype=torch.float64, device=device)
    least = torch.tensor(host.seconds, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    *seconds, peak_bytes = most.tolist()
    tokens = torch.tensor(host.tokens[: options.steps], device=device)
    of_ranks = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, tokens)
    return {
        "mode": mode,
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "seconds": seconds,
        "host_seconds": least.tolist(),
        "tokens": torch.stack(of_ranks, dim=1).tolist(),
        "peak_bytes": int(peak_bytes),
    }


def table(runs: list[dict[str, Any]], warmup: int) -> str:
    """Returns a Markdown table with a row for each training; the first one is what the others are compared with."""
    return markdown(COLUMNS, _rows(runs, warmup))


def _rows(runs: list[dict[str, Any]], warmup: int) -> Iterator[list[str]]:
    first: tuple[float, float] | None = None
    for run in runs:
        seconds, tokens = run["seconds"][warmup:], run["tokens"][warmup:]
        step, rate = statistics.median(seconds), sum(map(sum, tokens)) / len(tokens[0]) / sum(seconds)
        first = first or (step, rate)
        uneven = statistics.mean(max(of_ranks) * len(of_ranks) / sum(of_ranks) for of_ranks in tokens)
        is_other = run["mode"] == "packing" and run is not runs[0]
        yield [
            run["mode"],
            number(step, 1e3, 1),
            number(step / first[0], 1, 3),
            number(rate, 1, 0),
            number(rate / first[1], 1, 3),
            number(uneven, 1, 3),
            number(statistics.median(run["host_seconds"][warmup:]), 1e3, 2),
            number(run["peak_bytes"] or None, 2**-30, 1),
            number(run["losses"][0], 1, 4),
            number(run["losses"][-1], 1, 4),
            "other documents" if is_other else furthest_in_words(runs[0], run),
        ]


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, MODES)
    parser.add_argument("--modes", default="plain,packing,attached", help="comma-separated, see below")
    add_model(parser)
    parser.set_defaults(preset="qwen3-0.6b")
    parser.add_argument(
        "--lengths",
        type=Path,
        default=Path("prolong"),
        help="of documents: a shipped sample, or a file, as distca plan",
    )
    parser.add_argument("--longest", type=at_least_two, default=32_768, help="tokens that longer documents are cut at")
    parser.add_argument("--batch-size", type=count, default=8, help="documents of a rank and step")
    parser.add_argument("--steps", type=count, default=20, help="to train")
    parser.add_argument("--warmup", type=whole, default=3, help="steps whose times do not count")
    parser.add_argument("--seed", type=whole, default=0, help="of the order of documents")
    parser.add_argument("--learning-rate", type=not_negative, default=1e-5, help="of AdamW")
    parser.add_argument("--liger", action="store_true", help="Liger's kernels, in all modes")
    parser.add_argument("--attention", default="flash_attention_4", help="attn_implementation of plain and packing")
    add_kernel(parser)
    add_device(parser)
    parser.add_argument("--most-difference", type=not_negative, default=1e-2, help="of losses of the same step")
    add_out(parser, ", after every mode")
    options = parser.parse_args()
    options.modes = chosen_modes(parser, options.modes, MODES)
    if options.device == "cpu" and options.attention == "flash_attention_4":
        options.attention = "sdpa"
    if options.steps <= options.warmup:
        parser.error(f"--steps {options.steps} leaves none to time after --warmup {options.warmup}")
    return options


if __name__ == "__main__":
    main()
