"""distca plan: what it prints, as a user would call it."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from distca_hf.analysis import tables
from distca_hf.analysis.check.find import find_candidate
from distca_hf.analysis.epoch import (
    Figures,
    PackedEpoch,
    PlannedMicroBatch,
    divide_batch,
    figures_of,
    make_report,
    pack_epoch,
)
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.models import PRESETS, preset
from distca_hf.analysis.request import PlanRequest, plan_micro_steps
from distca_hf.cli import app
from distca_hf.cost import causal_pairs
from distca_hf.errors import PackingError
from distca_hf.layout import Topology
from support.models import tiny_config


pytestmark = pytest.mark.usefixtures("few_plans")

PRETRAIN = Path(__file__).parents[3] / "examples" / "lengths" / "pretrain.json.gz"
# As many of its lengths as fill a hundred micro-batches of 8 x 16,384 tokens.
SOME = 3500
KEYS = {
    "ranks",
    "tokens_per_rank",
    "ranks_per_node",
    "micro_steps",
    "documents",
    "tokens_min",
    "tokens_max",
    "imbalance_before",
    "imbalance",
    "bytes_total",
    "bytes_max_rank",
    "bytes_internode_max",
    "planning_seconds",
    "fingerprint",
}


def plan(lengths: Path, *options: str | int | Path, ranks: int = 8, tokens_per_rank: int = 16384) -> Any:
    """Returns the output of the command: an object with --json, else text."""
    arguments = ["plan", str(lengths), "--gpus", str(ranks), "--tokens-per-rank", str(tokens_per_rank)]
    result = CliRunner().invoke(app, [*arguments, *map(str, options)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in options else result.stdout


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = json.loads(gzip.decompress(PRETRAIN.read_bytes()))[:SOME]
    return write_lengths(tmp_path_factory.mktemp("lengths") / "some.json", np.minimum(lengths, 60_000).tolist())


def write_lengths(path: Path, lengths: list[int]) -> Path:
    path.write_text(json.dumps(lengths))
    return path


def world(ranks: int, tokens_per_rank: int, micro_steps: int, **more: Any) -> PlanRequest:
    return PlanRequest(ranks, tokens_per_rank, 8, micro_steps, preset("llama3-8b"), **more)


def test_json_says_everything() -> None:
    began = time.perf_counter()
    said = plan(PRETRAIN, "--json")
    took_seconds = time.perf_counter() - began
    assert said.keys() >= KEYS
    assert (said["ranks"], said["tokens_per_rank"]) == (8, 16384)
    assert 0 <= said["tokens_max"] - said["tokens_min"] <= 1
    assert 8 * 16384 - said["tokens"] < 64
    assert 1.0 <= said["imbalance"] <= 1.01 < said["imbalance_before"]
    assert 0 < said["bytes_max_rank"] < said["bytes_total"]
    assert said["bytes_internode_max"] == 0  # one node
    assert 0 < said["planning_seconds"] < took_seconds
    assert (said["seed"], said["epoch"]) == (0, 0)
    assert said["epoch_micro_batches"] > 1000
    assert [way["key"] for way in said["estimates"]["ways"]] == ["plain", "sorted_packs", "placed"]


@pytest.mark.parametrize("layout", ["placed", "fixed"])
def test_all_ways_to_train_if_asked_for(layout: str, some: Path) -> None:
    said = plan(some, "--json", "--compare", "--ranks-per-node", 4, "--layout", layout)["estimates"]
    ways = {way["key"]: way for way in said["ways"]}
    ring = next(key for key in ways if key.startswith("ring_"))
    assert ways.keys() >= {"plain", "sorted_packs", "whole_documents", "given", "placed"}
    assert ("tasks_moved" in ways) == (layout == "fixed")
    assert ways["plain"]["times_as_fast"] == 1.0
    assert ways["plain"]["received_bytes"] == 0 < ways[ring]["received_bytes"]
    assert said["over_plain"] == ways["placed" if layout == "placed" else "tasks_moved"]["times_as_fast"]


def test_the_seed_decides_and_nothing_else(some: Path) -> None:
    same = [plan(some, "--json", "--seed", 5) for _ in range(2)]
    assert same[0]["fingerprint"] == same[1]["fingerprint"]
    assert same[0]["fingerprint"] != plan(some, "--json", "--seed", 6)["fingerprint"]


def test_figures_are_those_of_the_tasks(tmp_path: Path) -> None:
    """Two documents on two ranks, fixed: rank 0 has all the work until a part of it moves."""
    lengths = write_lengths(tmp_path / "lengths.json", [1000, *[1] * 1000])
    options = ("--json", "--lengths-are-batch", "--layout", "fixed")
    said = plan(lengths, *options, ranks=2, tokens_per_rank=1000)
    pairs = causal_pairs(0, 1000)
    assert said["documents"] == 1001
    assert (said["choices"], said["whole_epoch"]["micro_batches"]) == ([], 1)
    assert said["whole_epoch"]["imbalance_before"]["mean"] == pytest.approx(said["imbalance_before"])
    assert said["imbalance_before"] == pytest.approx(2 * pairs / (pairs + 1000))
    assert said["imbalance"] <= 1.03
    assert said["tokens_min"] == said["tokens_max"] == 1000
    assert said["bytes_total"] > 0


def test_a_batch_may_hold_fewer_tokens(tmp_path: Path) -> None:
    lengths = write_lengths(tmp_path / "lengths.json", [64, 64, 64, 64])
    said = plan(lengths, "--json", "--lengths-are-batch", ranks=4, tokens_per_rank=100)
    assert said["seed"] is said["epoch"] is said["epoch_micro_batches"] is None
    assert (said["tokens"], said["tokens_min"], said["tokens_max"], said["bytes_total"]) == (256, 64, 64, 0)
    assert said["imbalance"] == 1.0


@pytest.mark.parametrize("layout", ["placed", "fixed"])
@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_any_world(ranks: int, layout: str, tmp_path: Path) -> None:
    lengths = write_lengths(tmp_path / "lengths.json", [5, 1, 1, 900, 30])
    said = plan(lengths, "--json", "--lengths-are-batch", "--compare", "--layout", layout, ranks=ranks)
    assert said["documents"] == 5
    assert said["tokens"] == 937


def test_micro_steps_are_planned_together(some: Path) -> None:
    said = plan(some, "--json", "--micro-steps", 4, tokens_per_rank=32768)
    assert said["micro_steps"] == 4
    assert said["tokens"] <= 4 * 8 * 32768
    assert said["tokens_max"] <= 32768
    assert said["imbalance"] <= 1.005
    # Sorted packs are faster than packs as they come: those that run at the same time are about as heavy.
    assert said["imbalance"] < said["imbalance_before"]
    assert 1.0 < said["estimates"]["over_sorted"] < said["estimates"]["over_plain"]


def test_long_documents_of_an_optimizer_step_train_together() -> None:
    """Four micro-steps, each with a document of one and a half ranks, which has to be cut; grouped, they need not."""
    batches = [np.array([1500, *[50] * 50]) for _ in range(4)]
    together = make_report(world(4, 1000, 4), PackedEpoch.of_batches(batches)).figures
    alone = [make_report(world(4, 1000, 1), PackedEpoch.of_batches([batch])).figures for batch in batches]
    assert together.bytes_total < sum(one.bytes_total for one in alone)
    assert together.imbalance < 1.01


def test_a_step_that_cannot_be_regrouped_stays_as_it_came() -> None:
    batches = [np.array([50, 25, 25]), np.array([40, 30, 30])]  # 50 + 40 leaves no way to fill up with the others
    report = make_report(world(1, 100, 2), PackedEpoch.of_batches(batches))
    assert report.tokens == 200


def test_the_model_decides_bytes(tmp_path: Path) -> None:
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lengths = write_lengths(tmp_path / "lengths.json", [2000, *[100] * 20])
    options = ("--json", "--lengths-are-batch", "--layout", "fixed")
    world = {"ranks": 2, "tokens_per_rank": 2000}
    of_preset = plan(lengths, *options, "--model", "llama3-8b", **world)
    of_config = plan(lengths, *options, "--model", tmp_path / "config.json", **world)
    assert of_config["bytes_total"] == 2 * of_preset["bytes_total"] > 0


def test_the_table_can_be_read() -> None:
    text = plan(PRETRAIN, "--compare", ranks=64)
    for words in (
        *("mean over the epoch", "95 % of micro-batches are below", "worst micro-batch"),
        *("speed over plain packing", "speed over sorted packs", "FSDP2", "ZeRO-3", "peak", "Assumed:"),
        *("imbalance, planned", "largest rank, between nodes", "longest document"),
        *("zigzag ring over", "Ulysses over", "whole documents", "sorted packs", "(--cluster h200)"),
    ):
        assert words in text
    assert str(PRETRAIN) in text.replace("\n", "")
    assert "placed layout: 377 micro-batches in an epoch, seed 0." in " ".join(text.split())
    assert "the first of 377 micro-batches of epoch 0, seed 0" in text
    bars = [line for line in text.splitlines() if line.lstrip()[:1].isdigit() and "-" in line.split()[0]]
    assert len(bars) == 32
    assert bars[-1].split()[0] == "62-63"


@pytest.mark.parametrize("columns", [40, 120])
def test_tables_fit_the_terminal(columns: int, some: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is longer, no figure and no name is cut short."""
    monkeypatch.setattr(tables, "COLUMNS", columns)
    options = ("--compare", "--micro-steps", 2, "--ranks-per-node", 4)
    text = plan(some, *options, ranks=64, tokens_per_rank=32768)
    lines = text.replace(str(some), "").splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in text
    for words in ("131,072", "8,192", "distca", "ZeRO-3", "zigzag"):
        assert any(words in line for line in lines), words


