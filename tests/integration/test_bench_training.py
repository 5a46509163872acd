"""The benchmark of trainings: modes have the same documents and weights, and their losses are compared."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import get_scheduler

from support.scripts import run_script, small_llama


RANKS, STEPS, TOKENS_PER_RANK = 2, 3, 640
CONFIG = small_llama(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=8,
)


def test_modes_have_the_same_losses_and_another_limit_is_an_error(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps(CONFIG))
    model = f"--device cpu --config {config} --tokens-per-rank {TOKENS_PER_RANK} --out {out}"
    steps = f"--steps {STEPS} --warmup 1 --learning-rate 1e-2 --rising-steps 2"
    modes = "--modes distca,ulysses,given --most-difference 0"
    with pytest.raises(AssertionError, match=r"losses differ from those of distca by more than 0\.0"):
        run_script(RANKS, tmp_path, f"scripts/benchmarks/training_run.py {model} {steps} {modes}".split())
    figures = json.loads(out.read_text())
    runs = figures["runs"]

    assert figures["header"].endswith("learning rate 0.01, reached after 2 rising steps")
    assert [run["mode"] for run in runs] == ["distca", "ulysses", "given"]
    for run in runs:
        assert run["losses"] == pytest.approx(runs[0]["losses"], rel=1e-5)
        assert run["losses"][-1] < run["losses"][0]
        assert len(run["seconds"]) == STEPS
        assert run["tokens"] == [TOKENS_PER_RANK] * STEPS
        assert run["model_flops"] == runs[0]["model_flops"]
    assert max(runs[0]["imbalance"]) < min(runs[0]["imbalance_before"])


def test_a_long_document_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    words = ["scripts/benchmarks/training_run.py", "--device", "cpu", "--preset", "tiny", "--tokens-per-rank", "7"]
    with pytest.raises(AssertionError, match="2 ranks of 7 tokens hold 14: fewer than the long document's 135"):
        run_script(RANKS, tmp_path, words)


def test_documents_fill_every_micro_batch(script: Callable[[str], ModuleType]) -> None:
    documents = script("training_run").training_documents(3, 20_000, 32_768, vocabulary=1000)
    lengths = [len(tokens) for tokens in documents["input_ids"]]

    assert lengths.count(20_000) == 3
    assert sum(lengths) == 3 * 32_768
    assert max(max(tokens) for tokens in documents["input_ids"]) < 1000


def test_times_behind_the_first_steps_count(script: Callable[[str], ModuleType]) -> None:
    run = {"seconds": [9.0, 2.0, 2.0, 4.0], "tokens": [100] * 4, "model_flops": [40.0] * 4, "peak_flops": 100.0}
    assert script("lib.training.run").step_figures(run, 1) == {
        "step_seconds": 2.0,
        "tokens_per_second": 50.0,
        "utilisation": 0.2,
    }


@pytest.mark.parametrize(("rising_steps", "rates"), [(2, [0, 1.5e-5, 3e-5, 3e-5]), (0, [3e-5] * 4)])
def test_the_learning_rate_rises_and_stays(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, rising_steps: int, rates: list[float]
) -> None:
    words = ["--device", "cpu", "--steps", "4", "--rising-steps", str(rising_steps)]
    monkeypatch.setattr(sys, "argv", ["training_run.py", *words])
    options = script("training_run").parse()
    args = script("lib.training.run").training_arguments(options, "distca")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(4), 4)
    used = []
    for _ in range(4):
        used += schedule.get_last_lr()
        optimizer.step()
        schedule.step()

    assert used == pytest.approx(rates)


def test_a_loss_that_is_no_number_is_the_largest_difference(script: Callable[[str], ModuleType]) -> None:
    report = script("lib.training.run")
    run = {"losses": [1.0, 2.0, 3.0]}
    wrong = {"losses": [1.0, float("nan"), 9.0]}

    assert report.furthest(run, {"losses": [1.25, 2.5, 3.5]}) == (0.5, 2)
    assert report.furthest_in_words(run, {"losses": [1.25, 2.5, 3.5]}) == "5.0e-01 (step 2)"
    assert math.isnan(report.furthest(run, wrong)[0])
    assert report.furthest_in_words(run, wrong) == "nan (step 2)"
    assert report.furthest_in_words(run, run) == "0.0e+00"


def test_memory_left_of_modes_before_is_shown(script: Callable[[str], ModuleType]) -> None:
    of_all = {"mode": "distca", "seconds": [1.0], "tokens": [1], "model_flops": [1.0], "peak_flops": None}
    run = {**of_all, "losses": [1.0], "imbalance": [], "peak_bytes": 60 << 30, "held_before_bytes": 3 << 29}
    head, _, row = script("lib.training.run").table([run], 0).splitlines()
    shown = dict(zip(head.split(" | "), row.split(" | "), strict=True))

    assert (shown["peak GiB"], shown["held before GiB"]) == ("60.0", "1.5")


def test_sft_run_has_the_losses_of_trl_alone(tmp_path: Path) -> None:
    config, out, lengths = tmp_path / "config.json", tmp_path / "out.json", tmp_path / "lengths.json"
    config.write_text(json.dumps(CONFIG))
    lengths.write_text(json.dumps([7, 61, 33, 5, 190, 48]))
    model = f"--device cpu --config {config} --lengths {lengths} --out {out}"
    settings = "--modes padded,attached-padded --batch-size 2 --longest 64 --steps 3 --warmup 1"
    run_script(RANKS, tmp_path, f"scripts/benchmarks/sft_run.py {model} {settings}".split())
    padded, attached = json.loads(out.read_text())["runs"]

    assert attached["losses"] == pytest.approx(padded["losses"], abs=1e-4)
    assert attached["tokens"] == padded["tokens"]
    assert max(map(max, attached["tokens"])) > 2 * min(map(min, attached["tokens"]))
    for run in (padded, attached):
        assert len(run["seconds"]) == len(run["host_seconds"]) == STEPS
        assert all(0 < host < whole for host, whole in zip(run["host_seconds"], run["seconds"], strict=True))
