"""Result: computes the figures of every way, and which way to choose."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca_hf.analysis.groups import Groups
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.simulate.load import Step, Way
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.simulation import Simulated, Simulation, Track, WayStep, run_steps
from distca_hf.analysis.simulate.step import StageMemory
from distca_hf.analysis.training_setup import Sharding
from distca_hf.arrays import IntArray
from distca_hf.flops import peak_flops


# Share of attended pairs below which left-out pairs do not count: documents that are cut to fill packs are short.
NEARLY_NOTHING = 0.005
# Least gain over the fastest way without core attention disaggregation for which distca is worth a change.
WORTH_IT = 1.05
SECONDS_OF_AN_HOUR = 3600.0
# Tokens for which GPU-hours are counted by default.
TOKEN_BUDGET = 1e9
# Text after the name of a way that cuts documents.
LEAVES_OUT = ", which leaves out attention between parts of documents"


@dataclass(frozen=True)
class WayFigures:
    """Figures of one way to train.

    Attributes:
        key, label, is_ours, in_stages: see `Way`.
        utilisation: useful operations over the peak of all GPUs, without left-out attention; None if that is
            unknown.
        memory_bytes, fits: estimate of the most memory that a GPU needs, and whether it has that much.
        times_as_fast: speed over plain packing, or over plain data parallelism for given batches.
        whole: whether queries attend to all their keys; otherwise documents are cut, and attention is left out.
        attention_share: share of the seconds that GPUs spend in attention.
        received_bytes, state_bytes: most that a GPU sends or receives in the forward pass of a layer, and of a
            mixer.
        most_tokens, most_head_tokens: most tokens that layers, and that a head, of a GPU compute in a micro-step.
        shared_share: share of the tokens that layers do not compute, because another document begins with them,
            too.
    """

    key: str
    label: str
    is_ours: bool
    in_stages: bool
    step_seconds: float
    tokens_per_second: float
    utilisation: float | None
    memory_bytes: int
    fits: bool
    gpu_hours: float
    times_as_fast: float
    whole: bool
    steps: int
    attention_share: float
    received_bytes: int
    most_tokens: int
    state_bytes: int = 0
    most_head_tokens: int = 0
    shared_share: float = 0.0

    def gain_over(self, other: "WayFigures") -> float:
        return other.step_seconds / self.step_seconds


@dataclass(frozen=True)
class Result:
    """Figures of one request. `tokens_per_rank`, `batch_size`: those of the request; one of them is None.
    `step_tokens`: mean of an optimizer step. `num_stages`, `chunks`: of the pipeline; 1 without one. `ways`: the
    fastest of each family."""

    gpus: int
    accumulation: int
    tokens_per_rank: int | None
    batch_size: int | None
    context_tokens: int
    step_tokens: float
    num_stages: int
    chunks: int
    ways: list[WayFigures]
    missing: list[str]

    @property
    def of_rank(self) -> str:
        return f"{self.tokens_per_rank:,} tokens" if self.batch_size is None else f"{self.batch_size:,} rows"

    @property
    def plain(self) -> WayFigures:
        return self.way("plain")

    def way(self, key: str) -> WayFigures:
        return next(way for way in self.ways if way.key == key)

    @property
    def ours(self) -> WayFigures | None:
        """The fastest way of distca_hf that fits, preferring ways that keep documents whole; None if none fits."""
        return _best(way for way in self.ways if way.is_ours and way.fits)

    @property
    def other(self) -> WayFigures | None:
        """The fastest way without core attention disaggregation that fits; None if none fits. If it leaves attention
        out, and so distca is hardly faster, the fastest one that leaves none out, if there is one."""
        others, ours = [way for way in self.ways if not way.is_ours and way.fits], self.ours
        fastest = _fastest(others)
        if ours is None or fastest is None or not ours.whole or ours.gain_over(fastest) >= WORTH_IT:
            return fastest
        return _best(others)

    @property
    def gain(self) -> float | None:
        """How many times as fast distca_hf is as the other way; None if one of the two does not fit."""
        return None if self.ours is None or self.other is None else self.ours.gain_over(self.other)

    def in_short(self) -> str:
        return " ".join(filter(None, (self._choice(), self.compared_with_stages())))

    def compared_with_stages(self) -> str:
        """Returns the fastest pipeline next to the fastest other way of distca_hf; empty without a pipeline."""
        if self.num_stages == 1:
            return ""
        within = _best(way for way in self.ways if way.in_stages and way.is_ours and way.fits)
        without = _best(way for way in self.ways if not way.in_stages and way.is_ours and way.fits)
        if within is None or without is None:
            only = "as stages of a pipeline" if within else "without stages"
            return f"Of these GPUs distca fits their memory only {only}." if within is not without else ""
        ratio = within.step_seconds / without.step_seconds
        if ratio >= 1:
            return f"A pipeline of {self.num_stages} stages takes {ratio:.2f} x as long as these GPUs without one."
        return f"A pipeline of {self.num_stages} stages is {1 / ratio:.2f} x as fast as these GPUs without one."

    def _choice(self) -> str:
        ours, other, gain = self.ours, self.other, self.gain
        if ours is None and other is None:
            fastest = _fastest(self.ways)
            assert fastest is not None
            return (
                f"{self.of_rank} per rank fit no GPU in any way; the fastest would be "
                f"{fastest.label}. Take fewer, or Liger's loss (--liger), which holds no logits."
            )
        if ours is None:
            assert other is not None
            return f"distca does not fit the memory of a GPU. Choose {other.label}."
        if other is None or gain is None:
            return f"Choose {ours.label}: nothing else fits the memory of a GPU."
        cut = "" if other.whole else LEAVES_OUT
        if other.whole and not ours.whole:
            return (
                f"Of distca's ways only this fits the memory of a GPU: {ours.label}{LEAVES_OUT}. Choose {other.label}."
            )
        if gain < WORTH_IT and ours.whole and not other.whole:
            return (
                f"Choose {ours.label}: without CAD nothing that fits the memory of a GPU attends whole documents. The "
                f"fastest is {other.label}{cut}, in {gain:.2f} of the time."
            )
        if gain < WORTH_IT:
            return f"CAD brings you {gain:.2f} x over {other.label}{cut}: do not bother."
        also = "" if other.key == "plain" else f", and {ours.times_as_fast:.2f} x as fast as plain packing"
        if also and not self.plain.whole:
            also += LEAVES_OUT
        return f"Choose {ours.label}: {gain:.2f} x as fast as the fastest way without CAD, {other.label}{cut}{also}."

    def as_json(self) -> dict[str, Any]:
        ours = self.ours
        fields = [name for name in vars(self) if name != "ways"]
        return {
            **{name: getattr(self, name) for name in fields},
            "ways": [dict(vars(way)) for way in self.ways],
            "choose": None if ours is None else ours.key,
            "gain": self.gain,
            "in_short": self.in_short(),
        }


def make_result(
    simulation: Simulation, steps: Sequence[Step], done: Sequence[Simulated], token_budget: float
) -> Result:
    """Returns the figures of simulated steps. `token_budget`: tokens that GPU-hours are counted for."""
    request, model = simulation.request, simulation.request.model
    tokens = np.array([sum(int(batch.sum()) for batch in step) for step in steps], dtype=np.float64)
    pairs = np.array([model.pairs(np.concatenate(step)) for step in steps])
    peak = peak_flops(simulation.costs.profile.made.device)
    plain = np.full(len(steps), math.nan)
    figures = []
    for way in simulation.ways():
        of_steps = [one.ways[way.key] for one in done if way.key in one.ways]
        numbers = [one.number for one in done if way.key in one.ways]
        of_way = np.full(len(steps), math.nan)
        of_way[numbers] = [one.seconds for one in of_steps]
        plain, known = of_way if way.key == "plain" else plain, ~np.isnan(of_way)
        # Steps that were not simulated: as much faster than plain packing as the others.
        seconds = float(plain.mean() * of_way[known].sum() / plain[known].sum())
        rate = float(tokens.mean()) / seconds
        left_out, of_all = np.array([one.left_out_pairs for one in of_steps]), pairs[numbers]
        attended = 1 - float(left_out.sum() / of_all.sum())
        shared, shared_heads = (
            float(tokens.mean()) * sum(getattr(one, of) for one in of_steps) / float(tokens[numbers].sum())
            for of in ("shared_tokens", "shared_head_tokens")
        )
        attended -= sum(one.shared_pairs for one in of_steps) / float(of_all.sum())
        useful = float(
            model.flops.work(
                np.array(tokens.mean() - shared),
                np.array(attended * (pairs.mean() / model.attention_layers)),
                np.array(tokens.mean() - shared_heads),
            )
        )
        memory = _memory_bytes(simulation, way, of_steps)
        figures.append(
            WayFigures(
                *(way.key, way.label, way.is_ours, way.in_stages, seconds, rate),
                None if peak is None else useful / (seconds * request.gpus * peak),
                memory,
                memory <= request.room.gpu_bytes,
                gpu_hours=token_budget / rate * request.gpus / SECONDS_OF_AN_HOUR,
                times_as_fast=float(plain.mean()) / seconds,
                whole=bool((left_out <= NEARLY_NOTHING * of_all).all()),
                steps=len(of_steps),
                attention_share=sum(one.attention_seconds for one in of_steps) / sum(one.seconds for one in of_steps),
                received_bytes=int(max(one.received_bytes for one in of_steps)),
                most_tokens=max(one.most_tokens for one in of_steps),
                state_bytes=max(one.state_bytes for one in of_steps),
                most_head_tokens=max(one.most_head_tokens for one in of_steps),
                shared_share=shared / float(tokens.mean()),
            )
        )
    families = {way.key: way.family for way in simulation.ways()}
    fastest = {
        family: _fastest(figure for figure in figures if families[figure.key] == family)
        for family in set(families.values()) - {""}
    }
    return Result(
        request.gpus,
        request.accumulation,
        request.tokens_per_rank if request.batch_size is None else None,
        request.batch_size,
        request.longest_tokens,
        float(tokens.mean()),
        request.num_stages,
        1 if request.pipeline is None else request.pipeline.chunks,
        [figure for figure in figures if figure is fastest.get(families[figure.key], figure)],
        simulation.missing(),
    )


def _best(ways: Iterable[WayFigures]) -> WayFigures | None:
    """Returns the fastest way that leaves no attention out, or the fastest of all if each does; None if there is
    none."""
    every = list(ways)
    return _fastest([way for way in every if way.whole] or every)


def _fastest(ways: Iterable[WayFigures]) -> WayFigures | None:
    return min(ways, key=lambda way: way.step_seconds, default=None)


def _memory_bytes(simulation: Simulation, way: Way, steps: Sequence[WayStep]) -> int:
    """Returns the most bytes that a GPU needs. Only our ways keep rows of other ranks, and attention's outputs."""
    request = simulation.request
    checkpointing = request.checkpointing
    if request.setup("fsdp2").saves_attention and (not way.is_ours or way.key == "placed_recomputed"):
        checkpointing = "recomputed"
    sharding: Sharding = "fsdp2_synced" if request.sync_each_batch else "fsdp2"
    setup = request.setup(sharding, checkpointing, way.is_ours, way.servers)
    tokens, received = max(one.most_tokens for one in steps), int(max(one.received_bytes for one in steps))
    if not way.in_stages:
        head_tokens, states = max(one.most_head_tokens for one in steps), max(one.state_bytes for one in steps)
        return request.rank_load(tokens, received, head_tokens, states).memory(setup).total
    assert request.pipeline is not None
    setup = replace(setup, num_ranks=request.gpus // request.num_stages, micro_steps=1)
    size = request.model.size.decoder(request.model.heads)
    return StageMemory(size, setup, request.pipeline, request.micro_batches, tokens, received).total


def simulate(
    request: SimulationRequest,
    profile: ClusterProfile,
    document_tokens: IntArray,
    token_budget: float = TOKEN_BUDGET,
    track: Track = iter,
    keys: tuple[str, ...] = (),
    steps: Sequence[Step] = (),
    groups: Groups | None = None,
) -> tuple[Result, Notes]:
    """Simulates a request. Returns all figures, and everything that was not measured as needed.

    Args:
        token_budget: tokens that GPU-hours are counted for.
        keys: of the ways to simulate, including "plain"; all if empty.
        steps: lengths of each micro-batch of each step; by default the first steps of a training on the dataset.
        groups: which documents of the dataset begin alike.

    Raises:
        ConfigError: links that are needed were not measured.
        PackingError: lengths do not fit.
    """
    request, of_steps = request.for_documents(document_tokens), list[list[Groups]]()
    if groups is not None and request.batch_size is not None and not steps:
        dealt = request.dealt_steps(document_tokens, groups)
        steps = [[tokens for tokens, _ in step] for step in dealt]
        of_steps = [[of_batch for _, of_batch in step if of_batch is not None] for step in dealt]
    steps = steps or request.steps(document_tokens)
    simulation, done = run_steps(request, profile, steps, track, keys, of_steps)
    return make_result(simulation, steps, done, token_budget), simulation.costs.notes
