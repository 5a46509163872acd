"""The benchmark of trainings: modes have the same documents and weights, and their losses are compared."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

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
    words = ["scripts/benchmarks/training_run.py", "--device", "cpu", "--config", config, "--out", out]
    sizes = ["--tokens-per-rank", TOKENS_PER_RANK, "--steps", STEPS, "--warmup", 1, "--learning-rate", "1e-2"]
    modes = ["--modes", "distca,ulysses,fixed", "--most-difference", "0"]
    with pytest.raises(AssertionError, match=r"losses differ from those of distca by more than 0\.0"):
        run_script(RANKS, tmp_path, [str(word) for word in (*words, *sizes, *modes)])
    runs = json.loads(out.read_text())["runs"]

    assert [run["mode"] for run in runs] == ["distca", "ulysses", "fixed"]
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
    documents = script("lib.training.documents").training_documents(3, 20_000, 32_768, vocabulary=1000)
    lengths = [len(tokens) for tokens in documents["input_ids"]]

    assert lengths.count(20_000) == 3
    assert sum(lengths) == 3 * 32_768
    assert max(max(tokens) for tokens in documents["input_ids"]) < 1000


def test_times_behind_the_first_steps_count(script: Callable[[str], ModuleType]) -> None:
    run = {"seconds": [9.0, 2.0, 2.0, 4.0], "tokens": [100] * 4, "model_flops": [40.0] * 4, "peak_flops": 100.0}
    assert script("lib.training.report").step_figures(run, 1) == {
        "step_seconds": 2.0,
        "tokens_per_second": 50.0,
        "utilisation": 0.2,
    }


def test_a_loss_that_is_no_number_is_the_largest_difference(script: Callable[[str], ModuleType]) -> None:
    difference = script("lib.training.report").largest_difference
    assert difference({"losses": [1.0, 2.0]}, {"losses": [1.5, 2.25]}) == 0.5
    assert math.isnan(difference({"losses": [1.0, 2.0]}, {"losses": [float("nan"), 2.0]}))


def test_memory_left_of_modes_before_is_shown(script: Callable[[str], ModuleType]) -> None:
    of_all = {"mode": "distca", "seconds": [1.0], "tokens": [1], "model_flops": [1.0], "peak_flops": None}
    run = {**of_all, "losses": [1.0], "imbalance": [], "peak_bytes": 60 << 30, "held_before_bytes": 3 << 29}
    head, _, row = script("lib.training.report").table([run], 0).splitlines()
    shown = dict(zip(head.split(" | "), row.split(" | "), strict=True))

    assert (shown["peak GiB"], shown["held before GiB"]) == ("60.0", "1.5")