def test_the_epoch_and_estimates_are_in_json() -> None:
    said = plan(PRETRAIN, "--json", "--liger", "--checkpointing", "recomputed", "--gpu-gib", 40)
    whole = said["whole_epoch"]
    assert whole["documents"] == 99_519
    assert whole["micro_batches"] == said["epoch_micro_batches"]
    assert 0 < whole["planned_micro_batches"] < whole["micro_batches"]
    for figure in ("imbalance_before", "imbalance"):
        spread = whole[figure]
        assert 1 <= spread["mean"] <= spread["p95"] <= spread["worst"]
    assert whole["imbalance"]["worst"] < 1.01 < whole["imbalance_before"]["mean"]
    estimated = said["estimates"]
    assert 0 < estimated["attention_share"] < 1
    assert estimated["over_sorted"] == estimated["over_plain"] > 0  # one micro-step: there is nothing to sort
    assert set(estimated["memory_bytes"]) == {"fsdp2", "zero3"}
    assert estimated["assumptions"]["checkpointing"] == "recomputed"
    choices = {choice["tokens_per_rank"]: choice for choice in said["choices"]}
    assert choices[8192]["too_long_documents"] > 0
    assert choices[16384]["memory_bytes"] == estimated["memory_bytes"]["fsdp2"]["total"]
    assert [choice["fits"] for choice in choices.values()] == sorted(
        (choice["fits"] for choice in choices.values()), reverse=True
    )


