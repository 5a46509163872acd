"""`distca plan` says what layers of a model compute in training, if documents of its lengths share prefixes."""

import json
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
Rows = list[tuple[int, str | None, int]]  # length, group and prefix of each row of a rank


def _train(micro_batches: list[list[Rows]]) -> tuple[PlanTotals, list[tuple[int, ...]], list[float]]:
    """What a training logs of these micro-batches, the tokens that layers of each rank compute, and the operations of
    layers, attention and head."""
    plugin = distca_hf.DistCAPlugin()
    model = nn.parallel.DistributedDataParallel(distca_hf.enable(tiny_model().train(), plugin))
    for of_ranks in micro_batches:
        rows = of_ranks[dist.get_rank()]
        longest = max(length for length, _, _ in rows)
        ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
        for row, (length, name, prefix) in enumerate(rows):
            ids[row, :length], mask[row, :length] = torch.randint(3, VOCABULARY, (length,)), 1
            of_prefix = torch.Generator().manual_seed(0 if name is None else int(name[1:]))
            ids[row, :prefix] = torch.randint(3, VOCABULARY, (prefix,), generator=of_prefix)
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


def test_figures_are_those_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of four are on two ranks, because a rank takes three rows of a micro-batch."""
    rng, file, config = np.random.default_rng(1), tmp_path / "lengths.jsonl", tmp_path / "config.json"
    rows = [
        {"length": int(prefix + rng.integers(5, 90)), "group": f"p{group}", "prefix_tokens": int(prefix)}
        for group, prefix in enumerate(rng.integers(300, 700, 5))
        for _ in range(4)
    ]
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
        of_rows = list(zip(tokens.tolist(), groups.names, groups.prefix_tokens.tolist(), strict=True))
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
