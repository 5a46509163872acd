"""Schedules of `torch.distributed.pipelining`: which parts a stage holds for one, and which cannot run."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from distca_hf.data.pipelines import Pipeline
from distca_hf.errors import ConfigError
from distca_hf.integrations.checkpointing import checkpointed_modules, recomputes_layers
from distca_hf.integrations.stages.model_part import ModelPart


# Classes of torch whose backward comes in two parts, for inputs and for weights.
DIVIDED_BACKWARD = frozenset({"ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV"})
# Classes whose second chunk goes back through the stages.
V_SHAPED = frozenset({"ScheduleZBVZeroBubble", "ScheduleDualPipeV"})
# Wrappers that average gradients in hooks of backward. With a divided one torch 2.13 calls none of DDP's, and leaves
# out gradients of parts between the first and the last with FSDP2.
WRAPPERS = (nn.parallel.DistributedDataParallel, FSDPModule)
# Base class of the ones that run one part on each stage.
ONE_PART = "PipelineScheduleSingle"


def parts_of_stage(schedule: type, pipeline: Pipeline, stage: int) -> list[int]:
    """Returns numbers of the parts that a stage holds, in the order of its chunks.

    Args:
        schedule: a class of `torch.distributed.pipelining`.
    """
    turned = pipeline.num_stages - 1 - stage if _names(schedule) & V_SHAPED else stage
    return [pipeline.part_of(turned if chunk % 2 else stage, chunk) for chunk in range(pipeline.chunks)]


def check_schedule(schedule: type, pipeline: Pipeline, micro_steps: int, modules: Sequence[nn.Module]) -> None:
    """Checks that a schedule can run these parts, and that they send hidden states in one dtype. Stages agree on it in
    every step (`StepLoss.begin`), each with that of one part.

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
    _check_hidden_dtypes(modules)
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


def _check_hidden_dtypes(modules: Sequence[nn.Module]) -> None:
    """Checks that parts of a rank send hidden states in one dtype.

    Raises:
        ConfigError: they do not: another stage would take the bytes of one for those of the other.
    """
    parts = [part for module in modules for part in module.modules() if isinstance(part, ModelPart)]
    for part in parts:
        if part.hidden_dtype != parts[0].hidden_dtype:
            raise ConfigError(
                f"part {parts[0].number} of the model sends hidden states in {parts[0].hidden_dtype}, and part "
                f"{part.number} in {part.hidden_dtype}: stages exchange one dtype. Give DividedModel.load the same "
                "hidden_dtype for all parts, on all stages"
            )


def _names(schedule: type) -> set[str]:
    return {kind.__name__ for kind in schedule.__mro__}
