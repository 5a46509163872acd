"""A training on a pipeline that is saved in its midst, and goes on in a new one: on the same ranks, and on others."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from distca_hf.errors import ConfigError
from distca_hf.pipelines.stages import load_training, save_training
from support.staged import STEPS, StagedTraining, Trained, Way, new_mesh, whole


SAVED_AFTER_STEPS = 1

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Resumed:
    """What one rank saw.

    Attributes:
        rest: steps behind those that were saved, in a training that began with other weights.
        random_numbers: that came next after loading.
        moments: of the optimizer at the end, by weight.
    """

    rest: Trained
    random_numbers: list[float]
    moments: Tensors


def train_and_save(training: StagedTraining, folder: Path) -> tuple[Trained, list[float]]:
    """Trains all steps, and saves in their midst; returns the random numbers that came next, too."""
    loader = training.loader()
    numbers: list[float] = []

    def save(step: int) -> None:
        if step + 1 == SAVED_AFTER_STEPS:
            random.seed(training.plugin.members.grid.number)
            others = {"loader": loader, "rates": training.rates}
            save_training(training.parts, training.optimizer, folder, training.plugin, **others)
            numbers.extend(_random_numbers())

    return training.train(loader=loader, after_step=save), numbers


def resume(checkpoint: Path, folder: Path, way: Way, mesh: DeviceMesh) -> Resumed:
    """Trains the steps that are left, in a new training, and saves the end of it in the same folder."""
    training = StagedTraining(checkpoint, way, mesh)
    loader = training.loader()
    others = {"loader": loader, "rates": training.rates}
    load_training(training.parts, training.optimizer, folder, training.plugin, **others)
    numbers = _random_numbers()
    rest = training.train(STEPS - SAVED_AFTER_STEPS, loader)
    save_training(training.parts, training.optimizer, folder, training.plugin, **others)
    training.plugin.close()
    return Resumed(rest, numbers, _moments(training))


def read_elsewhere(checkpoint: Path, folder: Path, num_stages: int) -> tuple[Tensors, Tensors, str]:
    """Reads a training into stages of one data rank. Returns weights, moments, and words of the error that these get
    for the position in the data."""
    training = StagedTraining(checkpoint, Way("1F1B"), new_mesh(num_stages, data_ranks=1))
    of_training = training.parts, training.optimizer, folder, training.plugin
    load_training(*of_training, rates=training.rates)
    weights = {name: weight.detach() for part in training.parts for name, weight in part.model.named_parameters()}
    with pytest.raises(ConfigError) as refused:
        load_training(*of_training, loader=training.loader())
    training.plugin.close()
    return weights, _moments(training), str(refused.value)


def _random_numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def _moments(training: StagedTraining) -> Tensors:
    named = {name: weight for part in training.parts for name, weight in part.model.named_parameters()}
    return {name: whole(training.optimizer.state[weight]["exp_avg"]) for name, weight in named.items()}
