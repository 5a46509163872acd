"""Training on a pipeline of 2 stages x 2 data ranks, and the same training in one process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

import distca_hf
from distca_hf import Pipeline, PlacedLoader
from distca_hf.pipelines.stages import DividedModel, ModelPart, StepInputs, StepLoss, check_schedule, parts_of_stage
from support.data import random_dataset
from support.models import tiny_model


STAGES, DATA_RANKS = 2, 2
STEPS, MICRO_BATCHES = 3, 4
TOKENS_PER_RANK = 96
NUM_LAYERS = 4
LEARNING_RATE = 1e-3
SEED = 3

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Way:
    """One way to run a pipeline.

    Attributes:
        schedule: as `get_schedule_class` takes it.
        recompute: with activation checkpointing.
        wrapper: that averages gradients over data ranks: "ddp", "fsdp2", or none: then the loop does.
    """

    schedule: str
    chunks: int = 1
    recompute: bool = False
    wrapper: str = "ddp"


@dataclass(frozen=True)
class Trained:
    """Every step of a training.

    Attributes:
        losses: empty on stages without the last part.
        gradients: of the weights that are here, by the names of the whole model.
        exchanges: of rows, by this rank.
        sharing: micro-batches in which ranks share documents.
        layers: of this rank.
        rooms: tensors of other stages that torch has room for on this rank.
    """

    losses: list[float]
    gradients: list[Gradients]
    exchanges: list[int]
    sharing: list[int]
    layers: int = 0
    rooms: int = 0


def save_initial_model(folder: Path) -> Path:
    """Writes the checkpoint that all trainings begin with."""
    tiny_model(implementation="sdpa", num_hidden_layers=NUM_LAYERS).save_pretrained(folder)
    return folder


def new_mesh(stages: int = STAGES, data_ranks: int = DATA_RANKS) -> DeviceMesh:
    return init_device_mesh("cpu", (stages, data_ranks), mesh_dim_names=("stage", "data"))


def new_plugin(mesh: DeviceMesh, **settings: Any) -> distca_hf.DistCAPlugin:
    tokens = DATA_RANKS * TOKENS_PER_RANK // mesh["data"].size()  # micro-batches are equal on any number of them
    plugin = distca_hf.DistCAPlugin(**{"tokens_per_rank": tokens} | settings)
    plugin.use_mesh(mesh, data="data", stages="stage")
    return plugin


class StagedTraining:
    """A training on this rank's stage."""

    def __init__(self, checkpoint: Path, way: Way, mesh: DeviceMesh, **dtypes: torch.dtype) -> None:
        self.mesh, self.plugin = mesh, new_plugin(mesh)
        pipeline, kind = Pipeline(mesh["stage"].size(), way.chunks), get_schedule_class(way.schedule)
        self.model = DividedModel(checkpoint, pipeline)
        numbers = parts_of_stage(kind, pipeline, self.plugin.members.grid.stage)
        self.parts = [self.model.load(number, self.plugin, **dtypes).train() for number in numbers]
        if way.recompute:
            for part in self.parts:
                part.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.wrapper = way.wrapper
        wrapped = [self._wrap(part) for part in self.parts]
        check_schedule(kind, pipeline, MICRO_BATCHES, wrapped)
        stages = [self._stage(part, module) for part, module in zip(self.parts, wrapped, strict=True)]
        self.loss = StepLoss(self.parts[-1])
        self.schedule = kind(
            stages if way.chunks > 1 else stages[0], MICRO_BATCHES, loss_fn=self.loss, scale_grads=False
        )
        self.optimizer = torch.optim.AdamW(
            [weight for part in self.parts for weight in part.parameters()], lr=LEARNING_RATE, weight_decay=0.0
        )
        self.rates = LambdaLR(self.optimizer, learning_rate)

    def _wrap(self, part: ModelPart) -> nn.Module:
        data_ranks = self.mesh["data"]
        if self.wrapper == "":
            return part
        if self.wrapper == "ddp":
            return nn.parallel.DistributedDataParallel(part, process_group=data_ranks.get_group())
        policy = MixedPrecisionPolicy(param_dtype=part.hidden_dtype, reduce_dtype=torch.float32)
        for layer in part.layers:
            fully_shard(layer, mesh=data_ranks, mp_policy=policy)
        fully_shard(part, mesh=data_ranks, mp_policy=policy)
        return part

    def _stage(self, part: ModelPart, wrapped: nn.Module) -> PipelineStage:
        place = part.number, part.num_parts, torch.device("cpu")
        return PipelineStage(wrapped, *place, **part.examples(), group=self.mesh.get_group("stage"))

    def loader(self, **arguments: Any) -> PlacedLoader:
        for_model = {"model": self.model.outline, "pipeline": self.model.pipeline, "micro_steps": MICRO_BATCHES}
        return self.plugin.dataloader(**{"dataset": training_dataset(), "seed": SEED, **for_model, **arguments})

    def batches(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Micro-batches of all epochs."""
        return all_epochs(self.loader(**arguments))

    def step(self, step: StepInputs) -> float | None:
        """Forward and backward of a step; its loss, where the last part is."""
        self.loss.begin(step)
        losses: list[torch.Tensor] = []
        self.schedule.step(
            *step.arguments(self.parts),
            **step.keywords,
            target=step.target(self.parts),
            losses=losses,
            return_outputs=False,
        )
        if self.wrapper == "":
            for part in self.parts:
                for weight in part.parameters():
                    dist.all_reduce(weight.grad, group=self.mesh.get_group("data"))
                    weight.grad /= DATA_RANKS
        if not losses:
            return None
        total = torch.stack(losses).sum().detach()
        dist.all_reduce(total, group=self.mesh.get_group("data"))
        return float(total) / DATA_RANKS

    def gradients(self) -> Gradients:
        """Whole gradients of this rank's weights."""
        named = [(name, weight.grad) for part in self.parts for name, weight in part.model.named_parameters()]
        return {name: whole(grad).clone() for name, grad in named if grad is not None}

    def train(
        self, steps: int = STEPS, loader: PlacedLoader | None = None, after_step: Callable[[int], None] | None = None
    ) -> Trained:
        """All steps, or some of them.

        Args:
            loader: whose position is the first step's; a new one if it is not given.
            after_step: called with the number of the step.
        """
        batches, traffic = all_epochs(loader or self.loader()), self.plugin.transport(torch.device("cpu")).traffic
        trained = Trained([], [], [], [], sum(len(part.layers) for part in self.parts))
        for number in range(steps):
            before, step = traffic.exchanges, StepInputs.of(list(islice(batches, MICRO_BATCHES)))
            loss = self.step(step)
            trained.sharing.append(sum(any(plan.facts.key_rows_sent) for plan in step.plans))
            trained.losses.extend([] if loss is None else [loss])
            trained.exchanges.append(traffic.exchanges - before)
            trained.gradients.append(self.gradients())
            self.optimizer.step()
            self.rates.step()
            self.optimizer.zero_grad()
            if after_step is not None:
                after_step(number)
        return replace(trained, rooms=self._rooms())

    def _rooms(self) -> int:
        """Returns the hidden states and gradients of other stages that torch has room for."""
        stages: Any = getattr(self.schedule, "_stages", None) or [self.schedule._stage]
        return sum(
            getattr(info, "buffer", None) is not None
            for stage in stages
            for rows in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in rows
        )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_epochs(loader: PlacedLoader) -> Iterator[dict[str, Any]]:
    """Micro-batches from the loader's position on."""
    while True:
        yield from loader


def learning_rate(step: int) -> float:
    """Share of the learning rate that a step is made with."""
    return 1 / (1 + step)


def training_dataset() -> Any:
    return random_dataset(count=130, seed=1)


def train_in_one_process(checkpoint: Path) -> tuple[Trained, nn.Module]:
    """sdpa, one document after the other; the mean over all labels of a step. Returns the trained model, too."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=DATA_RANKS * TOKENS_PER_RANK)
    loader = plugin.dataloader(training_dataset(), SEED, micro_steps=MICRO_BATCHES, pipeline=Pipeline(STAGES))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    rates = LambdaLR(optimizer, learning_rate)
    places = ((epoch, at) for epoch in range(STEPS) for at in range(len(loader)))
    trained = Trained([], [], [], [])
    for _ in range(STEPS):
        documents = [document for place in islice(places, MICRO_BATCHES) for document in loader.documents(*place)]
        labels = sum(int((document.shift_labels != -100).sum()) for document in documents)
        total = 0.0
        for document in documents:
            row = {name: torch.from_numpy(getattr(document, name))[None] for name in ("input_ids", "labels")}
            loss = model(**row, num_items_in_batch=labels, use_cache=False).loss
            loss.backward()
            total += loss.item()
        trained.losses.append(total)
        trained.gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return trained, model
