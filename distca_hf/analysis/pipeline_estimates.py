"""Pipeline estimates: the part of the time in which GPUs compute, by how documents of a step meet a pipeline.

| way | documents of a step | GPUs |
|---|---|---|
| plain packing | packs filled in order; all ranks of a stage wait for its busiest one | stages x ranks, 1F1B |
| as packed | each micro-batch placed, in the order of packing | the same |
| shaped | divided anew by attention work (`data.shaping`), then placed | the same; 1F1B, and interleaved 1F1B |
| no pipeline | placed over all GPUs, in fewer and larger micro-batches | all data-parallel, FSDP2 |

Schedules are simulated (`data.schedules`). Ranks of one stage wait for each other in every operation, as FSDP2 makes
them. Activations travel between stages at the speed of the wires. Without a pipeline weights do: each micro-batch
gathers them forward and backward, and reduces gradients once, beside computing. A pipeline is granted that its weights
stay gathered. Left out are embedding, head, optimizer and exchanges of keys and values, which are hidden behind
computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca_hf.analysis.epoch import EpochPlans
from distca_hf.analysis.request import ModelShape, PlanRequest
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.cost import imbalance
from distca_hf.data.epochs import Epoch
from distca_hf.data.pipelines import Pipeline
from distca_hf.data.schedules import Schedule
from distca_hf.data.shaping import shape_step, simulate, work_of_documents
from distca_hf.errors import ConfigError
from distca_hf.flops import PassCosts


# Bytes of a weight, an activation and a gradient on the wire: bf16.
WIRE_BYTES = 2
# Gathers and reductions of all weights in a micro-batch's forward pass, and in its backward pass.
FORWARD_GATHERS, BACKWARD_GATHERS = 1, 2
# Optimizer steps whose documents are also placed without a pipeline; balance is alike in all.
MOST_PLACED_STEPS = 4


@dataclass(frozen=True)
class Wires:
    """Speed of the network, and seconds that follow from it.

    Attributes:
        gbytes_per_second: 10 ** 9 bytes per second that a GPU sends, and receives at the same time.

    Raises:
        ConfigError: the speed is not above 0.
    """

    gbytes_per_second: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < self.gbytes_per_second < 1e6:
            raise ConfigError(f"--wire-speed {self.gbytes_per_second:g} must be above 0 GB/s and below 1000000")

    def seconds(self, numbers: float) -> float:
        """Returns the seconds for so many numbers in bf16."""
        return WIRE_BYTES * numbers / (1e9 * self.gbytes_per_second)


@dataclass(frozen=True)
class PipelineEstimates:
    """Utilisation of GPUs, seconds in which they compute over seconds of steps: 1.0 if no GPU ever waits.

    Attributes:
        num_stages, chunks: of the pipeline.
        gpus: ranks of all stages.
        wire_gbytes_per_second: see `Wires`.
        steps: optimizer steps that were simulated.
        filled: rows of the pipeline that hold tokens, a part of all; GPUs compute the others, too.
        attention_share: time of attention over time of all work.
        heaviest: most work of a micro-batch over the mean, as packed; mean over steps.
        least_heaviest: what no division of whole documents can go below; mean over steps.
        plain, as_packed, shaped: utilisation in 1F1B.
        interleaved: shaped, in interleaved 1F1B; None with one chunk.
        no_pipeline: on the same GPUs.
        held_micro_batches, held_interleaved: most micro-batches whose activations a stage holds, in parts of its
            layers, in 1F1B and interleaved.
    """

    num_stages: int
    chunks: int
    gpus: int
    wire_gbytes_per_second: float
    steps: int
    filled: float
    attention_share: float
    heaviest: float
    least_heaviest: float
    plain: float
    as_packed: float
    shaped: float
    interleaved: float | None
    no_pipeline: float
    held_micro_batches: float
    held_interleaved: float | None


def estimate_pipeline(
    request: PlanRequest,
    document_tokens: IntArray,
    epoch: Epoch,
    plans: EpochPlans,
    costs: PassCosts,
    wires: Wires,
) -> PipelineEstimates:
    """Simulates the planned steps of an epoch in all ways.

    Args:
        request: ranks of a stage, model and pipeline.
        document_tokens: `[documents]` lengths of the whole dataset.
        epoch: its micro-batches, as packed.
        plans: plans of some steps.
        costs: seconds of the layers of the model.
        wires: speed of the network.
    """
    pipeline, size = request.pipeline, request.model.size
    assert pipeline is not None
    assert size is not None
    simulated = _Simulated(request, pipeline, costs, wires, uneven=float(plans.imbalance.mean()))
    steps = plans.planned.reshape(-1, request.micro_steps)
    for numbers in steps:
        batches = [document_tokens[epoch.micro_batch(number)] for number in numbers]
        simulated.add(batches, plans.in_order.work[numbers].max(axis=1))
    without = [document_tokens[np.concatenate([epoch.micro_batch(n) for n in numbers])] for numbers in steps]
    seconds = simulated.seconds
    return PipelineEstimates(
        num_stages=pipeline.num_stages,
        chunks=pipeline.chunks,
        gpus=request.num_gpus,
        wire_gbytes_per_second=wires.gbytes_per_second,
        steps=len(steps),
        filled=float(np.mean(simulated.filled)),
        attention_share=1 - simulated.busy_without_attention / simulated.busy,
        heaviest=float(np.mean(simulated.heaviest)),
        least_heaviest=float(np.mean(simulated.least_heaviest)),
        plain=simulated.busy / seconds["plain"],
        as_packed=simulated.busy / seconds["as_packed"],
        shaped=simulated.busy / seconds["shaped"],
        interleaved=simulated.busy / seconds["interleaved"] if pipeline.chunks > 1 else None,
        no_pipeline=WithoutPipeline(request, without).utilisation(request.model, costs, wires),
        held_micro_batches=simulated.in_1f1b.held_micro_batches,
        held_interleaved=simulated.schedule.held_micro_batches if pipeline.chunks > 1 else None,
    )


class _Simulated:
    """Seconds of all steps so far, by way, and seconds of work of one GPU."""

    def __init__(
        self, request: PlanRequest, pipeline: Pipeline, costs: PassCosts, wires: Wires, uneven: float
    ) -> None:
        self._request, self._costs, self._uneven = request, costs, uneven
        self.schedule = Schedule(pipeline, request.micro_steps)
        self.in_1f1b = Schedule(Pipeline(pipeline.num_stages), request.micro_steps)
        size = request.model.size
        assert size is not None
        self._hop_seconds = wires.seconds(request.tokens_per_rank * size.hidden_size)
        self._num_layers = size.layers
        self.busy = self.busy_without_attention = 0.0
        self.seconds = dict.fromkeys(("plain", "as_packed", "shaped", "interleaved"), 0.0)
        self.heaviest: list[float] = []
        self.least_heaviest: list[float] = []
        self.filled: list[float] = []

    def add(self, batches: Sequence[IntArray], plain_pairs: IntArray) -> None:
        """Simulates one step.

        Args:
            batches: lengths of each micro-batch, as packed.
            plain_pairs: `[micro_batches]` pairs of the busiest rank if documents fill the ranks in order.
        """
        request, num_ranks = self._request, self._request.num_ranks
        lengths = np.concatenate(batches)
        work = work_of_documents(lengths)
        as_packed = np.split(np.arange(len(lengths)), np.cumsum([len(batch) for batch in batches])[:-1])
        self.heaviest.append(imbalance(_loads(work, as_packed)))
        self.least_heaviest.append(least_heaviest(lengths, len(batches)))
        self._add("plain", self.in_1f1b, plain_pairs * num_ranks)
        self._add("as_packed", self.in_1f1b, _loads(work, as_packed) * self._uneven)
        for way, schedule in (("shaped", self.in_1f1b), ("interleaved", self.schedule)):
            groups = shape_step(
                lengths, work, as_packed, schedule, num_ranks, request.tokens_per_rank, request.planner.costs
            )
            self._add(way, schedule, _loads(work, groups) * self._uneven)
        gpus, rows = request.num_gpus, len(batches) * num_ranks * request.tokens_per_rank
        self.busy += _work_seconds(self._costs, rows / gpus, int(work.sum()) / gpus)
        self.busy_without_attention += _work_seconds(self._costs, rows / gpus, 0.0)
        self.filled.append(int(lengths.sum()) / rows)

    def _add(self, way: str, schedule: Schedule, pairs: np.ndarray) -> None:
        layers = schedule.pipeline.layers_of_parts(self._num_layers)
        sizes = self._request.num_ranks, self._request.tokens_per_rank
        self.seconds[way] += float(simulate(schedule, pairs, *sizes, self._costs, self._hop_seconds, layers))


class WithoutPipeline:
    """The same GPUs, all of them data-parallel under FSDP2, and the same documents, placed.

    Args:
        request: ranks of a stage, model and pipeline.
        steps: lengths of the documents of each optimizer step.
    """

    def __init__(self, request: PlanRequest, steps: Sequence[IntArray]) -> None:
        self._gpus, stages = request.num_gpus, request.num_gpus // request.num_ranks
        planner = PlacedPlanner(request.planner.config, self._gpus, request.model.heads.groups)
        batches = [_in_micro_steps(lengths, ceil_div(request.micro_steps, stages)) for lengths in steps]
        self._batches = [batch for step in batches for batch in step]
        self._uneven = float(np.mean([_balance(planner, step) for step in batches[:MOST_PLACED_STEPS]]))

    def utilisation(self, model: ModelShape, costs: PassCosts, wires: Wires) -> float:
        """Returns the part of the time in which GPUs compute.

        Args:
            model: whose weights are gathered.
            costs: seconds of its layers.
            wires: speed of the network.
        """
        gather_seconds = wires.seconds(weights_to_gather(model))
        busy = seconds = 0.0
        for batch in self._batches:
            tokens, pairs = int(batch.sum()) / self._gpus, int(work_of_documents(batch).sum()) / self._gpus
            busy += _work_seconds(costs, tokens, pairs)
            for one, gathers in ((costs.forward, FORWARD_GATHERS), (costs.backward, BACKWARD_GATHERS)):
                computing = tokens * one.token_seconds + pairs * self._uneven * one.pair_seconds
                seconds += max(computing, gathers * gather_seconds)
        return busy / seconds


def _in_micro_steps(lengths: IntArray, micro_steps: int) -> list[IntArray]:
    """Divides the documents of an optimizer step, in order, among micro-steps of about equal tokens."""
    goals = np.arange(1, micro_steps) * int(lengths.sum()) / micro_steps
    return [part for part in np.split(lengths, np.searchsorted(np.cumsum(lengths), goals)) if len(part)]


def _balance(planner: PlacedPlanner, micro_steps: Sequence[IntArray]) -> float:
    """Returns the work of the busiest ranks of the micro-steps of an optimizer step over the mean of all ranks."""
    plans = [planner.plan(batch) for batch in micro_steps]
    work = [plan.work / plan.tasks.head_groups for plan in plans]
    return float(sum(ranks.max() for ranks in work) / sum(ranks.mean() for ranks in work))


def weights_to_gather(model: ModelShape) -> int:
    """Returns the weights of all layers, all experts included, which FSDP2 gathers."""
    assert model.size is not None
    return model.size.parameters - model.size.embedding_parameters


def least_heaviest(document_tokens: IntArray, micro_batches: int) -> float:
    """Returns the least work of the heaviest micro-batch, over the mean, of any division of whole documents into
    micro-batches of equal tokens: that of the longest document with the shortest ones beside it; at least 1."""
    lengths = np.sort(document_tokens)
    work = work_of_documents(lengths)
    room = int(lengths.sum()) // micro_batches - int(lengths[-1])
    beside = int(np.searchsorted(np.cumsum(lengths[:-1]), room, side="right"))
    return max(1.0, int(work[-1] + work[:beside].sum()) * micro_batches / int(work.sum()))


def _loads(work: IntArray, groups: Sequence[IntArray]) -> IntArray:
    """Returns `[micro_batches]` work of the documents of each."""
    return np.array([int(work[group].sum()) for group in groups])


def _work_seconds(costs: PassCosts, tokens: float, pairs: float) -> float:
    """Returns the seconds of one GPU for tokens and pairs, forward and backward."""
    passes = (costs.forward, costs.backward)
    return sum(tokens * one.token_seconds + pairs * one.pair_seconds for one in passes)
