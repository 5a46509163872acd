"""Step: prepares the micro-batches of an optimizer step for `schedule.step`, and computes the loss of the last stage.

Also finds out which parts of the model a stage holds under a schedule of `torch.distributed.pipelining`, and refuses
schedules that cannot run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.errors import ConfigError
from distca_hf.integrations.checkpointing import checkpointed_modules, recomputes_layers
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.pipelines.stages.divided_model import ModelPart
from distca_hf.runtime.live_plan import LivePlan


# Torch's schedules whose backward is divided in two, for inputs and for weights.
DIVIDED_BACKWARD = frozenset({"ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV"})
# Schedules whose second chunk goes back through the stages.
V_SHAPED = frozenset({"ScheduleZBVZeroBubble", "ScheduleDualPipeV"})
# Wrappers that average gradients in hooks of backward. If backward is divided, torch 2.13 calls none of DDP's hooks,
# and with FSDP2 leaves out gradients of parts between the first and the last.
WRAPPERS = (nn.parallel.DistributedDataParallel, FSDPModule)
# Base class of schedules that run one part on each stage.
ONE_PART = "PipelineScheduleSingle"


def parts_of_stage(schedule: type, pipeline: Pipeline, stage: int) -> list[int]:
    """Returns the numbers of the parts that a stage holds, in the order of its chunks.

    Args:
        schedule: a class of `torch.distributed.pipelining`.
    """
    turned = pipeline.num_stages - 1 - stage if _names(schedule) & V_SHAPED else stage
    return [pipeline.part_of(turned if chunk % 2 else stage, chunk) for chunk in range(pipeline.chunks)]


def check_schedule(schedule: type, pipeline: Pipeline, micro_steps: int, modules: Sequence[nn.Module]) -> None:
    """Checks that a schedule can run these parts, and that they send hidden states in one dtype. In every step, stages
    compare the dtype of one part of each (`StepLoss.begin`).

    Args:
        schedule: a class of `torch.distributed.pipelining`.
        micro_steps: micro-batches of an optimizer step.
        modules: parts of this rank as `PipelineStage` gets them, wrapped and checkpointed or not.

    Raises:
        ConfigError: it cannot; names both values.
    """
    name = schedule.__name__
    pipeline.check(micro_steps, None)
    if ONE_PART in _names(schedule) and pipeline.chunks > 1:
        raise ConfigError(
            f"{name} runs 1 part on each stage, and the pipeline has {pipeline.chunks} chunks; choose "
            "ScheduleInterleaved1F1B, or 1 chunk"
        )
    parts = [part for module in modules for part in module.modules() if isinstance(part, ModelPart)]
    for part in parts:  # otherwise another stage would read the bytes as the wrong dtype
        if part.hidden_dtype != parts[0].hidden_dtype:
            raise ConfigError(
                f"part {parts[0].number} of the model sends hidden states in {parts[0].hidden_dtype}, and part "
                f"{part.number} in {part.hidden_dtype}: stages exchange one dtype. Give DividedModel.load the same "
                "hidden_dtype for all parts, on all stages"
            )
    if not _names(schedule) & DIVIDED_BACKWARD:
        return
    for chunk, module in enumerate(modules):
        if recomputes_layers(checkpointed_modules(module)):
            raise ConfigError(
                f"{name} with activation checkpointing (chunk {chunk}): it divides backward into inputs and weights, "
                "and torch computes a checkpointed layer again for each of its weights. Choose Schedule1F1B or "
                "ScheduleInterleaved1F1B, or leave checkpointing out"
            )
        if isinstance(module, WRAPPERS):
            raise ConfigError(
                f"{name} with {type(module).__name__} (chunk {chunk}): it divides backward into inputs and weights, "
                "and torch's wrappers then miss gradients of weights. Choose Schedule1F1B or ScheduleInterleaved1F1B, "
                "or leave parts as they are and average their gradients in the loop"
            )


def _names(schedule: type) -> set[str]:
    return {kind.__name__ for kind in schedule.__mro__}


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Micro-batches of an optimizer step, one in each row of every tensor: torch splits them along that dimension.

    Attributes:
        input_ids, shift_labels: int64 `[micro-batches, tokens]`.
        keywords: arguments of every part: `position_ids`, `attention_mask`, int64 `[micro-batches, tokens]`; `plan`,
            int64 `[micro-batches, 1]` on the host, numbers of plans.
        plans: the plans themselves, which live as long as this.
    """

    input_ids: torch.Tensor
    shift_labels: torch.Tensor
    keywords: Mapping[str, torch.Tensor]
    plans: tuple[LivePlan, ...]

    @classmethod
    def of(cls, batches: Sequence[Mapping[str, Any]]) -> Self:
        """Joins batches of `plugin.dataloader`.

        Raises:
            ConfigError: there are none, or their shapes differ.
        """
        shapes = [tuple(batch["input_ids"].shape) for batch in batches]
        if not shapes:
            raise ConfigError("an optimizer step of 0 micro-batches; give at least one for each stage")
        others = [number for number, shape in enumerate(shapes) if shape != shapes[0]]
        if others:
            raise ConfigError(
                f"micro-batch {others[0]} of the step has {shapes[others[0]]} rows, and micro-batch 0 has "
                f"{shapes[0]}, but stages exchange one shape. Give plugin.dataloader pipeline=..., or "
                "pad_to_multiple_of=tokens_per_rank"
            )
        plans = tuple(batch["distca_plan"] for batch in batches)
        columns = {name: torch.cat([batch[name] for batch in batches]) for name in ("position_ids", "attention_mask")}
        return cls(
            input_ids=torch.cat([batch["input_ids"] for batch in batches]),
            shift_labels=torch.cat([batch["shift_labels"] for batch in batches]),
            keywords={**columns, "plan": torch.tensor([[plan.handle] for plan in plans], device="cpu")},
            plans=plans,
        )

    @property
    def label_tokens(self) -> int:
        """Labels of the step, all data ranks together; at least 1."""
        return max(1, sum(plan.label_tokens or 0 for plan in self.plans))

    def arguments(self, parts: Sequence[ModelPart]) -> tuple[torch.Tensor, ...]:
        """Returns arguments by position: tokens, on the stage that has the first part."""
        return (self.input_ids,) if any(part.is_first for part in parts) else ()

    def target(self, parts: Sequence[ModelPart]) -> torch.Tensor | None:
        """Returns labels on the stage that has the last part; None on others."""
        return self.shift_labels if any(part.is_last for part in parts) else None


