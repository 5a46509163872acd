"""Stages of a pipeline that trains: a Llama over all ranks with torch's schedules, and the times of its parts.

Built as `examples/pipeline.py` is: weights in fp32, layers in bf16 on GPUs, activation checkpointing with saved
attention. Data ranks of a stage average gradients by DDP. There is no optimizer.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B
from transformers import AutoModelForCausalLM

import distca_hf
from distca_hf import Pipeline
from distca_hf.analysis.epoch import pack_epoch
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.models import preset
from distca_hf.analysis.request import PlanRequest
from distca_hf.arrays import IntArray
from distca_hf.pipelines.schedules import Seconds
from distca_hf.pipelines.stages import DividedModel, ModelPart, StepInputs, StepLoss, check_schedule, parts_of_stage
from lib.model import read_config
from lib.options import add_model
from lib.parser import add_device, add_tokens_per_rank, count, counts, lengths_file, micro_steps, whole, words
from lib.wires import free_memory, largest, synchronize


HOPS = 10
SAMPLE_STEPS = 16  # of the epoch that documents are drawn for


class Stages:
    """The parts of this rank's stage from a model's checkpoint, and the schedule that runs them with the other stages
    of a mesh of stages x data ranks. The plugin has the mesh, too."""

    def __init__(
        self,
        checkpoint: Path,
        plugin: distca_hf.DistCAPlugin,
        pipeline: Pipeline,
        mesh: DeviceMesh,
        device: torch.device,
        micro_batches: int,
    ) -> None:
        self.plugin, self.data_ranks = plugin, mesh["data"].size()
        model = DividedModel(checkpoint, pipeline)
        self.outline = model.outline
        self._mesh, self._device, self._pipeline = mesh, device, pipeline
        self._stages = mesh.get_group("stage")
        kind: Any = ScheduleInterleaved1F1B if pipeline.chunks > 1 else Schedule1F1B
        half = torch.bfloat16 if device.type == "cuda" else None
        numbers = parts_of_stage(kind, pipeline, mesh.get_local_rank("stage"))
        self._parts = [model.load(number, plugin, autocast_dtype=half).train() for number in numbers]
        for part in self._parts:
            part.model.gradient_checkpointing_enable({"use_reentrant": False})
        data = mesh.get_group("data")
        averaged = partial(nn.parallel.DistributedDataParallel, process_group=data) if self.data_ranks > 1 else None
        wrapped: list[nn.Module] = [averaged(part) if averaged else part for part in self._parts]
        check_schedule(kind, pipeline, micro_batches, wrapped)
        stages = [
            PipelineStage(module, part.number, pipeline.num_parts, device, **part.examples(), group=self._stages)
            for part, module in zip(self._parts, wrapped, strict=True)
        ]
        self._loss = StepLoss(self._parts[-1])
        given = stages if pipeline.chunks > 1 else stages[0]
        self._schedule = kind(given, micro_batches, loss_fn=self._loss, scale_grads=False)

    def step(self, step: StepInputs) -> tuple[float, float]:
        """Runs forward and backward of a step; returns seconds until the slowest rank is done, and the loss."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)
        gc.collect()  # or a rank may do so in the midst of a step
        losses: list[torch.Tensor] = []
        dist.barrier()
        synchronize(self._device)
        began = time.perf_counter()
        self._loss.begin(step)
        arguments = {"target": step.target(self._parts), "losses": losses, "return_outputs": False}
        self._schedule.step(*step.arguments(self._parts), **step.keywords, **arguments)
        synchronize(self._device)
        [seconds] = largest([time.perf_counter() - began], self._device)
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        loss = sum((one.detach().double() for one in losses), nothing)  # on the last stage
        dist.all_reduce(loss)
        return seconds, float(loss) / self.data_ranks

    def part_seconds(self, step: StepInputs, micro_batches: Sequence[int], rounds: int) -> Seconds:
        """Times the parts without a pipeline, one after the other, on some micro-batches of a step.

        Returns:
            `[2, parts, micro_batches]` seconds forward (the last part's with the loss), and backward: medians of the
            rounds, of the slowest data rank. Gradients are added to the ones of earlier micro-batches, as in a step.
        """
        shape = (2, self._pipeline.num_parts, len(micro_batches), rounds)
        seconds = torch.zeros(shape, dtype=torch.float64)
        for round_ in range(-1, rounds):  # one to warm up
            self._loss.begin(step)
            for part in self._parts:
                for place, micro_batch in enumerate(micro_batches):
                    timed = self._run(part, step, micro_batch)
                    if round_ >= 0:
                        seconds[:, part.number, place, round_] = torch.tensor(timed, dtype=torch.float64)
        medians = seconds.quantile(0.5, dim=-1)
        return np.array(largest(medians.flatten().tolist(), self._device)).reshape(medians.shape)

    def _run(self, part: ModelPart, step: StepInputs, micro_batch: int) -> tuple[float, float]:
        """Runs one micro-batch through one part; returns seconds forward and backward."""
        one = slice(micro_batch, micro_batch + 1)
        columns = {name: values[one] for name, values in step.keywords.items()}
        given = step.input_ids[one] if part.is_first else self._hidden_states(part).requires_grad_()
        synchronize(self._device)
        began = time.perf_counter()
        output = part(given, **columns)
        if part.is_last:
            output = self._loss(output, step.shift_labels[one])
        synchronize(self._device)
        forward_seconds = time.perf_counter() - began
        gradient = torch.ones_like(output)
        synchronize(self._device)
        began = time.perf_counter()
        output.backward(gradient)
        synchronize(self._device)
        return forward_seconds, time.perf_counter() - began

    def _hidden_states(self, part: ModelPart) -> torch.Tensor:
        """Returns random activations, as stages send them."""
        width = part.model.config.get_text_config().hidden_size
        return torch.randn(1, part.rows, width, device=self._device, dtype=part.model.dtype)

    def hop_seconds(self) -> float:
        """Returns the seconds in which activations come from the first stage to the second while nothing else runs:
        half of a round trip."""
        stage, first_two = self._mesh.get_local_rank("stage"), dist.get_process_group_ranks(self._stages)[:2]
        hidden = self._hidden_states(self._parts[0])
        began = 0.0
        for hop in range(2 * HOPS + 2):
            if hop == 2:  # a round trip to warm up
                synchronize(self._device)
                began = time.perf_counter()
            if stage == hop % 2:
                dist.send(hidden, first_two[1 - stage], group=self._stages)
            elif stage == 1 - hop % 2:
                dist.recv(hidden, first_two[1 - stage], group=self._stages)
        synchronize(self._device)
        seconds = torch.tensor((time.perf_counter() - began) / (2 * HOPS), dtype=torch.float64, device=self._device)
        dist.broadcast(seconds, 0)  # rank 0 is on the first stage
        return float(seconds)


