"""Answer: all results of `distca plan` in one object: first optimizer step, epoch, estimates, and other choices.

A choice is another number of tokens per rank.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from distca_hf.analysis.epoch import EpochPlans, PackedEpoch, StepReport
from distca_hf.analysis.fit import Room, advice
from distca_hf.analysis.memory import Memory
from distca_hf.analysis.models import SimulatedModel
from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.analysis.request import Assumptions, PlanRequest, fit_lengths
from distca_hf.analysis.simulate.costs import Costs, Tiles
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.result import Result, WayFigures, simulate
from distca_hf.analysis.simulate.simulation import Simulation
from distca_hf.analysis.training_setup import Checkpointing, Sharding
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.errors import PackingError
from distca_hf.planning.plan import Plan


# Most optimizer steps to simulate, as in `distca simulate`; and most steps x ranks x micro-steps: planning takes a
# quarter of a millisecond per rank.
MOST_STEPS, MOST_RANK_STEPS = 20, 2048
# Assumptions that JSON has, in its order.
ASSUMPTIONS = (
    *("checkpointing", "liger", "gpu_gib", "seed", "cluster"),
    *("mlp_tokens", "attention_kv_heads", "state_on_host", "host_gib"),
)
# Tokens per rank of the other choices: 8K to 256K.
TOKENS_PER_RANK = tuple(2**power for power in range(13, 19))
# Most ranks on which other choices are simulated.
MOST_RANKS_OF_CHOICES = 1024


def steps_worth_it(size: int) -> int:
    """Returns the number of optimizer steps to simulate for `size` ranks times micro-steps."""
    return max(1, min(MOST_STEPS, MOST_RANK_STEPS // size))


def simulation_request(request: PlanRequest) -> SimulationRequest:
    """Returns the request to `distca simulate` for the same training, with as many steps as are worth it."""
    gpus, stages = request.num_gpus, request.num_gpus // request.num_ranks
    micro_steps = ceil_div(request.micro_steps, stages)
    return SimulationRequest(
        *(SimulatedModel.of(request.model), gpus, request.tokens_per_rank, None, micro_steps),
        ranks_per_node=request.ranks_per_node,
        batches=steps_worth_it(gpus * micro_steps),
        pipeline=request.pipeline,
        staged_micro_batches=None if request.pipeline is None else request.micro_steps,
        **{field.name: getattr(request, field.name) for field in fields(Assumptions)},
    )


@dataclass(frozen=True)
class Estimates:
    """Speed and memory of a training with these micro-batches, as `distca simulate` estimates them.

    Attributes:
        simulated: the first optimizer steps, in the way of the request, as plain packing, as sorted packs and in the
            stages of its pipeline; on request in all ways.
        ours: the way of the request, over the GPUs of all stages.
        costs: seconds of the parts of these steps, from measured times.
        memory: of the rank with most tokens, for each way to shard weights.
        room: memory of a GPU and of its node.
        advice: what does not fit under FSDP2, and what makes it fit; empty if any way fits, and for a pipeline.
    """

    simulated: Result
    ours: WayFigures
    costs: Costs
    memory: dict[Sharding, Memory]
    room: Room
    advice: str = ""

    @property
    def over_sorted(self) -> float:
        """Time of packs that are sorted by work within every optimizer step, over time as planned."""
        return self.ours.gain_over(self.simulated.way("sorted_packs"))

    def rank_seconds(self, plan: Plan, checkpointing: Checkpointing) -> dict[str, list[float]]:
        """Returns `[ranks]` seconds of a micro-batch in all layers: of attention, and of everything else without the
        optimizer and collectives."""
        attention = np.zeros(plan.layout.num_ranks)
        for mask, layers in self.costs.model.masks:
            tiles = Tiles.of(plan, mask)
            passes = self.costs.seconds(tiles).sum_by(tiles.rank, len(attention))
            attention += layers * (passes.forward * (1 + (checkpointing == "recomputed")) + passes.backward)
        rest = self.costs.rest_seconds(plan.layout.rank_tokens, checkpointing != "none")
        return {"attention": attention.tolist(), "rest": rest.tolist()}

    def as_json(self) -> dict[str, object]:
        return {
            "attention_share": self.ours.attention_share,
            "over_plain": self.ours.times_as_fast,
            "over_sorted": self.over_sorted,
            "steps": self.ours.steps,
            "profile": self.costs.profile.summary(),
            "ways": [dict(vars(way)) for way in self.simulated.ways],
            "memory_bytes": {sharding: memory.as_json() for sharding, memory in self.memory.items()},
            "room_bytes": round(self.room.gpu_bytes),
            "node_bytes": {
                sharding: self.room.node_bytes(memory, self.simulated.gpus) for sharding, memory in self.memory.items()
            },
            "advice": self.advice or None,
        }


def make_estimates(
    request: PlanRequest,
    document_tokens: IntArray,
    given: Sequence[IntArray] = (),
    compare: bool = False,
) -> Estimates | None:
    """Returns estimates for a training; None if the model's size is not known. `document_tokens`: `[documents]`
    lengths of the dataset, none too long. `given`: lengths of each micro-batch of the one step to simulate; the first
    epoch's by default."""
    if request.model.size is None:
        return None
    simulated, profile = simulation_request(request).for_documents(document_tokens), find_profile(request.cluster)
    ours = "placed" if request.layout == "placed" else "tasks_moved"
    keys = ["plain", "sorted_packs", ours]
    simulation = Simulation(simulated, profile)
    keys += [way.key for way in simulation.ways() if (compare or way.in_stages) and way.key not in keys]
    steps = [given] if given else ()
    result, _ = simulate(simulated, profile, document_tokens, keys=tuple(keys), steps=steps)
    way = result.way(ours)
    load = simulated.rank_load(way.most_tokens, way.received_bytes, state_bytes=way.state_bytes)
    setup = simulated.setup("fsdp2")
    memory, room, advised = load.by_sharding(setup, request.model.whole_documents), simulated.room, ""
    if request.pipeline is None and not any(room.fits(each, simulated.gpus) for each in memory.values()):
        advised = advice(load, setup, room)
    return Estimates(result, way, simulation.costs, memory, room, advised)


