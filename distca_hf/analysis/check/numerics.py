"""Numerics: a step of a tiny version of a model, its documents divided between two ranks, beside each document alone.

Weights are fp32 and random, kernels those of the CPU: a wrong route or mask shows as a difference that rounding cannot
make.
"""

from dataclasses import asdict, dataclass

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

    def as_json(self) -> dict[str, object]:
        """Returns all fields, and the limit."""
        return asdict(self) | {"agree": self.agree, "largest_difference": LARGEST_DIFFERENCE}


def compare(tiny: TinyModel) -> Numerics:
    """Runs a step on two ranks and on every document alone, and compares them.

    Raises:
        Exception: whatever the model raises; a DistCAError if it is refused.
    """
    alone, tiny = _alone(tiny)
    placed = step_placed(tiny, NUM_RANKS)
    return Numerics(
        logits=placed.logit_difference(alone),
        loss=placed.loss_difference(alone),
        gradients=placed.gradient_difference(alone),
        num_ranks=NUM_RANKS,
        documents=len(DOCUMENT_TOKENS),
        tokens=sum(DOCUMENT_TOKENS),
        in_training_mode=tiny.trains,
    )


def _alone(tiny: TinyModel) -> tuple[Step, TinyModel]:
    """Returns the step on documents alone, and the model as it was run: in evaluation mode if it draws random numbers
    in training."""
    steps = []
    for seed in (1, 2):
        model = tiny.build_plain()
        torch.manual_seed(seed)
        steps.append(step_alone(model))
    if steps[0].difference(steps[1]) <= LARGEST_DIFFERENCE:
        return steps[0], tiny
    tiny = TinyModel(tiny.config, tiny.make, trains=False)
    return step_alone(tiny.build_plain()), tiny
