"""Trains an 8B-shaped Llama of a few layers on batches that each hold one very long document, and times every step.

    torchrun --nproc-per-node 4 scripts/benchmarks/training_run.py --mode distca  --out distca.json
    torchrun --nproc-per-node 4 scripts/benchmarks/training_run.py --mode moving  --out moving.json
    torchrun --nproc-per-node 4 scripts/benchmarks/training_run.py --mode packing --out packing.json
    python scripts/benchmarks/training_run.py --compare packing.json distca.json

`distca` is an unmodified Trainer with `plugin.attach`. `packing` trains the same batches the usual way: documents stay
whole, each goes to the rank with the least attention work so far, and flash-attention attends to them there. `moving`
takes the batches of `packing`, and attention tasks move between ranks. All use FSDP2, bf16 and activation
checkpointing, and begin from the same weights, so their losses must follow each other.
"""

import argparse
import functools
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import distca_hf
from distca_hf.analysis.baselines import assign_whole_documents
from distca_hf.data.documents import Tokens
from distca_hf.integrations.models.forward_watch import watch_of
from lib.model import PRESETS


VOCABULARY = 32_000
SHORT_TOKENS = (512, 1024, 2048, 4096, 8192)
WARM_UP_STEPS = 3


def documents(micro_batches: int, long_tokens: int, capacity_tokens: int) -> Dataset:
    """Returns one long document per micro-batch and short ones to fill it; tokens follow a rule that can be learnt."""
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    lengths = []
    for _ in range(micro_batches):
        lengths.append(long_tokens)
        left = capacity_tokens - long_tokens
        while left:
            lengths.append(min(left, rng.choice(SHORT_TOKENS)))
            left -= lengths[-1]
    rows = []
    for length in lengths:
        noise = torch.randint(0, 8, (length,), generator=generator)
        start = torch.randint(0, VOCABULARY, (1,), generator=generator)
        rows.append(((start + 7 * torch.arange(length) + noise) % VOCABULARY).to(torch.int32).numpy())
    return Dataset.from_dict({"input_ids": rows})


class WholeDocuments:
    """The placed loader's micro-batches with every document whole on one rank, heaviest first to the least loaded."""

    batch_size = 1

    def __init__(self, loader: distca_hf.PlacedLoader, device: torch.device) -> None:
        self.loader, self.device, self.dataset = loader, device, loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for micro_batch in range(len(self.loader)):
            documents = self.loader.documents(0, micro_batch)
            lengths = np.array([len(document.input_ids) for document in documents])
            mine = assign_whole_documents(lengths, dist.get_world_size())[dist.get_rank()]
            yield self._batch([documents[number] for number in mine])

    def _batch(self, documents: Sequence[Tokens]) -> dict[str, Any]:
        """Returns a batch of whole documents, as flash-attention takes them."""
        lengths = [len(document.input_ids) for document in documents]
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)
        columns = {
            "input_ids": [document.input_ids for document in documents],
            "position_ids": [np.arange(length) for length in lengths],
            "labels": [document.labels for document in documents],
            "shift_labels": [document.shift_labels for document in documents],
        }
        return {
            **{name: torch.from_numpy(np.concatenate(rows))[None].to(self.device) for name, rows in columns.items()},
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }


