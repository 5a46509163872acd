"""Options of `distca plan`, `check`, `profile` and `simulate`: each field is an option, with its help."""

from dataclasses import dataclass
from pathlib import Path

import typer

from distca_hf.analysis.profiles.cluster_profile import DEFAULT_FILE, DEFAULT_PROFILE, shipped_profiles


# Options of several commands.
MICRO_STEPS = typer.Option(1, help="micro-steps of an optimizer step (gradient accumulation)")
CHUNKS = typer.Option(
    None, help="with --pipeline: parts of the layers on each stage; from 2 on interleaved 1F1B, else 1F1B"
)
CHECKPOINTING = typer.Option(
    "saved",
    help="activation checkpointing, for estimates: saved (layers keep inputs and attention outputs), offloaded "
    "(the same, in host memory), recomputed (only inputs) or none (everything)",
)
MLP_TOKENS = typer.Option(0, help="most tokens on which MLPs run at a time (mlp_tokens); 0: all")
ATTENTION_KV_HEADS = typer.Option(
    0, help="most KV heads on which attention runs at a time (attention_kv_heads); 0: all"
)
OFFLOAD_PARAMS = typer.Option(
    False,
    "--offload-params",
    help="weights, gradients and AdamW's state are in host memory (fsdp_offload_params); estimated for FSDP2 only",
)
HOST_GIB = typer.Option(None, help="host memory of a node that may be pinned, in GiB; by default as much as is needed")
RANKS_PER_NODE = typer.Option(8, help="ranks that share a node")
LIGER = typer.Option(False, "--liger", help="estimate with Liger's kernels and loss")
JSON = typer.Option(False, "--json", help="print one JSON object")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `distca plan`."""

    lengths: Path = typer.Argument(
        ...,
        metavar="LENGTHS",
        help="document lengths, in the dataset's order: .jsonl, .csv, .tsv, .parquet or .arrow with a column "
        "length, lengths, num_tokens, token_count, n_tokens or input_ids; a flat list in .json; a number per "
        "line in .txt; .npy; a saved datasets folder; a folder of such files, or a pattern in quotes; or a "
        "shipped sample: pretrain, prolong. Columns group and prefix_tokens say which rows begin alike",
    )
    gpus: int = typer.Option(..., help="GPUs (ranks) that train together")
    tokens_per_rank: int | None = typer.Option(
        None, help="placed batches, which distca makes: most tokens per rank and micro-step"
    )
    batch_size: int | None = typer.Option(
        None, help="your own batches: rows per rank and micro-step (per_device_train_batch_size)"
    )
    context: int | None = typer.Option(
        None, help="with --batch-size: cut longer rows to this many tokens (max_length); by default none"
    )
    ranks_per_node: int = RANKS_PER_NODE
    micro_steps: int = MICRO_STEPS
    pipeline: int | None = typer.Option(
        None,
        "--pipeline",
        help="stages of a pipeline, with --gpus GPUs in each; --micro-steps is then the number of its "
        "micro-batches. Shows speed and memory with it, and of the same GPUs without it",
    )
    chunks: int | None = CHUNKS
    model: str | None = typer.Option(
        None,
        help="llama3-8b (the default) or another built-in name, a model type or class of Transformers (qwen3, "
        "Qwen3ForCausalLM: its default sizes), the path of a config.json or of its folder, or a name on the Hub",
    )
    layout: str = typer.Option(
        "placed",
        help="placed: distca chooses the rank of each token; fixed: documents fill the ranks in order, tokens "
        "stay there and attention moves, as for a model that needs whole documents",
    )
    overlong: str = typer.Option(
        "error", help="documents longer than all ranks together hold: error, split (into several) or truncate"
    )
    bytes_limit: int | None = typer.Option(
        None, help="most bytes a rank may send, and receive, per layer; a plan that needs more is an error"
    )
    checkpointing: str = CHECKPOINTING
    liger: bool = LIGER
    mlp_tokens: int = MLP_TOKENS
    attention_kv_heads: int = ATTENTION_KV_HEADS
    offload_params: bool = OFFLOAD_PARAMS
    host_gib: float | None = HOST_GIB
    cluster: str = typer.Option(
        DEFAULT_PROFILE, help="GPUs whose measured times speed follows from, as for distca simulate"
    )
    gpu_gib: float | None = typer.Option(None, help="memory of a GPU, in GiB; by default as in --cluster")
    seed: int = typer.Option(0, help="seed of the training: data_seed or seed of a Trainer, seed of plugin.dataloader")
    lengths_are_batch: bool = typer.Option(
        False,
        "--lengths-are-batch",
        help="plan exactly these documents, in order; several micro-steps get nearly equal tokens each",
    )
    compare: bool = typer.Option(False, "--compare", help="also simulate all other ways to train")
    as_json: bool = JSON


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `distca check`."""

    model: str = typer.Argument(
        ...,
        metavar="MODEL",
        help="a model type or class of Transformers (llama, Qwen3ForCausalLM: default sizes), a class that can be "
        "imported (package.module.Class), the path of a config.json or of its folder, llama3-8b or another "
        "built-in name, or a name on the Hub; no weights are read",
    )
    tokens_per_rank: int = typer.Option(16_384, help="tokens each GPU holds in a micro-step, at most")
    gpus: int = typer.Option(8, help="GPUs that share weights")
    gpu: str = typer.Option("h200", help="their kind: h200, h100, b200, a100, l40s, rtx4090, ..., or cpu")
    ranks_per_node: int = RANKS_PER_NODE
    checkpointing: str = CHECKPOINTING
    liger: bool = LIGER
    mlp_tokens: int = MLP_TOKENS
    attention_kv_heads: int = ATTENTION_KV_HEADS
    offload_params: bool = OFFLOAD_PARAMS
    host_gib: float | None = HOST_GIB
    micro_steps: int = MICRO_STEPS
    numerics: bool = typer.Option(
        False,
        "--numerics",
        help="print how far logits, loss and gradients of a tiny version on two ranks are from single documents",
    )
    trust_remote_code: bool = typer.Option(
        False, "--trust-remote-code", help="run the Python code that comes with the configuration"
    )
    as_json: bool = JSON


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of `distca profile`."""

    output: Path = typer.Option(DEFAULT_FILE, "--output", "-o", help="file to write")
    processes: int | None = typer.Option(None, help="processes to start; by default one for each GPU")
    model: str = typer.Option("llama3-8b", help="model whose heads and layer are measured")
    kernel: str = typer.Option("auto", help="attention kernel, as in settings")
    cpu: bool = typer.Option(False, "--cpu", help="tiny sizes over gloo, to see how it works")
    as_between_nodes: Path | None = typer.Option(
        None,
        metavar="PROFILE",
        help="measure only the network, and put it into this profile as that between nodes: for one node whose "
        "network is made slow (NCCL_P2P_DISABLE=1), or for a part of a cluster",
    )
    remarks: str = typer.Option("", help="a remark for the file, such as NCCL_P2P_DISABLE=1")
    dry_run: bool = typer.Option(False, "--dry-run", help="print the line that would be run, and end")
    as_json: bool = typer.Option(False, "--json", help="print the main figures as one JSON object")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options of `distca simulate`."""

    lengths: Path = typer.Argument(
        ..., metavar="LENGTHS", help="document lengths, as distca plan reads them; or a sample: pretrain, prolong"
    )
    gpus: str = typer.Option("8", help="numbers of GPUs, separated by commas")
    tokens_per_rank: int | None = typer.Option(None, help="most tokens per GPU and micro-step; 131,072 by default")
    batch_size: int | None = typer.Option(
        None, help="your own batches, unpacked: rows per GPU and micro-step (per_device_train_batch_size)"
    )
    context: int | None = typer.Option(
        None,
        help="split longer documents, or cut off longer rows of --batch-size (max_length), at this many tokens; "
        "by default none",
    )
    model: str | None = typer.Option(None, help="model, as distca plan takes it; llama3-8b by default")
    cluster: str = typer.Option(
        DEFAULT_PROFILE,
        help=f"a shipped profile of a GPU ({', '.join(shipped_profiles())}), or a file of distca profile",
    )
    micro_steps: str = typer.Option("1", help="micro-steps of an optimizer step, separated by commas")
    ranks_per_node: int = typer.Option(8, help="GPUs that share a node; 1: all transfers are between nodes")
    tensor: int = typer.Option(1, help="GPUs of a node that divide every layer (tensor parallelism)")
    pipeline: int | None = typer.Option(
        None, help="also simulate a pipeline of this many stages on the same GPUs; by default none"
    )
    chunks: int | None = CHUNKS
    checkpointing: str = typer.Option(
        "saved",
        help="activation checkpointing: saved (distca keeps attention outputs, other ways recompute them), "
        "offloaded (the same, in host memory, as fast), recomputed (all ways recompute them) or none",
    )
    liger: bool = typer.Option(False, "--liger", help="with Liger's kernels and loss")
    sync_each_batch: bool = typer.Option(
        False, "--sync-each-batch", help="sum gradients in each micro-step; by default, as Trainer, in the last"
    )
    gpu_gib: float | None = typer.Option(None, help="memory of a GPU, in GiB; by default the profile's")
    batches: int = typer.Option(20, help="optimizer steps to simulate")
    token_budget: float = typer.Option(1e9, help="tokens that GPU-hours are counted for")
    seed: int = typer.Option(0, help="seed of the order of documents")
    as_json: bool = JSON
