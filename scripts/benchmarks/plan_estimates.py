"""Compares the peak memory that `distca plan` estimates with measured peaks; prints the rows of
docs/benchmarks/training.md.

    python scripts/benchmarks/plan_estimates.py

Documents of every row are planned as training plans them.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distca_hf.analysis.memory import estimate_memory
from distca_hf.analysis.models import PRESETS
from distca_hf.analysis.training_setup import GIB, Checkpointing, TrainingSetup
from distca_hf.arrays import ceil_div
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.transfers import bytes_between
from lib.documents import parse_documents
from lib.parser import parser_of
from lib.planning.planners import llama_part, whole_documents
from lib.tables import head, row


PEAKS = Path(__file__).parents[2] / "docs" / "benchmarks" / "measured-peaks.json"
LLAMA_8B = PRESETS["llama3-8b"]
HEADS, TOKEN_BYTES = LLAMA_8B.heads, LLAMA_8B.token_bytes  # of all models that were measured
WHOLE, SMALL = llama_part(4).size, llama_part(4, 32_000).size  # four layers, by their vocabulary
HEAD_PARAMETERS = WHOLE.embedding_parameters // 2  # as many as the embedding has


# Models of the rows: without a name that of attention_step.py, then that of training_run.py.
SIZES = {
    "": replace(
        WHOLE,
        vocabulary=0,
        parameters=WHOLE.parameters - HEAD_PARAMETERS,
        embedding_parameters=HEAD_PARAMETERS,
    ),
    "vocabulary of 32,000": SMALL,
    **{name: size for name in ("llama3-8b", "qwen3-4b") if (size := PRESETS[name].size)},
}


@dataclass(frozen=True)
class PeakRow:
    """Most memory that torch had given out at once, measured on H200s (docs/benchmarks/training.md)."""

    gpus: int
    # Their lengths. Short documents of training_run.py have 512 to 8192 tokens; so many fill up a batch as here.
    documents: str
    # "local" (packs in order), "whole" (whole documents to the least loaded rank), "placed", or "fixed" (packs in
    # order, tasks move)
    way: str
    gib: float  # measured
    model: str = ""  # name of its size
    checkpointing: Checkpointing = "recomputed"
    liger: bool = False
    optimizer_bytes: int = 0  # bytes of its state for each weight; 0 without an optimizer
    # most bytes of received rows that waited; 0 with `kv_residency="refetch"`, and in runs before 2026-11-22, when no
    # rows waited yet
    kv_budget_bytes: float = 4 * GIB  # the default of `kv_budget_gib`
    tensor_ranks: int = 1  # ranks that hold the same documents


def read_peaks() -> list[PeakRow]:
    """Returns the measured rows."""
    return [PeakRow(**row) for row in json.loads(PEAKS.read_text())["rows"]]


def load_of(peak: PeakRow) -> tuple[int, int]:
    """Returns the most tokens that a rank holds, and the most bytes that one receives in a layer."""
    lengths, num_ranks = np.array(parse_documents(peak.documents)), peak.gpus // peak.tensor_ranks
    if peak.way == "whole":
        return max(int(lengths[numbers].sum()) for numbers in whole_documents(lengths, num_ranks)), 0
    in_order = fill_in_order(lengths, num_ranks)
    if peak.way == "local":
        return int(in_order.rank_tokens.max()), 0
    if peak.way == "fixed":
        plan = plan_by_moving(in_order, HEADS.groups, token_bytes=TOKEN_BYTES)
    else:
        config = DistCAConfig(tokens_per_rank=ceil_div(int(lengths.sum()), num_ranks))
        plan = PlacedPlanner(config, num_ranks, HEADS.groups).plan(lengths)
    return int(plan.layout.rank_tokens.max()), int(bytes_between(plan, TOKEN_BYTES).sum(axis=0).max())


def estimated_gib(peak: PeakRow) -> float:
    """Returns the peak of the rank with most tokens, as estimated."""
    tokens, received = load_of(peak)
    setup = TrainingSetup(
        peak.gpus,
        checkpointing=peak.checkpointing,
        liger=peak.liger,
        optimizer_bytes=peak.optimizer_bytes,
        kv_budget_bytes=peak.kv_budget_bytes,
        tensor_ranks=peak.tensor_ranks,
    )
    return estimate_memory(SIZES[peak.model].decoder(HEADS), setup, tokens, received // peak.tensor_ranks).total / GIB


def main() -> None:
    parser_of(__doc__).parse_args()
    print(head(["GPUs", "documents", "", "measured GiB", "estimated", "off by"], text_columns=3))
    off: dict[str, float] = {}
    for peak in read_peaks():
        estimated = estimated_gib(peak)
        error = estimated / peak.gib - 1
        off[peak.way] = max(off.get(peak.way, 0.0), abs(error))
        tensor = f", {peak.tensor_ranks} tensor ranks" * (peak.tensor_ranks > 1)
        words = f"{SIZES[peak.model].layers} layers, {peak.way}, attention {peak.checkpointing}{tensor}"
        print(row([peak.gpus, peak.documents, words, f"{peak.gib:g}", f"{estimated:.1f}", f"{error:+.1%}"]))
    print("\npeak memory, off by at most: " + ", ".join(f"{way} {most:.1%}" for way, most in off.items()))


if __name__ == "__main__":
    main()