class StepTimes(TrainerCallback):
    """Seconds of every step, device included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **kwargs: object) -> None:
        torch.cuda.synchronize()
        self._began = time.perf_counter()

    def on_step_end(self, *_: object, **kwargs: object) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._began)


def training_arguments(steps: int) -> TrainingArguments:
    """Returns arguments of all modes: FSDP2, bf16, activation checkpointing."""
    return TrainingArguments(
        output_dir="bench_output",
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "reshard_after_forward": True,
        },
    )


def build_model(layers: int, attention: str, device: torch.device) -> PreTrainedModel:
    """Returns an 8B-shaped Llama of so many layers with a small vocabulary; all ranks have the same weights."""
    torch.manual_seed(0)
    changes = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "max_position_embeddings": 1 << 20}
    config = AutoConfig.for_model(**PRESETS["llama3-8b"] | changes, use_cache=False)
    with device:
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def record_losses(model: PreTrainedModel) -> list[torch.Tensor]:
    """Returns a list that will hold this rank's part of the mean over all labels, of every step.

    FSDP hands the loss out in bf16, in steps of 1/16 at a loss of 11: too coarse to compare. Where it is made it is
    fp32.
    """
    loss_function = model.loss_function
    parts: list[torch.Tensor] = []

    @functools.wraps(loss_function)
    def recording(*inputs: Any, **keywords: Any) -> torch.Tensor:
        loss: torch.Tensor = loss_function(*inputs, **keywords)
        parts.append(loss.detach().clone())  # Trainer scales it in place
        return loss

    model.loss_function = recording
    return parts


def train(options: argparse.Namespace) -> None:
    """Trains in one mode, and writes figures on rank 0."""
    args = training_arguments(options.steps)
    attention = options.packing_attention if options.mode == "packing" else "distca"
    model = build_model(options.layers, attention, args.device)
    parts = record_losses(model)
    plugin = distca_hf.DistCAPlugin(
        tokens_per_rank=options.tokens_per_rank, checkpointed_attention=options.checkpointed_attention
    )
    dataset = documents(options.steps, options.long_tokens, plugin.tokens_per_rank * dist.get_world_size())
    times = StepTimes()
    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[times])
    loader = choose_batches(options.mode, trainer, plugin, dataset)
    torch.cuda.reset_peak_memory_stats()
    trainer.train()

    peak = torch.tensor(torch.cuda.max_memory_allocated(), device=args.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    losses = torch.stack(parts)
    dist.all_reduce(losses)
    if dist.get_rank() == 0:
        figures = {
            "mode": options.mode,
            "world": dist.get_world_size(),
            "distributed_type": trainer.accelerator.distributed_type.name,
            "tokens_per_rank": options.tokens_per_rank,
            "long_tokens": options.long_tokens,
            "layers": options.layers,
            "torch": torch.__version__,
            "losses": losses.tolist(),
            "seconds": times.seconds,
            "peak_bytes": int(peak),
            **figures_of_plans(trainer, loader),
        }
        Path(options.out).write_text(json.dumps(figures))
        print(summary(figures))
    dist.barrier()
    dist.destroy_process_group()


def choose_batches(
    mode: str, trainer: Trainer, plugin: distca_hf.DistCAPlugin, dataset: Dataset
) -> distca_hf.PlacedLoader:
    """Gives the trainer the batches of a mode; returns the loader that packs them."""
    if mode == "distca":
        plugin.attach(trainer)
        return trainer.get_train_dataloader()
    loader = plugin.dataloader(dataset, trainer.args.seed)
    whole = WholeDocuments(loader, trainer.args.device)
    trainer.get_train_dataloader = lambda: whole
    if mode == "moving":
        distca_hf.enable(trainer.model, plugin, max(map(len, dataset["input_ids"])))
    return loader


def figures_of_plans(trainer: Trainer, loader: distca_hf.PlacedLoader) -> dict[str, Any]:
    """Returns balance and times of all plans: of the loader, or of the enabled model if that makes them."""
    watch = watch_of(trainer.model)
    packs = None if watch is None else watch.packs
    facts = list(loader.history if packs is None else packs.history)
    times = loader.times if packs is None else packs.times
    return {
        "wait_share": loader.times.wait_share,
        "plan_ms": 1e3 * times.plan_seconds / max(1, times.micro_batches),
        "imbalance_before": [fact.imbalance_before for fact in facts],
        "imbalance": [fact.imbalance for fact in facts],
    }


def summary(figures: dict[str, Any]) -> str:
    """Returns one line about a run."""
    step = statistics.median(figures["seconds"][WARM_UP_STEPS:])
    tokens = figures["tokens_per_rank"] / step
    line = (
        f"{figures['mode']:8} {figures['world']} GPUs, median step {1e3 * step:.0f} ms, {tokens:.0f} tokens/s/GPU, "
        f"peak {figures['peak_bytes'] / 2**30:.1f} GiB, loss {figures['losses'][0]:.4f} to {figures['losses'][-1]:.4f}"
    )
    if figures["imbalance"]:
        before, placed = (statistics.mean(figures[name]) for name in ("imbalance_before", "imbalance"))
        line += f", imbalance {before:.3f} to {placed:.4f}, plan {figures['plan_ms']:.1f} ms"
        line += f", waits {100 * figures['wait_share']:.2f} %"
    return line


def compare(packing: dict[str, Any], distca: dict[str, Any]) -> str:
    """Returns the ratio of step times and the largest difference of losses."""
    difference = max(abs(a - b) for a, b in zip(packing["losses"], distca["losses"], strict=False))
    steps = [statistics.median(run["seconds"][WARM_UP_STEPS:]) for run in (packing, distca)]
    return (
        f"packing / distca step time: {steps[0] / steps[1]:.3f}; largest loss difference over "
        f"{min(len(packing['losses']), len(distca['losses']))} steps: {difference:.2e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mode",
        choices=["distca", "moving", "packing"],
        default="distca",
        help="distca, or one of the ways to compare it with (see above)",
    )
    parser.add_argument("--steps", type=int, default=20, help="to train")
    parser.add_argument(
        "--tokens-per-rank", type=int, default=65_536, help="most tokens of a micro-batch on each rank"
    )
    # Just over half of four ranks' tokens: every batch holds exactly one.
    parser.add_argument("--long-tokens", type=int, default=131_200, help="tokens of the long document of every batch")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers")
    parser.add_argument("--packing-attention", default="flash_attention_4", help="attn_implementation of packing")
    parser.add_argument(
        "--checkpointed-attention", choices=["save", "recompute"], default="save", help="setting of this name"
    )
    parser.add_argument("--out", default="training_run.json", help="file to write times and losses to")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("PACKING", "DISTCA"),
        help="files of two runs: prints their ratio, and trains nothing",
    )
    options = parser.parse_args()
    if options.compare:
        runs = [json.loads(Path(path).read_text()) for path in options.compare]
        print("\n".join([*map(summary, runs), compare(*runs)]))
    else:
        train(options)


if __name__ == "__main__":
    main()
