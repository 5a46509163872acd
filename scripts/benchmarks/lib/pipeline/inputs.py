"""Options, ranks, model and documents of a pipeline's step: a checkpoint with random weights, and the first step of an
epoch."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

from distca_hf import Pipeline
from distca_hf.analysis.epoch import pack_epoch
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.models import preset
from distca_hf.analysis.request import PlanRequest
from lib.model import read_config
from lib.options import add_model
from lib.parser import add_device, add_tokens_per_rank, count, counts, lengths_file, micro_steps, whole, words


# Steps of the epoch that documents are drawn for.
SAMPLE_STEPS = 16


def add_pipeline(parser: argparse.ArgumentParser, folder: str) -> None:
    """Adds options of the model, its stages and its documents.

    Args:
        folder: where the model is meanwhile, by default.
    """
    add_model(parser)
    parser.add_argument("--vocabulary", type=words, default=8192, help="tokens of the vocabulary")
    parser.add_argument("--stages", type=count, default=2, help="stages; the other dimension is data ranks")
    parser.add_argument(
        "--chunks", type=counts, default="1,2", help="chunks of each stage: 1 is 1F1B, more are interleaved"
    )
    parser.add_argument(
        "--lengths", type=lengths_file, default="pretrain", help="a shipped sample of lengths, or a file"
    )
    parser.add_argument("--seed", type=whole, default=0, help="of the sample of documents, and of their order")
    add_tokens_per_rank(parser, 32_768)
    parser.add_argument("--micro-batches", type=micro_steps, default=8, help="of a step")
    add_device(parser)
    parser.add_argument("--folder", type=Path, default=Path(folder), help="of the model meanwhile; all ranks see it")


@dataclass(frozen=True)
class StepSetup:
    """The ranks, the model and the documents of a pipeline's step.

    Attributes:
        mesh: stages x data ranks.
        config: of the model.
        pipelines: to run, one for each number of chunks.
        documents: of the step.
    """

    mesh: DeviceMesh
    config: Any
    pipelines: Sequence[Pipeline]
    documents: Dataset

    @classmethod
    def open(cls, options: argparse.Namespace, device: torch.device) -> Self:
        """Checks options and draws documents. A collective call.

        Raises:
            ConfigError: a schedule cannot run.
            SystemExit: the folder is there already, or the stages do not divide the ranks.
        """
        check_folder(options.folder, device)
        mesh = open_mesh(options, device)
        data_ranks = mesh["data"].size()
        config = read_config(options, data_ranks * options.tokens_per_rank)
        config.vocab_size = options.vocabulary
        return cls(mesh, config, check_pipelines(options, config), first_step(options, data_ranks))


def open_mesh(options: argparse.Namespace, device: torch.device) -> DeviceMesh:
    """Returns the ranks of this job as stages x data ranks.

    Raises:
        SystemExit: the stages do not divide them.
    """
    data_ranks, rest = divmod(dist.get_world_size(), options.stages)
    if rest:
        raise SystemExit(f"{options.stages} stages do not divide {dist.get_world_size()} ranks")
    return init_device_mesh(device.type, (options.stages, data_ranks), mesh_dim_names=("stage", "data"))


def check_pipelines(options: argparse.Namespace, config: Any) -> list[Pipeline]:
    """Returns the pipelines to run, one for each number of chunks.

    Raises:
        ConfigError: a schedule cannot run them.
    """
    pipelines = [Pipeline(options.stages, chunks) for chunks in options.chunks]
    for pipeline in pipelines:
        pipeline.check(options.micro_batches, config.num_hidden_layers)
    return pipelines


def check_folder(folder: Path, device: torch.device) -> None:
    """Exits on all ranks if the folder is there. Rank 0 looks before it writes: a rank that starts late would see what
    has just been written."""
    is_there = torch.tensor(int(dist.get_rank() == 0 and folder.exists()), device=device)
    dist.broadcast(is_there, 0)
    if is_there:
        raise SystemExit(f"{folder} is there already, and would be replaced and removed: give another --folder")


def first_step(options: argparse.Namespace, data_ranks: int) -> Dataset:
    """Returns documents with random tokens: those of the first step of an epoch, in the order of packing. The epoch
    is one of a few steps, because one of all documents would take long to pack in so small micro-batches."""
    request = PlanRequest(
        *(data_ranks, options.tokens_per_rank, data_ranks, options.micro_batches, preset("llama3-8b")),
        overlong="split",
        pipeline=Pipeline(options.stages),
    )
    random = np.random.RandomState(options.seed)
    sample = random.permutation(read_lengths(options.lengths).tokens)
    enough = SAMPLE_STEPS * options.micro_batches * request.capacity_tokens
    packed = pack_epoch(sample[: np.searchsorted(np.cumsum(sample), enough) + 1], request, options.seed)
    lengths = np.concatenate(packed.first_step(options.micro_batches).micro_batches).tolist()
    ids = [random.randint(0, options.vocabulary, tokens, dtype=np.int32) for tokens in lengths]
    return Dataset.from_dict({"input_ids": ids})


def write_model(folder: Path, config: Any, device: torch.device) -> None:
    """Writes a checkpoint with random weights."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    if device.type == "cuda":
        torch.cuda.empty_cache()