@dataclass(frozen=True)
class Choice:
    """One number of tokens per rank, and the longest document that all ranks together hold.

    Attributes:
        too_long_documents: number of documents of the dataset that are longer.
        memory_bytes, fits: estimated peak of a rank under FSDP2, and whether a GPU and its node have that much memory;
            None if not known.
        over_plain: simulated time of plain packing over time as planned. None if the model's size is not known, if
            documents are too long and refused, or too few for a step; and for choices other than the requested one on
            more than `MOST_RANKS_OF_CHOICES` ranks.
    """

    tokens_per_rank: int
    longest_document_tokens: int
    too_long_documents: int
    memory_bytes: int | None
    fits: bool | None
    over_plain: float | None


@dataclass(frozen=True)
class Spread:
    """Mean, 95th percentile and largest value of a figure over micro-batches."""

    mean: float
    p95: float
    worst: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        return cls(float(values.mean()), float(np.percentile(values, 95)), float(values.max()))


@dataclass(frozen=True)
class EpochFigures:
    """Documents of an epoch, and the balance of its micro-batches: of all with documents in order, and of those that
    were planned. `bytes_max_rank`: most bytes that any rank receives in one layer's forward pass."""

    documents: int
    tokens: int
    longest_document_tokens: int
    micro_batches: int
    planned_micro_batches: int
    imbalance_before: Spread
    imbalance: Spread
    bytes_max_rank: int

    @classmethod
    def of(cls, plans: EpochPlans, document_tokens: IntArray) -> "EpochFigures":
        return cls(
            documents=len(document_tokens),
            tokens=int(document_tokens.sum()),
            longest_document_tokens=int(document_tokens.max()),
            micro_batches=len(plans.tokens),
            planned_micro_batches=len(plans.planned),
            imbalance_before=Spread.of(plans.imbalance_before),
            imbalance=Spread.of(plans.imbalance),
            bytes_max_rank=int(plans.received_bytes.max()),
        )


