"""Options of `distca plan`, `check`, `profile` and `simulate`: each field is an option, with its help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distca_hf.analysis.profiles.cluster_profile import DEFAULT_FILE, DEFAULT_PROFILE, shipped_profiles


# Options of several commands.
_MicroSteps = Annotated[int, typer.Option(help="micro-steps of an optimizer step (gradient accumulation)")]
_Chunks = Annotated[
    int | None,
    typer.Option(help="with --pipeline: parts of the layers on each stage; from 2 on interleaved 1F1B, else 1F1B"),
]
_Checkpointing = Annotated[
    str,
    typer.Option(
        help="activation checkpointing, for estimates: saved (layers keep inputs and attention outputs), offloaded "
        "(the same, in host memory), recomputed (only inputs) or none (everything)"
    ),
]
_MlpTokens = Annotated[int, typer.Option(help="most tokens on which MLPs run at a time (mlp_tokens); 0: all")]
_AttentionKvHeads = Annotated[
    int, typer.Option(help="most KV heads on which attention runs at a time (attention_kv_heads); 0: all")
]
_OffloadParams = Annotated[
    bool,
    typer.Option(
        "--offload-params",
        help="weights, gradients and AdamW's state are in host memory (fsdp_offload_params); estimated for FSDP2 only",
    ),
]
_HostGib = Annotated[
    float | None,
    typer.Option(help="host memory of a node that may be pinned, in GiB; by default as much as is needed"),
]
_RanksPerNode = Annotated[int, typer.Option(help="ranks that share a node")]
_Liger = Annotated[bool, typer.Option("--liger", help="estimate with Liger's kernels and loss")]
_Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `distca plan`."""

    lengths: Annotated[
        Path,
        typer.Argument(
            metavar="LENGTHS",
            help="document lengths, in the dataset's order: .jsonl, .csv, .tsv, .parquet or .arrow with a column "
            "length, lengths, num_tokens, token_count, n_tokens or input_ids; a flat list in .json; a number per "
            "line in .txt; .npy; a saved datasets folder; a folder of such files, or a pattern in quotes; or a "
            "shipped sample: pretrain, prolong. Columns group and prefix_tokens say which rows begin alike",
        ),
    ]
    gpus: Annotated[int, typer.Option(help="GPUs (ranks) that train together")]
    tokens_per_rank: Annotated[
        int | None, typer.Option(help="placed batches, which distca makes: most tokens per rank and micro-step")
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(help="your own batches: rows per rank and micro-step (per_device_train_batch_size)")
    ] = None
    context: Annotated[
        int | None,
        typer.Option(help="with --batch-size: cut longer rows to this many tokens (max_length); by default none"),
    ] = None
    ranks_per_node: _RanksPerNode = 8
    micro_steps: _MicroSteps = 1
    pipeline: Annotated[
        int | None,
        typer.Option(
            "--pipeline",
            help="stages of a pipeline, with --gpus GPUs in each; --micro-steps is then the number of its "
            "micro-batches. Shows speed and memory with it, and of the same GPUs without it",
        ),
    ] = None
    chunks: _Chunks = None
    model: Annotated[
        str | None,
        typer.Option(
            help="llama3-8b (the default) or another built-in name, a model type or class of Transformers (qwen3, "
            "Qwen3ForCausalLM: its default sizes), the path of a config.json or of its folder, or a name on the Hub"
        ),
    ] = None
    layout: Annotated[
        str,
        typer.Option(
            help="placed: distca chooses the rank of each token; fixed: documents fill the ranks in order, tokens "
            "stay there and attention moves, as for a model that needs whole documents"
        ),
    ] = "placed"
    overlong: Annotated[
        str,
        typer.Option(help="documents longer than all ranks together hold: error, split (into several) or truncate"),
    ] = "error"
    bytes_limit: Annotated[
        int | None,
        typer.Option(help="most bytes a rank may send, and receive, per layer; an error if no plan needs so few"),
    ] = None
    checkpointing: _Checkpointing = "saved"
    liger: _Liger = False
    mlp_tokens: _MlpTokens = 0
    attention_kv_heads: _AttentionKvHeads = 0
    offload_params: _OffloadParams = False
    host_gib: _HostGib = None
    cluster: Annotated[
        str, typer.Option(help="GPUs whose measured times speed follows from, as for distca simulate")
    ] = DEFAULT_PROFILE
    gpu_gib: Annotated[float | None, typer.Option(help="memory of a GPU, in GiB; by default that of --cluster")] = None
    seed: Annotated[
        int, typer.Option(help="seed of the training: data_seed or seed of a Trainer, seed of plugin.dataloader")
    ] = 0
    lengths_are_batch: Annotated[
        bool,
        typer.Option(
            "--lengths-are-batch",
            help="plan exactly these documents, in order; several micro-steps get nearly equal tokens each",
        ),
    ] = False
    compare: Annotated[bool, typer.Option("--compare", help="also simulate all other ways to train")] = False
    as_json: _Json = False


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `distca check`."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="a model type or class of Transformers (llama, Qwen3ForCausalLM: default sizes), a class that can be "
            "imported (package.module.Class), the path of a config.json or of its folder, llama3-8b or another "
            "built-in name, or a name on the Hub; no weights are read",
        ),
    ]
    tokens_per_rank: Annotated[int, typer.Option(help="tokens each GPU holds in a micro-step, at most")] = 16_384
    gpus: Annotated[int, typer.Option(help="GPUs that share weights")] = 8
    gpu: Annotated[str, typer.Option(help="their kind: h200, h100, b200, a100, l40s, rtx4090, ..., or cpu")] = "h200"
    ranks_per_node: _RanksPerNode = 8
    checkpointing: _Checkpointing = "saved"
    liger: _Liger = False
    mlp_tokens: _MlpTokens = 0
    attention_kv_heads: _AttentionKvHeads = 0
    offload_params: _OffloadParams = False
    host_gib: _HostGib = None
    micro_steps: _MicroSteps = 1
    numerics: Annotated[
        bool,
        typer.Option(
            "--numerics",
            help="print how far logits, loss and gradients of a tiny version on two ranks are from single documents",
        ),
    ] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run the Python code that comes with the configuration")
    ] = False
    as_json: _Json = False


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of `distca profile`."""

    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = DEFAULT_FILE
    processes: Annotated[int | None, typer.Option(help="processes to start; by default one for each GPU")] = None
    model: Annotated[str, typer.Option(help="model whose heads and layer are measured")] = "llama3-8b"
    kernel: Annotated[str, typer.Option(help="attention kernel, as in settings")] = "auto"
    cpu: Annotated[bool, typer.Option("--cpu", help="tiny sizes over gloo, to see how it works")] = False
    as_between_nodes: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE",
            help="measure only the network, and put it into this profile as that between nodes: for one node whose "
            "network is made slow (NCCL_P2P_DISABLE=1), or for a part of a cluster",
        ),
    ] = None
    remarks: Annotated[str, typer.Option(help="a remark for the file, such as NCCL_P2P_DISABLE=1")] = ""
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the line that would be run, and end")] = False
    as_json: Annotated[bool, typer.Option("--json", help="print the main figures as one JSON object")] = False


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options of `distca simulate`."""

    lengths: Annotated[
        Path,
        typer.Argument(
            metavar="LENGTHS", help="document lengths, as distca plan reads them; or a sample: pretrain, prolong"
        ),
    ]
    gpus: Annotated[str, typer.Option(help="numbers of GPUs, separated by commas")] = "8"
    tokens_per_rank: Annotated[
        int | None, typer.Option(help="most tokens per GPU and micro-step; 131,072 by default")
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(help="your own batches, unpacked: rows per GPU and micro-step (per_device_train_batch_size)"),
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            help="split longer documents, or cut off longer rows of --batch-size (max_length), at this many tokens; "
            "by default none"
        ),
    ] = None
    model: Annotated[str | None, typer.Option(help="model, as distca plan takes it; llama3-8b by default")] = None
    cluster: Annotated[
        str,
        typer.Option(
            help=f"a shipped profile of a GPU ({', '.join(shipped_profiles())}), or a file of distca profile"
        ),
    ] = DEFAULT_PROFILE
    micro_steps: Annotated[str, typer.Option(help="micro-steps of an optimizer step, separated by commas")] = "1"
    ranks_per_node: Annotated[int, typer.Option(help="GPUs that share a node; 1: all transfers are between nodes")] = 8
    tensor: Annotated[int, typer.Option(help="GPUs of a node that divide every layer (tensor parallelism)")] = 1
    pipeline: Annotated[
        int | None, typer.Option(help="also simulate a pipeline of this many stages on the same GPUs; by default none")
    ] = None
    chunks: _Chunks = None
    checkpointing: Annotated[
        str,
        typer.Option(
            help="activation checkpointing: saved (distca keeps attention outputs, other ways recompute them), "
            "offloaded (the same, in host memory, as fast), recomputed (all ways recompute them) or none"
        ),
    ] = "saved"
    liger: Annotated[bool, typer.Option("--liger", help="with Liger's kernels and loss")] = False
    sync_each_batch: Annotated[
        bool,
        typer.Option(
            "--sync-each-batch", help="sum gradients in each micro-step; by default, as Trainer, in the last"
        ),
    ] = False
    gpu_gib: Annotated[float | None, typer.Option(help="memory of a GPU, in GiB; by default the profile's")] = None
    batches: Annotated[int, typer.Option(help="optimizer steps to simulate")] = 20
    token_budget: Annotated[float, typer.Option(help="tokens that GPU-hours are counted for")] = 1e9
    seed: Annotated[int, typer.Option(help="seed of the order of documents")] = 0
    as_json: _Json = False
