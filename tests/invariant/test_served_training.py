"""Training with attention servers follows one process with sdpa: placed batches, and batches that others packed."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import test_packs_training as packs
import test_training as placed

from support.checkpointing import LAYER_CALLS
from support.ranks import run_ranks
from support.thorough import is_thorough
from support.training import DISTRIBUTED_TYPES, MANY_STEPS, References, assert_same_curve


def with_packs(kind: str, *arguments: Any) -> packs.Run:
    return packs.Run(kind, "attach", *arguments)


def with_placed(*arguments: Any, checkpointing: str = "") -> placed.Run:
    return placed.Run("llama", *arguments, checkpointing=checkpointing)


# Servers, and the training that they serve.
RUNS: list[tuple[int, placed.Run | packs.Run]] = [
    (1, with_placed(1, "none", "plain", 1)),
    (2, with_placed(2, "fsdp2", "trainer", 3)),
    (1, with_placed(2, "zero3", "trainer", 3, checkpointing="reentrant")),
    (1, with_packs("collator", 1, "none", 1)),
    (1, with_packs("packed dataset", 2, "fsdp2", 3, "trl")),
    (2, with_packs("padding free", 2, "ddp", 3, "selective")),
]
# With these, all pairs of options.
MORE_RUNS: list[tuple[int, placed.Run | packs.Run]] = [
    (1, with_placed(2, "ddp", "plain", 3)),
    (1, with_placed(2, "fsdp2", "trainer", 1, checkpointing="offloaded, tiles")),
    (2, with_placed(2, "ddp", "trainer", 1, checkpointing="reentrant")),
    (2, with_placed(2, "zero3", "sft", 1, checkpointing="trl")),
    (2, with_packs("collator", 2, "zero3", 1)),
    (1, with_packs("collator", 2, "fsdp2", 1, "reentrant")),
]


def name(value: object) -> str:
    if isinstance(value, int):
        return f"{value} servers"
    return placed.name(value) if isinstance(value, placed.Run) else packs.name(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("servers", "run"), [*RUNS, *(MORE_RUNS if is_thorough() else ())], ids=name)
def test_losses_follow_one_process_sdpa(
    servers: int,
    run: placed.Run | packs.Run,
    references: References,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    if is_thorough():  # fewer if gradients are summed: losses jump after step 24 of these, and differences with them
        run = replace(run, steps=MANY_STEPS if run.accumulation == 1 else 20)
    if isinstance(run, placed.Run):
        train, expected = placed.train, placed.reference_of(run, references)
    else:
        train, expected = packs.train, packs.reference_of(run, references)
    curve = run_ranks(run.world_size, train, tmp_path, run, references.initial_models["llama"], servers=servers)[0]

    if isinstance(run, packs.Run) or run.loop != "plain":
        wrap = run.wrap.rstrip("123") if run.world_size > 1 else "ddp"  # Accelerate sees a group of one
        assert curve.distributed_type == DISTRIBUTED_TYPES[wrap]
    assert len(curve.losses) == run.steps
    assert curve.layer_calls == LAYER_CALLS[run.checkpointing]
    assert_same_curve(curve, expected, record_property)


OPTIONS: dict[str, tuple[object, ...]] = {
    "processes": ((1, 1), (2, 1), (2, 2)),
    "wrap": ("ddp", "fsdp2", "zero3"),
    "attention": ("not checkpointed", "saved", "recomputed"),
    "accumulation": (1, 3),
    "batches": ("placed", "packs"),
}


def options(servers: int, run: placed.Run | packs.Run) -> dict[str, object]:
    attention = "not checkpointed" if not run.checkpointing else "saved"
    return {
        "processes": (run.world_size, servers),
        "wrap": run.wrap,
        "attention": "recomputed" if run.checkpointing == "reentrant" else attention,
        "accumulation": run.accumulation,
        "batches": "placed" if isinstance(run, placed.Run) else "packs",
    }


def test_all_options_are_trained_in_pairs() -> None:
    runs = [options(*run) for run in (*RUNS, *MORE_RUNS)]
    missing = [
        (one, other, values)
        for one, other in combinations(OPTIONS, 2)
        for values in product(OPTIONS[one], OPTIONS[other])
        if values not in {(run[one], run[other]) for run in runs}
    ]
    # One trainer alone is not wrapped.
    assert [pair for pair in missing if (1, 1) not in pair[2]] == []