@dataclass(frozen=True, eq=False)
class PlanAnswer:
    """The results of `distca plan`: the first optimizer step in full, and the balance of the epoch. `estimates`: None
    if the model's size is not known. `choices`: other numbers of tokens per rank; none for a given batch, and for a
    pipeline."""

    step: StepReport
    epoch: EpochFigures
    estimates: Estimates | None
    choices: Sequence[Choice]

    def as_json(self) -> dict[str, object]:
        estimates, request = None, self.step.request
        if self.estimates is not None:
            plans = self.step.plans
            estimates = {
                **self.estimates.as_json(),
                "rank_seconds": [self.estimates.rank_seconds(plan, request.checkpointing) for plan in plans],
                "assumptions": {name: getattr(request, name) for name in ASSUMPTIONS},
            }
        pipeline = request.pipeline
        return {
            **self.step.as_json(),
            "whole_epoch": asdict(self.epoch),
            "estimates": estimates,
            "choices": [asdict(choice) for choice in self.choices],
            "pipeline": None if pipeline is None else {**asdict(pipeline), "gpus": request.num_gpus},
        }


def make_answer(
    step: StepReport,
    plans: EpochPlans,
    packed: PackedEpoch,
    given_tokens: IntArray,
    compare: bool = False,
) -> PlanAnswer:
    """Collects all results. `given_tokens`: `[documents]` lengths before any were cut."""
    request = step.request
    given = () if packed.seed is not None else packed.first_step(request.micro_steps)
    estimates = make_estimates(request, packed.document_tokens, given, compare)
    return PlanAnswer(
        step=step,
        epoch=EpochFigures.of(plans, packed.document_tokens),
        estimates=estimates,
        choices=_choices(step, plans, given_tokens, estimates),
    )


def _choices(
    step: StepReport,
    plans: EpochPlans,
    given_tokens: IntArray,
    estimates: Estimates | None,
) -> list[Choice]:
    request = step.request
    if step.seed is None or request.pipeline is not None:
        return []

    def choice(tokens_per_rank: int) -> Choice:
        other = replace(request, tokens_per_rank=tokens_per_rank, bytes_limit=None)
        of_choice = estimates
        if tokens_per_rank != request.tokens_per_rank:
            of_choice = None
            if request.num_ranks <= MOST_RANKS_OF_CHOICES:
                try:
                    of_choice = make_estimates(other, fit_lengths(given_tokens, other))
                except PackingError:  # documents do not fit
                    pass
        memory = None if of_choice is None else of_choice.memory["fsdp2"]
        fits = None
        if request.model.size is not None:
            simulated = simulation_request(other)
            if memory is None:
                received, states = plans.received_bytes.max(), max(one.state_bytes or 0 for one in step.micro_batches)
                load = simulated.rank_load(tokens_per_rank, int(received), state_bytes=states)
                memory = load.memory(simulated.setup("fsdp2"))
            fits = simulated.room.fits(memory, simulated.gpus)
        return Choice(
            tokens_per_rank=tokens_per_rank,
            longest_document_tokens=other.planner.longest_tokens,
            too_long_documents=int((given_tokens > other.planner.longest_tokens).sum()),
            memory_bytes=None if memory is None else memory.total,
            fits=fits,
            over_plain=None if of_choice is None else of_choice.ours.times_as_fast,
        )

    return [choice(tokens) for tokens in sorted({request.tokens_per_rank, *TOKENS_PER_RANK})]
