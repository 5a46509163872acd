"""Numerics: a step of a tiny version of a model, its documents divided between two ranks, beside each document alone.

Weights are fp32 and random, kernels those of the CPU: a wrong route or mask shows as a difference that rounding cannot
make.
"""

import math
from dataclasses import asdict, dataclass, replace

import torch

from distca_hf.analysis.check.trial import DOCUMENT_TOKENS, Step, TinyModel, step_alone, step_placed


NUM_RANKS = 2
# Largest relative difference that is rounding in fp32; up to 1.0e-05 was measured over all classes (docs/models.md).
LARGEST_DIFFERENCE = 5e-5


@dataclass(frozen=True)
class Numerics:
    """Relative differences of a step on ranks from the same documents each alone.

    Attributes:
        logits: norm of the difference over the norm; None where the model returns none.
        loss, gradients: likewise.
        num_ranks, documents, tokens: of the step.
        in_training_mode: whether the model was in training mode; one that draws random numbers there is not.
    """

    logits: float | None
    loss: float
    gradients: float
    num_ranks: int
    documents: int
    tokens: int
    in_training_mode: bool

    @property
    def agree(self) -> bool:
        """Whether all differences are rounding."""
        differences = [self.loss, self.gradients, *([] if self.logits is None else [self.logits])]
        return all(difference <= LARGEST_DIFFERENCE for difference in differences)

    def in_words(self) -> str:
        """Returns the differences in words."""
        logits = "" if self.logits is None else f"logits by {self.logits:.1e}, "
        return f"{logits}loss by {self.loss:.1e}, gradients by {self.gradients:.1e}"

    def as_json(self) -> dict[str, object]:
        """Returns all fields, and the limit; None for a difference that is not a number."""
        fields = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }
        return fields | {"agree": self.agree, "largest_difference": LARGEST_DIFFERENCE}


def compare(tiny: TinyModel) -> Numerics:
    """Runs a step on two ranks and on every document alone, and compares them.

    A model whose documents alone differ from run to run draws random numbers in training. It is compared as in
    evaluation.

    Raises:
        Exception: whatever the model raises; a DistCAError if it is refused.
    """
    placed = step_placed(tiny, NUM_RANKS)  # first: here a model is refused
    alone = _alone(tiny)
    found = _differences(placed, alone, tiny)
    if found.agree or not tiny.trains or _alone(tiny, seed=1).difference(alone) <= LARGEST_DIFFERENCE:
        return found
    tiny = replace(tiny, trains=False)
    return _differences(step_placed(tiny, NUM_RANKS), _alone(tiny), tiny)


def _alone(tiny: TinyModel, seed: int = 0) -> Step:
    """Returns the step on each document alone; random numbers that the model draws follow the seed."""
    model = tiny.build_plain()
    torch.manual_seed(seed)
    return step_alone(model)


def _differences(placed: Step, alone: Step, tiny: TinyModel) -> Numerics:
    return Numerics(
        logits=placed.logit_difference(alone),
        loss=placed.loss_difference(alone),
        gradients=placed.gradient_difference(alone),
        num_ranks=NUM_RANKS,
        documents=len(DOCUMENT_TOKENS),
        tokens=sum(DOCUMENT_TOKENS),
        in_training_mode=tiny.trains,
    )
