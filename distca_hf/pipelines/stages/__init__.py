"""Stages: a model divided into the parts of a pipeline, for schedules of `torch.distributed.pipelining`."""

from distca_hf.pipelines.stages.divided_model import DividedModel, ModelPart
from distca_hf.pipelines.stages.saving import load_training, save_parts, save_training
from distca_hf.pipelines.stages.step import StepInputs, StepLoss, check_schedule, parts_of_stage


__all__ = [
    "DividedModel",
    "ModelPart",
    "StepInputs",
    "StepLoss",
    "check_schedule",
    "load_training",
    "parts_of_stage",
    "save_parts",
    "save_training",
]