@dataclass(frozen=True)
class PartTimes:
    """Fitted seconds of every part."""

    # `[2, parts, 2]` float64: forward and backward of each part, seconds of a micro-batch without any pair, and
    # seconds of a pair
    lines: Seconds
    error: float  # largest difference from a time that they were fitted to, as a part of it

    @classmethod
    def fit(cls, pairs: IntArray, seconds: Seconds) -> Self:
        """Returns lines fitted by least squares to `[micro_batches]` attended pairs of a layer, and `[2, parts,
        micro_batches]` seconds, forward and backward."""
        unit = float(pairs.max())
        columns = np.stack([np.ones(len(pairs)), pairs / unit], axis=1)
        lines, *_ = np.linalg.lstsq(columns, seconds.reshape(-1, len(pairs)).T, rcond=None)
        scaled: Seconds = (lines.T / np.array([1.0, unit])).reshape(*seconds.shape[:2], 2)
        fitted = np.array(cls(scaled, 0.0).of(pairs))
        return cls(scaled, float(np.abs(fitted / seconds - 1).max()))

    def of(self, pairs: IntArray) -> tuple[Seconds, Seconds]:
        """Returns `[parts, micro_batches]` seconds, forward and backward, of `[micro_batches]` pairs."""
        forward, backward = self.lines[..., :1] + self.lines[..., 1:] * pairs
        return forward, backward

    def in_words(self) -> str:
        """Returns all lines as text, part by part: milliseconds, and nanoseconds of a pair."""
        shown = (
            f"{name} {', '.join(f'{1e3 * fixed:.2f} + {1e9 * of_pair:.5f}' for fixed, of_pair in parts)}"
            for name, parts in zip(("forward", "backward"), self.lines, strict=True)
        )
        return f"parts alone, ms + ns per pair: {'; '.join(shown)} (fitted to within {100 * self.error:.1f} %)"


