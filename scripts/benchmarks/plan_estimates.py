"""Compares with measured figures the memory that `distca plan` estimates, and speed at fixed rates of operations, as a
training logs it; prints tables for docs/benchmarks.

    python scripts/benchmarks/plan_estimates.py

Every row of `lib/planning/measured.py` is planned as training plans it. Estimates know documents, the model and the
number of GPUs, not their links.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from distca_hf.analysis.memory import Checkpointing, TrainingSetup, estimate_memory
from distca_hf.analysis.request import ModelSize
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.cost import Heads, causal_pairs_of
from distca_hf.flops import H200, H200_LIGER, Rates, StepCost, StepFlops
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.transfers import bytes_between
from lib.documents import parse_documents
from lib.parser import parser_of
from lib.planning.measured import LLAMA_8B, PEAKS, STEPS, PeakRow, StepRow
from lib.planning.planners import whole_documents
from lib.tables import head


HEADS, TOKEN_BYTES = LLAMA_8B.heads, LLAMA_8B.token_bytes  # of all models that were measured


def step_cost(size: ModelSize, heads: Heads, checkpointing: Checkpointing = "saved", rates: Rates = H200) -> StepCost:
    """Returns the cost of a model whose weights are all trained.

    Args:
        size: size of the model; a size without vocabulary is a model without a head.
        heads: heads of one layer.
        checkpointing: whether layers are computed twice without attention ("saved"), with it ("recomputed"), or never
            ("none").
        rates: operations per second of the GPU.
    """
    weights = size.layer_parameters + size.head_parameters
    pair_forward = 2 * (heads.dim + heads.value_dim) * heads.query * size.layers
    return StepFlops.of(weights, weights, pair_forward, size.head_parameters).cost(
        recomputes_layers=checkpointing != "none", recomputes_attention=checkpointing == "recomputed", rates=rates
    )


def loads(documents: str, num_ranks: int, way: str) -> tuple[IntArray, IntArray, int]:
    """Returns `[ranks]` tokens and attended pairs, and bytes that the rank that receives most receives in a layer.

    Args:
        documents: as "131072,96x4096".
        num_ranks: ranks.
        way: "local" (in order), "whole" (whole documents to the least loaded rank), "placed", or "fixed" (in order,
            tasks move).
    """
    lengths = np.array(parse_documents(documents))
    if way == "local":
        layout = fill_in_order(lengths, num_ranks)
        return layout.rank_tokens, layout.rank_work, 0
    if way == "whole":
        packs = [lengths[numbers] for numbers in whole_documents(lengths, num_ranks)]
        work = [causal_pairs_of(np.zeros_like(pack), pack).sum() for pack in packs]
        return np.array([pack.sum() for pack in packs]), np.array(work), 0
    if way == "fixed":
        plan = plan_by_moving(fill_in_order(lengths, num_ranks), HEADS.groups, token_bytes=TOKEN_BYTES)
        received = bytes_between(plan, TOKEN_BYTES).sum(axis=0).max()
        return plan.layout.rank_tokens, plan.work // plan.tasks.head_groups, int(received)
    tokens_per_rank = ceil_div(int(lengths.sum()), num_ranks)
    planner = PlacedPlanner(DistCAConfig(tokens_per_rank=tokens_per_rank), num_ranks, HEADS.groups)
    plan = planner.plan(lengths)
    received = bytes_between(plan, TOKEN_BYTES).sum(axis=0).max()
    return plan.layout.rank_tokens, plan.work // plan.tasks.head_groups, int(received)


def step_seconds(cost: StepCost, rank_tokens: IntArray, rank_pairs: IntArray) -> float:
    """Returns the seconds of the slowest rank, of `[ranks]` tokens that each holds, and pairs that it attends."""
    return float((rank_tokens * cost.token_seconds + rank_pairs * cost.pair_seconds).max())


def estimated_ratio(row: StepRow) -> float:
    """Returns the step of packing alone over that of placed documents, as estimated."""
    rates = H200_LIGER if row.liger else H200
    tokens, pairs, _ = loads(row.documents, row.num_ranks, "whole" if row.whole else "local")
    local = step_seconds(step_cost(row.size, HEADS, row.local_checkpointing, rates), tokens, pairs)
    tokens, pairs, _ = loads(row.documents, row.num_ranks, "placed")
    return local / step_seconds(step_cost(row.size, HEADS, row.checkpointing, rates), tokens, pairs)


def estimated_gib(row: PeakRow) -> float:
    """Returns the peak of the rank with most tokens, as estimated."""
    tokens, _, received = loads(row.documents, row.num_ranks // row.tensor_ranks, row.way)
    setup = TrainingSetup(
        row.num_ranks,
        checkpointing=row.checkpointing,
        liger=row.liger,
        optimizer_bytes=row.optimizer_bytes,
        kv_budget_bytes=row.kv_budget_bytes,
        tensor_ranks=row.tensor_ranks,
    )
    received //= row.tensor_ranks
    return estimate_memory(row.size.decoder(HEADS), setup, int(tokens.max()), received).total / 2**30


def main() -> None:
    parser_of(__doc__).parse_args()
    print(head(["page", "GPUs, links", "documents", "", "measured", "estimated", "off by"], text_columns=4))
    steps = [(row, row.local_ms / row.placed_ms, estimated_ratio(row)) for row in STEPS]
    for row, measured, estimated in steps:
        notes = (
            ["Liger"] * row.liger
            + ["documents whole"] * row.whole
            + ["attention saved"] * (row.checkpointing == "saved")
        )
        print(
            f"| {row.page} | {row.num_ranks}, {row.links} | {row.documents} | {', '.join(notes)} "
            f"| {measured:.2f} | {estimated:.2f} | {estimated / measured - 1:+.1%} |"
        )
    _print_largest(steps, "speed-up", lambda row: row.links)
    print("\n" + head(["page", "GPUs", "documents", "", "measured GiB", "estimated", "off by"], text_columns=4))
    peaks = [(peak, peak.gib, estimated_gib(peak)) for peak in PEAKS]
    for peak, measured, estimated in peaks:
        tensor = f", {peak.tensor_ranks} tensor ranks" * (peak.tensor_ranks > 1)
        print(
            f"| {peak.page} | {peak.num_ranks} | {peak.documents} | {peak.size.layers} layers, {peak.way}, attention "
            f"{peak.checkpointing}{tensor} | {measured:g} | {estimated:.1f} | {estimated / measured - 1:+.1%} |"
        )
    _print_largest(peaks, "peak memory", lambda peak: peak.way)


def _print_largest(rows: Iterable[tuple[Any, float, float]], figure: str, group: Callable[[Any], str]) -> None:
    """Prints how far estimates are off at most, group by group."""
    off: dict[str, float] = {}
    for row, measured, estimated in rows:
        off[group(row)] = max(off.get(group(row), 0.0), abs(estimated / measured - 1))
    print(f"\n{figure}, off by at most: " + ", ".join(f"{name} {most:.1%}" for name, most in off.items()))


if __name__ == "__main__":
    main()
