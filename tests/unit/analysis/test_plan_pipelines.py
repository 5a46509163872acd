"""`distca plan --pipeline`: output, and what is refused. Its figures are those of `distca simulate`."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from distca_hf.analysis import answer as estimates
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.training_setup import GIB
from distca_hf.cli import app


def run(lengths: str | Path, *options: str, status: int = 0, ranks: int = 8, tokens: int = 16384) -> Any:
    arguments = ["plan", str(lengths), "--gpus", str(ranks), "--tokens-per-rank", str(tokens), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lengths") / "some.json"
    path.write_text(json.dumps(np.minimum(read_lengths(Path("pretrain")).tokens[:1500], 60_000).tolist()))
    return path


@pytest.mark.parametrize(
    ("name", "placed", "shaped", "without"), [("pretrain", 1.8, 1.9, 2.3), ("prolong", 1.4, 1.45, 1.8)]
)
def test_goals_on_the_shipped_lengths(
    name: str, placed: float, shaped: float, without: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speed over plain packing on 32 GPUs: stages with micro-batches as packed and shaped, and no stages."""
    monkeypatch.setattr(estimates, "MOST_STEPS", 2)
    options = ("--pipeline", "4", "--chunks", "4", "--micro-steps", "8", "--liger", "--json")
    said = json.loads(run(name, *options, tokens=131072).stdout)["estimates"]
    faster = {way["key"]: way["times_as_fast"] for way in said["ways"]}

    assert faster["pipeline_placed"] >= placed
    assert faster["pipeline_shaped"] >= shaped
    assert faster["placed"] == said["over_plain"] >= without


def test_json_and_text_say_the_same(some: Path) -> None:
    options = ("--pipeline", "4", "--chunks", "2", "--micro-steps", "8")
    said = json.loads(run(some, *options, "--json").stdout)

    assert said["pipeline"] == {"num_stages": 4, "chunks": 2, "gpus": 32}
    assert said["choices"] == []
    assert said["micro_steps"] == 8
    text = " ".join(run(some, *options).stdout.split())
    assert "in each of 4 stages of a pipeline (32 GPUs)" in text
    assert "A pipeline of 4 stages takes " in text
    assert "shared by 32 ranks" in text
    assert "Between 2 micro-steps Trainer does not sync" in text
    ways = {way["label"]: way for way in said["estimates"]["ways"]}
    assert {"pipeline, plain", "pipeline, placed", "pipeline, shaped", "distca, placed"} < ways.keys()
    for label, way in ways.items():
        assert re.search(rf"{label}( \*)? {way['times_as_fast']:.2f} {way['memory_bytes'] / GIB:.1f} ", text)


def test_the_first_step_is_shaped_as_in_training(some: Path) -> None:
    shaped = json.loads(run(some, "--pipeline", "4", "--micro-steps", "8", "--json").stdout)
    interleaved = json.loads(run(some, "--pipeline", "4", "--chunks", "4", "--micro-steps", "8", "--json").stdout)
    without = json.loads(run(some, "--micro-steps", "8", "--json").stdout)

    assert shaped["pipeline"]["chunks"] == 1
    assert shaped["epoch_micro_batches"] % 8 == 0
    assert len({shaped["fingerprint"], interleaved["fingerprint"], without["fingerprint"]}) == 3
    assert without["pipeline"] is None
    assert without["estimates"] is not None


def test_a_model_of_unknown_size_has_no_estimates(some: Path, tmp_path: Path) -> None:
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--pipeline", "4", "--micro-steps", "4", "--model", str(tmp_path / "config.json"))
    assert json.loads(run(some, *options, "--json").stdout)["estimates"] is None
    assert "its size is not known" in run(some, *options).stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--pipeline 1", "--pipeline 1: a pipeline of 1 stages is none: give at least 2"),
        ("--pipeline 4 --chunks 0", "--pipeline 4 --chunks 0: a pipeline stage has 0 chunks"),
        ("--pipeline 4", "--pipeline 4 --chunks 1 --micro-steps 1: 1 micro-batches per optimizer step do not fill"),
        ("--pipeline 4 --chunks 2 --micro-steps 6", "6 micro-batches per optimizer step are not a multiple of 4"),
        ("--pipeline 4 --chunks 9 --micro-steps 8", "36 parts of a model with 32 layers; give fewer stages or chunks"),
        ("--pipeline 4 --micro-steps 4 --layout fixed", "--layout fixed keeps packs as they are; leave one"),
        ("--chunks 4", "--chunks 4 needs --pipeline, which is not given"),
        ("--gpus 4096 --pipeline 4 --micro-steps 4", "--pipeline 4 of --gpus 4096 each are 16384 GPUs; give at most"),
        ("--pipeline 3 --micro-steps 3 --ranks-per-node 12", "stages of 8 data ranks begin and end within nodes"),
        ("--pipeline 4 --micro-steps 1024", "need 1024 documents or more, and the dataset holds 3"),
        ("--pipeline 2 --micro-steps 2 --tokens-per-rank 99", "a document of 800 tokens does not fit on 8 ranks x 99"),
    ],
)  # fmt: skip
def test_pipelines_that_are_refused(options: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[700, 800, 300]")
    refused = run(tmp_path / "lengths.json", *options.split(), status=2)

    assert refused.stdout == ""
    assert refused.stderr.startswith("distca: ")
    assert refused.stderr.count("\n") == 1
    assert words in refused.stderr