def test_a_model_of_unknown_size_has_no_estimates(tmp_path: Path) -> None:
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lengths = write_lengths(tmp_path / "lengths.json", [2000, *[100] * 20])
    options = ("--model", tmp_path / "config.json")
    assert plan(lengths, "--json", *options)["estimates"] is None
    assert "its size is not known, so speed and memory are not estimated" in plan(lengths, *options).replace("\n", " ")


def test_folder_with_the_name_of_a_built_in_model_is_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all commands."""
    tiny_config("llama", dtype="bfloat16").save_pretrained(tmp_path / "llama3-8b")
    monkeypatch.chdir(tmp_path)

    shape, candidate = find_model("llama3-8b"), find_candidate("llama3-8b")
    assert shape.size is not None
    assert shape.size.layers == candidate.config.num_hidden_layers < 32


def test_a_config_of_transformers_is_counted(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 100, "dtype": "bfloat16"}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    lengths = write_lengths(tmp_path / "lengths.json", [2000, *[100] * 20])
    by_path = plan(lengths, "--json", "--model", tmp_path)
    assert by_path == {**plan(lengths, "--json", "--model", tmp_path / "config.json"), **_times(by_path)}
    state = 2 * (32 * 32 * 3 + 3 * 32 * 64 + 2 * 32) + 32 + 2 * 100 * 32
    assert by_path["estimates"]["memory_bytes"]["fsdp2"]["state"] == 12 * state // 8


def _times(said: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures that differ from call to call."""
    return {"planning_seconds": said["planning_seconds"]}


