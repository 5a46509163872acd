"""Trains a model with TRL's SFTTrainer on documents of real lengths: by itself, and with distca_hf attached.

    torchrun --nproc-per-node 2 scripts/benchmarks/sft_run.py --steps 50
    torchrun --nproc-per-node 2 scripts/benchmarks/sft_run.py --device cpu --preset tiny --longest 256 --steps 3 \\
        --warmup 1 --modes padded,attached-padded

Modes train one after the other in one process, from the same random weights. All of them but `packing` have the same
documents in every step: their losses must follow each other. (Padded batches count the first token of each document
as a label, so theirs are a little smaller.) If one is further than --most-difference from that of the first mode, the
script exits with 1 at its end. Settings are TRL's own (activation checkpointing, bf16 on GPUs) under DDP. On CPUs
`plain` attends across documents: TRL asks for FlashAttention there. Columns of the table: README.md.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import distca_hf
from distca_hf.analysis.lengths import read_lengths
from lib.documents import random_tokens
from lib.model import read_config
from lib.parser import at_least_two, count, parser_of, whole
from lib.report import TOKENS_PER_SECOND, machine_facts
from lib.tables import Columns, figure, number, peak_gib
from lib.training import run as training
from lib.wires import free_memory, largest, of_all_ranks


MODES = {
    "plain": "padding_free=True: a step's documents in one row, whole on their rank",
    "packing": "packing=True: packs of --longest tokens, as many as a batch has on average; other documents in a step",
    "attached": "plain, with plugin.attach: rows are placed inside the model",
    "padded": "as SFTTrainer is without any setting: padded batches",
    "attached-padded": "padded, with plugin.attach",
}
OTHER_DOCUMENTS = ("packing",)
COLUMNS: Columns = {
    "step ms": figure("step_seconds", 1e3, 1),
    "÷ first": figure("ratio_to_first", 1, 3),
    "tokens/s/GPU": TOKENS_PER_SECOND,
    "speed ÷ first": figure("speed_to_first", 1, 3),
    "tokens max/mean": figure("uneven", 1, 3),
    "host ms": figure("host", 1e3, 2),
    "peak GiB": peak_gib,
    "loss at first": lambda of: number(of["losses"][0], 1, 4),
    "at last": lambda of: number(of["losses"][-1], 1, 4),
    "furthest from first mode": lambda of: of["furthest"],
}


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
    lengths = read_lengths(options.lengths).tokens.clip(2, longest)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(options.seed)).numpy()
    chosen = np.resize(lengths[order], options.steps * batch_size * num_ranks)  # again and again until they are enough
    config = read_config(options, longest)
    documents = random_tokens(chosen.tolist(), config.vocab_size)
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
    train_mode = partial(train, config=config, documents=dataset, packs=packs, options=options)
    training.run_modes(options, facts, train_mode, step_figures, COLUMNS, OTHER_DOCUMENTS)


def sft_config(options: argparse.Namespace, mode: str, packs: int) -> SFTConfig:
    """Returns settings of a mode; a batch of `packing` has so many packs."""
    is_packing = mode == "packing"
    return SFTConfig(
        **training.common_arguments(options),
        per_device_train_batch_size=packs if is_packing else options.batch_size,
        max_length=options.longest if is_packing else None,
        packing=is_packing,
        padding_free=mode in ("plain", "attached"),
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )


def train(
    mode: str, config: PreTrainedConfig, documents: Dataset, packs: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains in one mode from the first weights, on documents with the column `input_ids`. A collective call.

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
    times = training.StepTimes(device)
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
    peak = training.train_and_watch(trainer, device)
    *seconds, peak_bytes = largest([*times.seconds, peak], device)
    least = [-seconds for seconds in largest([-seconds for seconds in host.seconds], device)]
    of_ranks = of_all_ranks(torch.tensor(host.tokens[: options.steps], device=device))
    return {
        "mode": mode,
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "seconds": seconds,
        "host_seconds": least,
        "tokens": [[*of_step] for of_step in zip(*of_ranks, strict=True)],
        "peak_bytes": int(peak_bytes),
    }


def step_figures(run: Mapping[str, Any], warmup: int) -> dict[str, float | None]:
    """Returns figures of the steps of a training after those of the warmup."""
    seconds, tokens = run["seconds"][warmup:], run["tokens"][warmup:]
    return {
        "step_seconds": statistics.median(seconds),
        "tokens_per_second": sum(map(sum, tokens)) / len(tokens[0]) / sum(seconds),
        "uneven": statistics.mean(max(of_ranks) * len(of_ranks) / sum(of_ranks) for of_ranks in tokens),
        "host": statistics.median(run["host_seconds"][warmup:]),
    }


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, MODES)
    training.add_training(parser, MODES, "plain,packing,attached", 1e-5)
    parser.set_defaults(preset="qwen3-0.6b")
    add, of_documents = parser.add_argument, "of documents: a shipped sample, or a file, as distca plan"
    add("--lengths", type=Path, default=Path("prolong"), help=of_documents)
    add("--longest", type=at_least_two, default=32_768, help="tokens that longer documents are cut at")
    add("--batch-size", type=count, default=8, help="documents of a rank and step")
    add("--seed", type=whole, default=0, help="of the order of documents")
    add("--attention", default="flash_attention_4", help="attn_implementation of plain and packing")
    options = training.parse_training(parser)
    if options.device == "cpu" and options.attention == "flash_attention_4":
        options.attention = "sdpa"
    return options


if __name__ == "__main__":
    main()