class StepLoss:
    """The model's own loss, over all labels of an optimizer step: the `loss_fn` of a schedule, with
    `scale_grads=False`. The first part that runs in a step checks the schedule.

    DDP and FSDP average gradients over data ranks. So a rank divides the sum over its labels by its share of all of
    them. Then the mean over data ranks is the mean over all labels.

    Args:
        part: any of this stage.
    """

    def __init__(self, part: ModelPart) -> None:
        self._part, config = part, part.model.config.get_text_config()
        self._loss_function, self._vocabulary = part.model.loss_function, config.vocab_size
        self._hidden = f"{config.hidden_size} x {str(part.hidden_dtype).removeprefix('torch.')}"
        self._share: torch.Tensor | None = None
        self._micro_batches_left = 0

    def begin(self, step: StepInputs) -> None:
        """Begins a step, before `schedule.step`: counts its labels, and compares its micro-batches, and the hidden
        states that stages send, over all stages. A collective call of all stages.

        Raises:
            PlanMismatchError: a rank holds other micro-batches, or in another order: a stage would continue with
                hidden states of other tokens. Or its hidden states have another size or dtype.
        """
        numbers = [plan.micro_batch for plan in step.plans]
        facts = {
            "order of the step's micro-batches": ", ".join(map(str, numbers)),
            "rows and hidden states that stages send": f"{step.input_ids.shape[1]} x {self._hidden}",
        }
        Agreement.start(step.plans[0].transport, Occasion.SCHEDULE, min(numbers), facts, {}).wait()
        data_ranks = step.plans[0].transport.world_size
        self._share = torch.tensor(step.label_tokens / data_ranks, dtype=torch.float32, device=step.input_ids.device)
        self._micro_batches_left = len(step.plans)
        self._part.checks_schedule = True

    def __call__(self, logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a micro-batch.

        Args:
            logits: `[1, T, vocabulary]`.
            shift_labels: int64 `[1, T]`, already shifted; -100 for tokens without a label.

        Raises:
            ConfigError: no step has begun, or the last one is over.
        """
        self._micro_batches_left -= 1
        if self._share is None or self._micro_batches_left < 0:
            raise ConfigError("the labels of this step were not counted; call loss.begin(step) before schedule.step")
        loss: torch.Tensor = self._loss_function(
            logits=logits,
            labels=shift_labels,
            shift_labels=shift_labels,
            vocab_size=self._vocabulary,
            num_items_in_batch=self._share,
        )
        return loss
