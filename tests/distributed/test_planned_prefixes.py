"""`distca plan` says what layers of a model compute in training, if documents of its lengths share prefixes."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import distca_hf
from distca_hf.analysis import given
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.models import SimulatedModel
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.cli import app
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.planning.kinds import PlanTotals
from support.models import VOCABULARY, tiny_model
from support.ranks import run_ranks


RANKS, BATCH_SIZE, MICRO_STEPS = 2, 3, 2
# Length, groups and prefixes of each row of a rank.
Rows = list[tuple[int, tuple[str, ...], tuple[int, ...]]]


def _train(micro_batches: list[list[Rows]]) -> tuple[PlanTotals, list[tuple[int, ...]], list[float]]:
    """What a training logs of these micro-batches, the tokens that layers of each rank compute, and the operations of
    layers, attention and head."""
    plugin = distca_hf.DistCAPlugin()
    model = nn.parallel.DistributedDataParallel(distca_hf.enable(tiny_model().train(), plugin))
    for of_ranks in micro_batches:
        rows = of_ranks[dist.get_rank()]
        longest = max(length for length, _, _ in rows)
        ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
        for row, (length, path, prefix) in enumerate(rows):
            ids[row, :length], mask[row, :length] = torch.randint(3, VOCABULARY, (length,)), 1
            for depth, (start, stop) in enumerate(pairwise([0, *prefix]), start=1):
                of_group = torch.Generator().manual_seed(int("1" + "".join(path[:depth])))
                ids[row, start:stop] = torch.randint(3, VOCABULARY, (stop - start,), generator=of_group)
        model(input_ids=ids, attention_mask=mask).logits.sum().backward()
    watch = watch_of(model.module)
    facts, flops = list(watch.planner.history), watch.flops
    layers, pairs, head = (
        np.array(sum(values))
        for values in (
            (sum(one.tokens) for one in facts),
            (sum(one.work) / one.rows_per_token for one in facts),
            (sum(one.head_tokens) for one in facts),
        )
    )
    amounts = (layers, 0 * pairs, 0 * head), (0 * layers, pairs, 0 * head), (0 * layers, 0 * pairs, head)
    totals = watch.planner.totals
    plugin.close()
    return totals, [one.tokens for one in facts], [float(flops.work(*each)) / len(facts) for each in amounts]


def _groups(rng: np.random.Generator) -> list[dict[str, object]]:
    """Groups of four are on two ranks, because a rank takes three rows of a micro-batch."""
    return [
        {"length": int(prefix + rng.integers(5, 90)), "group": str(group), "prefix_tokens": int(prefix)}
        for group, prefix in enumerate(rng.integers(300, 700, 5))
        for _ in range(4)
    ]


def _trees(rng: np.random.Generator) -> list[dict[str, object]]:
    """Four trees of five rows: two of them branch off from the others after the prompt, and then from each other."""
    rows = list[dict[str, object]]()
    for tree, prompt in enumerate(rng.integers(300, 500, 4).tolist()):
        for path in (["0"], ["0", "1"], ["0", "1", "2"], ["0", "1", "2"], ["0", "3"]):
            prefixes = [prompt + 270 * depth for depth in range(len(path))]
            length = prefixes[-1] + int(rng.integers(20, 300))
            rows.append({"length": length, "group": [str(tree), *path[1:]], "prefix_tokens": prefixes})
    return rows


@pytest.mark.parametrize("drawn", [_groups, _trees])
def test_figures_are_those_of_a_training(
    drawn: Callable[[np.random.Generator], list[dict[str, object]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, file, config = np.random.default_rng(1), tmp_path / "lengths.jsonl", tmp_path / "config.json"
    rows = drawn(rng)
    rows += [{"length": int(length)} for length in rng.integers(5, 400, 4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_model().config.save_pretrained(tmp_path)
    monkeypatch.setattr(given, "MOST_PLANNED_RANKS", RANKS * MICRO_STEPS)
    options = [
        "--gpus",
        RANKS,
        "--batch-size",
        BATCH_SIZE,
        "--micro-steps",
        MICRO_STEPS,
        "--model",
        config,
        "--seed",
        3,
    ]
    done = CliRunner().invoke(app, ["plan", str(file), *map(str, options), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    shared = said["shared_prefixes"]

    model, lengths = SimulatedModel.of(find_model(str(config))), read_lengths(file)
    request = SimulationRequest(model, RANKS, 1, None, MICRO_STEPS, batches=1, seed=3, batch_size=BATCH_SIZE)
    [step] = request.dealt_steps(lengths.tokens, lengths.groups)
    micro_batches = []
    for tokens, groups in step:
        assert groups is not None
        of_rows = list(zip(tokens.tolist(), groups.paths, groups.prefix_tokens, strict=True))
        micro_batches.append([of_rows[:BATCH_SIZE], of_rows[BATCH_SIZE:]])
    totals, tokens_of_ranks, work = run_ranks(RANKS, _train, tmp_path / "ranks", micro_batches)[0]

    assert said["micro_batches"] == totals.micro_batches == MICRO_STEPS
    assert shared["tokens"] == totals.tokens
    assert shared["tokens"] - shared["computed_tokens"] == totals.shared_tokens > 0.2 * totals.tokens
    assert shared["computed_tokens"] == sum(map(sum, tokens_of_ranks))
    assert [shared[f"{part}_flops"] for part in ("layers", "attention", "head")] == pytest.approx(work)
    for name in ("token_imbalance_before", "imbalance_before", "step_imbalance_before"):
        assert said[name] == pytest.approx(getattr(totals, name) / MICRO_STEPS)
    for name in ("token_imbalance", "imbalance", "step_imbalance"):  # which row holds a prefix depends on its tokens
        assert said[name] == pytest.approx(getattr(totals, name) / MICRO_STEPS, abs=0.01)
