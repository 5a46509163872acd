"""Plan command: `distca plan`, with its options."""

from pathlib import Path
from typing import Annotated

import typer

from distca_hf.analysis.profiles.shipped import DEFAULT_PROFILE
from distca_hf.errors import ConfigError


PLAN_EPILOG = "Example: distca plan pretrain --gpus 8 --tokens-per-rank 16384 --compare"

# Options of `distca plan` whose help takes several lines.
DocumentLengths = Annotated[
    Path,
    typer.Argument(
        metavar="LENGTHS",
        help="document lengths, in the dataset's order: .jsonl, .csv, .tsv, .parquet or .arrow with a column length, "
        "lengths, num_tokens, token_count, n_tokens or input_ids; a flat list in .json; a number per line in .txt; "
        ".npy; a saved datasets folder; a folder of such files, or a pattern in quotes; or a shipped sample: "
        "pretrain, prolong",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        help="llama3-8b (the default) or another built-in name, a model type or class of Transformers (qwen3, "
        "Qwen3ForCausalLM: its default sizes), the path of a config.json or of its folder, or a name on the Hub"
    ),
]
LayoutKind = Annotated[
    str,
    typer.Option(
        help="placed: distca chooses the rank of each token; fixed: documents fill the ranks in order, tokens stay "
        "there and attention tasks move, as for hybrids"
    ),
]
OverlongRule = Annotated[
    str, typer.Option(help="documents longer than all ranks together hold: error, split (into several) or truncate")
]
BytesLimit = Annotated[
    int | None,
    typer.Option(help="most bytes a rank may send, and receive, per layer; an error if no plan needs so few"),
]
Checkpointing = Annotated[
    str,
    typer.Option(
        help="activation checkpointing, for estimates: saved (layers keep inputs and attention outputs), recomputed "
        "(only inputs) or none (everything)"
    ),
]
Seed = Annotated[
    int, typer.Option(help="seed of the training: data_seed or seed of a Trainer, seed of plugin.dataloader")
]
Stages = Annotated[
    int | None,
    typer.Option(
        "--pipeline",
        help="stages of a pipeline, with --gpus GPUs in each; --micro-steps is then the number of its micro-batches. "
        "Shows speed and memory with it, and of the same GPUs without it",
    ),
]
Chunks = Annotated[
    int | None,
    typer.Option(help="with --pipeline: parts of the layers on each stage; from 2 on interleaved 1F1B, else 1F1B"),
]
LengthsAreBatch = Annotated[
    bool,
    typer.Option(
        "--lengths-are-batch",
        help="plan exactly these documents, in order; several micro-steps get nearly equal tokens each",
    ),
]


def plan(
    lengths: DocumentLengths,
    gpus: Annotated[int, typer.Option(help="GPUs (ranks) that train together")],
    tokens_per_rank: Annotated[
        int | None, typer.Option(help="placed batches, which distca makes: most tokens per rank and micro-step")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="your own batches: rows per rank and micro-step (per_device_train_batch_size)"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="with --batch-size: cut longer rows to this many tokens (max_length); by default none"),
    ] = None,
    ranks_per_node: Annotated[int, typer.Option(help="ranks that share a node")] = 8,
    micro_steps: Annotated[int, typer.Option(help="micro-steps of an optimizer step (gradient accumulation)")] = 1,
    pipeline: Stages = None,
    chunks: Chunks = None,
    model: ModelName = None,
    layout: LayoutKind = "placed",
    overlong: OverlongRule = "error",
    bytes_limit: BytesLimit = None,
    checkpointing: Checkpointing = "saved",
    liger: Annotated[bool, typer.Option("--liger", help="estimate with Liger's kernels and loss")] = False,
    cluster: Annotated[
        str, typer.Option(help="GPUs whose measured times speed follows from, as for distca simulate")
    ] = DEFAULT_PROFILE,
    gpu_gib: Annotated[
        float | None, typer.Option(help="memory of a GPU, in GiB; by default that of --cluster")
    ] = None,
    seed: Seed = 0,
    lengths_are_batch: LengthsAreBatch = False,
    compare: Annotated[bool, typer.Option("--compare", help="also simulate all other ways to train")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the work of all ranks into this file")] = None,
) -> None:
    """Estimates a training on documents of these lengths: balance of an epoch, speed and memory.

    Give --tokens-per-rank for placed batches, which distca makes, or --batch-size for your own, whose rows are placed
    inside the model.

    With --tokens-per-rank documents are shuffled and packed as training does it: an epoch has as few micro-batches as
    hold all documents, of nearly equal tokens. The first optimizer step is planned in full, with its bytes. Speed and
    memory are estimated for other numbers of tokens per rank, too.

    Speed and memory are estimates; no GPU is needed. Bytes are those of one layer's forward pass.

    With and without a pipeline: distca plan pretrain --gpus 8 --tokens-per-rank 65536 --pipeline 4 --micro-steps 8
    """
    from distca_hf.analysis.command import run_plan
    from distca_hf.analysis.given import run_given

    if batch_size is not None:
        of_placed = {
            "--tokens-per-rank": tokens_per_rank,
            "--layout": layout != "placed",
            "--overlong": overlong != "error",
            "--bytes-limit": bytes_limit is not None,
            "--lengths-are-batch": lengths_are_batch,
            "--compare": compare,
            "--plot": plot,
            "--pipeline": pipeline,
            "--chunks": chunks,
        }
        run_given(
            lengths,
            ranks=gpus,
            batch_size=batch_size,
            context=context,
            ranks_per_node=ranks_per_node,
            micro_steps=micro_steps,
            model=model,
            checkpointing=checkpointing,
            liger=liger,
            cluster=cluster,
            gpu_gib=gpu_gib,
            seed=seed,
            as_json=as_json,
            without_effect=[option for option, value in of_placed.items() if value],
        )
        return
    if tokens_per_rank is None:
        raise ConfigError(
            "neither --tokens-per-rank nor --batch-size is given: give the first for placed batches, the second for "
            "your own"
        )
    if context is not None:
        raise ConfigError(
            f"--context {context} cuts rows of --batch-size, which is not given. With --tokens-per-rank use "
            "--overlong truncate or split"
        )
    run_plan(
        lengths,
        ranks=gpus,
        tokens_per_rank=tokens_per_rank,
        ranks_per_node=ranks_per_node,
        micro_steps=micro_steps,
        model=model,
        layout=layout,
        overlong=overlong,
        bytes_limit=bytes_limit,
        checkpointing=checkpointing,
        liger=liger,
        cluster=cluster,
        gpu_gib=gpu_gib,
        seed=seed,
        lengths_are_batch=lengths_are_batch,
        compare=compare,
        as_json=as_json,
        plot=plot,
        pipeline=pipeline,
        chunks=chunks,
    )
