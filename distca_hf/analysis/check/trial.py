"""Trial: compares a step of a tiny model on placed documents with steps on each single document.

Ranks are threads of this process. They compute as in training: the loader places documents, `enable` checks and
watches the model, and attention is exact on the CPU. So a class that needs something that distca_hf does not compute
is refused here as in training, in its first forward pass.

Weights are fp32 and random, so a wrong route or mask causes a difference larger than rounding.
"""

import copy
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedModel

from distca_hf.analysis.check.tiny_config import LONGEST_TOKENS, VOCABULARY
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.integrations.models.forward_watch import enable
from distca_hf.integrations.models.mixers import halo_tokens_for, needs_whole_documents
from distca_hf.integrations.models.structure import IMPLEMENTATION
from distca_hf.parallel_context import ParallelContext
from distca_hf.testing import rows_of_rank, run_ranks


DOCUMENT_TOKENS = (1, 5, 9, 17, 30, 48, LONGEST_TOKENS)
CAPACITY_TOKENS = 192  # one micro-batch holds all documents, and on three ranks the longest one is cut
# Seconds after which ranks stop waiting for one that does not arrive.
HANG_SECONDS = 30.0
# Returns a model of a configuration with an attention implementation.
Make = Callable[..., PreTrainedModel]


@dataclass(frozen=True)
class TinyModel:
    """A model so small that it trains a step in a fraction of a second. `make`: builds its class: `from_config` of an
    auto class, or `_from_config`. `trains`: whether it is in training mode. `dtype`: of its weights."""

    config: PreTrainedConfig
    make: Make
    trains: bool = True
    dtype: torch.dtype = torch.float32

    def num_parameters(self) -> int:
        with torch.device("meta"):
            return int(self.make(copy.deepcopy(self.config)).num_parameters())

    def build(self, implementation: str) -> PreTrainedModel:
        """Returns the model. Its weights are random, the same every time, and none stays zero."""
        torch.manual_seed(0)
        model = self.make(copy.deepcopy(self.config), attn_implementation=implementation).to(self.dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return model.train(self.trains)

    def build_plain(self) -> PreTrainedModel:
        """Returns the same model with sdpa, or with eager attention if it does not know sdpa."""
        try:
            return self.build("sdpa")
        except ValueError:
            return self.build("eager")


@dataclass(frozen=True)
class Step:
    """Loss of one training step, and gradients of all parameters one after the other. `logits`: `[tokens, vocabulary]`
    of all documents one after the other; None if the model returns none."""

    loss: float
    gradients: torch.Tensor
    logits: torch.Tensor | None = None

    def loss_difference(self, other: "Step") -> float:
        return abs(self.loss - other.loss) / abs(other.loss)

    def difference(self, other: "Step") -> float:
        return largest([self.loss_difference(other), relative_difference(self.gradients, other.gradients)])


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the norm of the difference over the norm of the expected tensor."""
    return float((found - expected).norm() / expected.norm())


def largest(differences: list[float]) -> float:
    """Returns the largest number; NaN if any is NaN."""
    return float(np.max(differences))


def documents_dataset() -> Dataset:
    """Returns documents of random tokens, with uneven labels."""
    rng = random.Random(0)
    documents = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in DOCUMENT_TOKENS]
    masks = [[int(at % 7 > row % 5) for at in range(len(ids))] for row, ids in enumerate(documents)]
    return Dataset.from_dict({"input_ids": documents, "completion_mask": masks})


def loader_of(transport: Transport, planner: PlacedPlanner | None = None) -> PlacedLoader:
    """Returns all documents in one micro-batch; without a planner, placed as for a model of full attention."""
    num_ranks = transport.world_size
    planner = planner or PlacedPlanner(context_for(num_ranks), num_ranks)
    return PlacedLoader(documents_dataset(), planner, transport, torch.device("cpu"))


def context_for(num_ranks: int) -> ParallelContext:
    """Returns settings with which all documents fit some ranks."""
    tokens_per_rank = max(CAPACITY_TOKENS // num_ranks, LONGEST_TOKENS)
    return ParallelContext(tokens_per_rank=tokens_per_rank, pad_to_multiple_of=32, ranks_per_node=num_ranks)


def planner_of(model: PreTrainedModel, num_ranks: int) -> PlacedPlanner:
    """Returns a planner that places all documents as mixers of the model require."""
    whole_documents, halo_tokens = needs_whole_documents(model), halo_tokens_for(model)
    context = context_for(num_ranks)
    return PlacedPlanner(context, num_ranks, whole_documents=whole_documents, halo_tokens=halo_tokens)


def step_alone(model: PreTrainedModel) -> Step:
    """Runs the step on whole documents, each by itself."""
    logits: list[torch.Tensor] = []
    loss = loss_alone(model, logits)
    return Step(loss, gradients_of(model), torch.cat(logits) if logits else None)


def loss_alone(model: PreTrainedModel, logits: list[torch.Tensor] | None = None) -> float:
    """Returns the loss of the step on whole documents, each by itself, and computes its gradients. `logits`: gets
    `[tokens, vocabulary]` of each document; documents without labels are run only for these."""
    documents = loader_of(LocalTransport()).documents(epoch=0, micro_batch=0)
    labels = sum(int((document.shift_labels != -100).sum()) for document in documents)
    total = 0.0
    for document in documents:
        counts = (document.shift_labels != -100).any()
        if not counts and logits is None:
            continue
        ids, targets = (torch.from_numpy(x)[None] for x in (document.input_ids, document.labels))
        output = model(input_ids=ids, labels=targets, num_items_in_batch=labels, use_cache=False)
        if logits is not None and isinstance(found := output.get("logits"), torch.Tensor):
            logits.append(found.detach()[0])
        if counts:
            output.loss.backward()
            total += output.loss.item()
    return total


def step_placed(tiny: TinyModel, num_ranks: int) -> Step:
    """Runs the step on documents that are placed on ranks, and returns the mean of ranks, as in data parallelism.
    Raises DistCAError if the model is refused, before its first forward pass or in it."""
    models = [tiny.build(IMPLEMENTATION) for _ in range(num_ranks)]
    planner = planner_of(models[0], num_ranks)
    documents = loader_of(LocalTransport()).documents(epoch=0, micro_batch=0)  # of all numbers of ranks
    lengths = np.array([len(document.input_ids) for document in documents])
    layout = planner.layout(lengths)
    tokens = torch.from_numpy(np.concatenate([document.input_ids for document in documents]))

    def step(transport: Transport) -> tuple[Step, torch.Tensor]:
        model = models[transport.rank]
        enable(model, context_for(num_ranks), LONGEST_TOKENS)
        (batch,) = loader_of(transport, planner)
        output = model(**batch)
        output.loss.backward()
        rows = rows_of_rank(layout, transport.rank)
        is_known = torch.equal(batch["input_ids"][0, : len(rows)].long(), tokens[rows].long())
        found = output.get("logits") if is_known else None
        logits = found.detach()[0, : len(rows)] if isinstance(found, torch.Tensor) else None
        return Step(output.loss.item(), gradients_of(model), logits), rows

    return _mean(run_ranks(num_ranks, step, timeout_seconds=HANG_SECONDS))


def _mean(ranks: list[tuple[Step, torch.Tensor]]) -> Step:
    steps = [step for step, _ in ranks]
    gradients = torch.stack([step.gradients for step in steps]).mean(0)
    logits = None
    if all(step.logits is not None for step in steps):
        in_ranks = torch.cat([step.logits for step in steps if step.logits is not None])
        logits = torch.empty_like(in_ranks)
        logits[torch.cat([rows for _, rows in ranks])] = in_ranks
    return Step(sum(step.loss for step in steps) / len(steps), gradients, logits)


def gradients_of(model: PreTrainedModel) -> torch.Tensor:
    """Returns gradients of all parameters, one after the other; zeros for a parameter that took no part."""
    return torch.cat(
        [torch.zeros_like(x).flatten() if x.grad is None else x.grad.flatten() for x in model.parameters()]
    )


NUM_RANKS = 2
# Largest relative difference that counts as rounding in fp32. Up to 1.0e-05 was measured over all classes
# (scripts/models/classes.md).
LARGEST_DIFFERENCE = 5e-5


@dataclass(frozen=True)
class Numerics:
    """Relative differences of a step on ranks from a step on each document by itself. `logits`: None if the model
    returns none. `in_training_mode`: False if the model draws random numbers in that mode, and is in evaluation
    mode."""

    logits: float | None
    loss: float
    gradients: float
    num_ranks: int
    documents: int
    tokens: int
    in_training_mode: bool

    @property
    def agree(self) -> bool:
        differences = [self.loss, self.gradients, *([] if self.logits is None else [self.logits])]
        return all(difference <= LARGEST_DIFFERENCE for difference in differences)

    def in_words(self) -> str:
        logits = "" if self.logits is None else f"logits by {self.logits:.1e}, "
        return f"{logits}loss by {self.loss:.1e}, gradients by {self.gradients:.1e}"

    def as_json(self) -> dict[str, object]:
        """Returns all fields, and the limit; None for a NaN."""
        fields = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }
        return fields | {"agree": self.agree, "largest_difference": LARGEST_DIFFERENCE}


def compare(tiny: TinyModel) -> Numerics:
    """Runs a step on two ranks and on every document by itself, and compares them. If results of single documents
    differ from run to run, the model draws random numbers in training, and is compared in evaluation mode.

    Raises:
        Exception: whatever the model raises; a DistCAError if it is refused.
    """
    placed = step_placed(tiny, NUM_RANKS)  # first: here a model is refused
    by_itself = _step_by_itself(tiny)
    found = _differences(placed, by_itself, tiny)
    if found.agree or not tiny.trains or _step_by_itself(tiny, seed=1).difference(by_itself) <= LARGEST_DIFFERENCE:
        return found
    tiny = replace(tiny, trains=False)
    return _differences(step_placed(tiny, NUM_RANKS), _step_by_itself(tiny), tiny)


def _step_by_itself(tiny: TinyModel, seed: int = 0) -> Step:
    """Returns the step on each document by itself; `seed` seeds the model's random numbers."""
    model = tiny.build_plain()
    torch.manual_seed(seed)
    return step_alone(model)


def _differences(placed: Step, by_itself: Step, tiny: TinyModel) -> Numerics:
    logits = None
    if placed.logits is not None and by_itself.logits is not None and placed.logits.shape == by_itself.logits.shape:
        logits = relative_difference(placed.logits, by_itself.logits)
    return Numerics(
        logits=logits,
        loss=placed.loss_difference(by_itself),
        gradients=relative_difference(placed.gradients, by_itself.gradients),
        num_ranks=NUM_RANKS,
        documents=len(DOCUMENT_TOKENS),
        tokens=sum(DOCUMENT_TOKENS),
        in_training_mode=tiny.trains,
    )