def test_a_fresh_process_needs_no_torch(some: Path) -> None:
    code = "import sys; from distca_hf.cli import app; app(standalone_mode=False); assert 'torch' not in sys.modules"
    arguments = ["plan", str(some), "--gpus", "8", "--tokens-per-rank", "65536", "--json", "--compare"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONHASHSEED": "7"}
    said = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("\n") == 1
    assert json.loads(said.stdout)["fingerprint"] == plan(some, "--json", tokens_per_rank=65536)["fingerprint"]


def test_terminals_that_know_no_blocks_get_bars_too(some: Path) -> None:
    arguments = ["plan", str(some), "--gpus", "2", "--tokens-per-rank", "65536"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code = "from distca_hf.cli import main; main()"
    said = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stderr
    assert "####" in said.stdout


def test_a_batch_is_divided_into_micro_steps_in_order() -> None:
    packed = divide_batch(np.array([10, 30, 5, 15, 20, 20]), world(2, 30, 2))
    assert [batch.tolist() for batch in packed.first_step(2)] == [[10, 30, 5, 15], [20, 20]]
    assert packed.seed is None


def test_no_micro_step_of_a_batch_holds_more_than_the_ranks() -> None:
    """In order the first micro-step would have [60, 60]."""
    step = divide_batch(np.array([60, 60, 40, 40]), world(1, 100, 2)).first_step(2)
    assert [sorted(batch.tolist()) for batch in step] == [[40, 60], [40, 60]]
    with pytest.raises(PackingError, match="do not fit into 2 micro-steps"):
        divide_batch(np.array([60, 60, 60]), world(1, 100, 2))


@pytest.mark.parametrize(("overlong", "kept"), [("split", [40, 40, 40, 10]), ("truncate", [40, 10])])
def test_overlong_documents_are_cut_if_asked(overlong: str, kept: list[int]) -> None:
    lengths = np.array([120, 10])
    for step in (
        divide_batch(lengths, world(2, 20, 4, overlong=overlong)).first_step(4),
        pack_epoch(lengths, world(2, 20, len(kept), overlong=overlong), seed=0).first_step(len(kept)),
    ):
        assert sorted(np.concatenate(step).tolist()) == sorted(kept)


def test_presets_are_what_their_configs_say() -> None:
    llama = preset("Llama3-8B")
    assert (llama.token_bytes.query, llama.token_bytes.output, llama.token_bytes.key_value) == (8192, 8192, 4096)
    assert llama.heads.groups == 8
    assert preset("llama3-70b").token_bytes.query == 16384
    assert all(shape.heads.query % shape.heads.key_value == 0 for shape in PRESETS.values())


def test_figures_by_hand() -> None:
    """Four ranks on two nodes, two micro-steps."""
    none = np.zeros(0, dtype=np.int64)
    sent = np.array([[0, 1, 2, 0], [0, 0, 0, 0], [0, 0, 0, 5], [4, 0, 0, 0]])
    steps = [
        PlannedMicroBatch(none, np.array([4, 2, 1, 1]), np.array([7, 8, 8, 8]), sent),
        PlannedMicroBatch(none, np.array([2, 2, 2, 2]), np.array([9, 8, 8, 8]), np.zeros_like(sent)),
    ]
    assert figures_of(steps, Topology(4, 2)) == Figures(
        tokens_min=7,
        tokens_max=9,
        imbalance=(4 + 2) / (2 + 2),
        bytes_total=12,
        bytes_max_rank=5,  # rank 2 sends, and rank 3 receives, 5
        bytes_internode_max=4,  # rank 3 to rank 0; rank 0 to rank 2 is 2
    )


def test_micro_steps_that_divide_heads_weigh_no_more_than_others() -> None:
    """Work counts pairs x parts of heads; the second micro-step has no imbalance and as many pairs as the first."""
    two = np.array([2, 2])
    steps = [
        PlannedMicroBatch(two, np.array([8 * 3, 8 * 1]), two, np.zeros((2, 2), dtype=np.int64), head_parts=8),
        PlannedMicroBatch(two, two, two, np.zeros((2, 2), dtype=np.int64)),
    ]
    assert figures_of(steps, Topology(2, 2)).imbalance == (3 + 2) / (2 + 2)
    request = world(2, 100, 2, layout="fixed")
    batches = [np.array([100, *[1] * 100]), np.array([50, 50, 50, 50])]
    plans = plan_micro_steps(request, batches)
    assert [plan.tasks.head_groups for plan in plans] == [8, 1]
    assert (
        make_report(request, PackedEpoch.of_batches(batches)).work.tolist()
        == (plans[0].work + 8 * plans[1].work).tolist()
    )


@pytest.mark.parametrize("layout", ["placed", "fixed"])
def test_a_batch_may_leave_micro_steps_empty(layout: str, tmp_path: Path) -> None:
    """They are balanced, as all else that nobody waits for."""
    lengths = write_lengths(tmp_path / "lengths.json", [500, 300])
    options = ("--json", "--lengths-are-batch", "--micro-steps", 4, "--compare", "--layout", layout)
    said = plan(lengths, *options, ranks=2, tokens_per_rank=1024)
    assert said["whole_epoch"]["micro_batches"] == 4
    assert 1.0 < said["whole_epoch"]["imbalance_before"]["mean"] < said["whole_epoch"]["imbalance_before"]["worst"] < 2