def add_pipeline(parser: argparse.ArgumentParser, folder: str) -> None:
    """Adds options of the model, its stages and its documents. The folder is where the model is meanwhile, by
    default."""
    add_model(parser)
    add = parser.add_argument
    add("--vocabulary", type=words, default=8192, help="tokens of the vocabulary")
    add("--stages", type=count, default=2, help="stages; the other dimension is data ranks")
    add("--chunks", type=counts, default="1,2", help="chunks of each stage: 1 is 1F1B, more are interleaved")
    add("--lengths", type=lengths_file, default="pretrain", help="a shipped sample of lengths, or a file")
    add("--seed", type=whole, default=0, help="of the sample of documents, and of their order")
    add_tokens_per_rank(parser, 32_768)
    add("--micro-batches", type=micro_steps, default=8, help="of a step")
    add_device(parser)
    add("--folder", type=Path, default=Path(folder), help="of the model meanwhile; all ranks see it")


@dataclass(frozen=True)
class StepSetup:
    """The ranks, the model and the documents of a pipeline's step."""

    mesh: DeviceMesh  # stages x data ranks
    config: Any  # configuration of the model
    pipelines: Sequence[Pipeline]  # pipelines to run, one for each number of chunks
    documents: Dataset  # documents of the step

    @classmethod
    def open(cls, options: argparse.Namespace, device: torch.device) -> Self:
        """Checks options and draws documents. Exits if the folder is there already, or the stages do not divide the
        ranks. A collective call."""
        # Rank 0 looks before it writes: a rank that starts late would see what has just been written.
        is_there = torch.tensor(int(dist.get_rank() == 0 and options.folder.exists()), device=device)
        dist.broadcast(is_there, 0)
        if is_there:
            raise SystemExit(
                f"{options.folder} is there already, and would be replaced and removed: give another --folder"
            )
        data_ranks, rest = divmod(dist.get_world_size(), options.stages)
        if rest:
            raise SystemExit(f"{options.stages} stages do not divide {dist.get_world_size()} ranks")
        mesh = init_device_mesh(device.type, (options.stages, data_ranks), mesh_dim_names=("stage", "data"))
        config = read_config(options, data_ranks * options.tokens_per_rank)
        config.vocab_size = options.vocabulary
        pipelines = [Pipeline(options.stages, chunks) for chunks in options.chunks]
        for pipeline in pipelines:
            pipeline.check(options.micro_batches, config.num_hidden_layers)
        return cls(mesh, config, pipelines, first_step(options, data_ranks))


def first_step(options: argparse.Namespace, data_ranks: int) -> Dataset:
    """Returns documents with random tokens and the lengths of the first step of an epoch, in the order of packing. The
    epoch has a few steps: one of all documents would take long to pack in so small micro-batches."""
    request = PlanRequest(
        *(data_ranks, options.tokens_per_rank, data_ranks, options.micro_batches, preset("llama3-8b")),
        overlong="split",
        pipeline=Pipeline(options.stages),
    )
    random = np.random.RandomState(options.seed)
    sample = random.permutation(read_lengths(options.lengths).tokens)
    enough = SAMPLE_STEPS * options.micro_batches * request.capacity_tokens
    packed = pack_epoch(sample[: np.searchsorted(np.cumsum(sample), enough) + 1], request, options.seed)
    lengths = np.concatenate(packed.first_step(options.micro_batches)).tolist()
    ids = [random.randint(0, options.vocabulary, tokens, dtype=np.int32) for tokens in lengths]
    return Dataset.from_dict({"input_ids": ids})


def write_model(folder: Path, config: Any, device: torch.device) -> None:
    """Writes a checkpoint with random weights."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    free_memory(device)
