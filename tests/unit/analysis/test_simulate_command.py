"""`distca simulate` as a user meets it: tables of 80 columns, JSON, and one line for bad input."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from distca_hf.analysis.profiles.__main__ import write
from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.cli import app


QUICK = ["--gpus", "4,8", "--tokens-per-rank", "16384", "--context", "32768", "--batches", "2"]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    tokens = np.random.RandomState(0).lognormal(7, 1.5, 600).astype(int) + 4
    path.write_text(json.dumps([*tokens.tolist(), 32_768, 32_768, 30_000]))
    return path


def simulate(*words: str | Path) -> str:
    ran = CliRunner().invoke(app, ["simulate", *map(str, words)], env={"COLUMNS": "80"})
    assert ran.exit_code == 0, ran.output
    return ran.output


def refusal(*words: str | Path) -> str:
    ran = CliRunner().invoke(app, ["simulate", *map(str, words)])
    assert ran.exit_code == 2, ran.output
    assert ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    return ran.stderr


def test_text_is_readable_at_80_columns(lengths: Path) -> None:
    printed = simulate(lengths, *QUICK)

    assert max(map(len, printed.splitlines())) <= 80
    for words in (
        "plain packing",
        "Ulysses over",
        "zigzag ring over",
        "distca, placed",
        "distca, your packs",
    ):
        assert words in printed
    assert "8 GPUs x 16,384 tokens, 1 micro-step, context 32,768" in printed
    assert "Assumptions" in printed
    assert "Times: h200, " in printed
    assert "measured 20" in printed


def test_json_has_all_figures(lengths: Path) -> None:
    answer: dict[str, Any] = json.loads(simulate(lengths, *QUICK, "--micro-steps", "1,2", "--json"))

    assert [(one["gpus"], one["accumulation"]) for one in answer["simulations"]] == [(4, 1), (4, 2), (8, 1), (8, 2)]
    assert answer["profile"]["device"] == find_profile("h200").made.device
    assert answer["assumptions"]
    for one in answer["simulations"]:
        ways = {way["key"]: way for way in one["ways"]}
        for way in ways.values():
            assert 0 < way["utilisation"] < 1
            assert way["memory_bytes"] > 0
            hours = 1e9 / way["tokens_per_second"] * one["gpus"] / 3600
            assert way["gpu_hours"] == pytest.approx(hours)
            assert way["times_as_fast"] == pytest.approx(ways["plain"]["step_seconds"] / way["step_seconds"])
        whole = [way for way in ways.values() if way["whole"]]
        best = min((way for way in whole if way["is_ours"]), key=lambda way: way["step_seconds"])
        assert one["choose"] == best["key"]
        # Where the fastest cuts documents, and distca is hardly faster for it, the fastest that does not counts.
        every, uncut = (
            min(way["step_seconds"] for way in some if not way["is_ours"]) / best["step_seconds"]
            for some in (ways.values(), whole)
        )
        assert one["gain"] == pytest.approx(every if every >= 1.05 else uncut)
        assert ("do not bother" in one["in_short"]) == (one["gain"] < 1.05)


def test_gradients_are_summed_as_trainer_sums_them(lengths: Path) -> None:
    """In the last micro-step only, which takes memory and saves time; in every one if that is asked for."""
    options = [lengths, *QUICK[:1], "8", *QUICK[2:], "--micro-steps", "2", "--liger"]
    ways: list[dict[str, Any]] = []
    for more in ([], ["--sync-each-batch"]):
        (answer,) = json.loads(simulate(*options, *more, "--json"))["simulations"]
        ways.append({way["key"]: way for way in answer["ways"]})
    last, every = ways
    assert last["plain"]["step_seconds"] < every["plain"]["step_seconds"]
    kept = last["plain"]["memory_bytes"] - every["plain"]["memory_bytes"]
    assert kept == pytest.approx(8.03e9 * (2 - 4 / 8) - 2 * (525e6 + 218e6), rel=1e-2)
    text = " ".join(simulate(*options).split())
    assert "as Trainer does by default, and 15.0 GiB are kept before; with --sync-each-batch 3.7 GiB on each" in text


def test_ways_that_cut_documents_are_not_chosen_and_count_as_much_as_they_compute(tmp_path: Path) -> None:
    """One document is as long as four packs: each pack has a sixteenth of its pairs."""
    (tmp_path / "lengths.txt").write_text("131072\n" * 3)
    options = ["--gpus", "4", "--tokens-per-rank", "32768", "--context", "131072", "--batches", "2"]
    (answer,) = json.loads(simulate(tmp_path / "lengths.txt", *options, "--json"))["simulations"]
    ways = {way["key"]: way for way in answer["ways"]}

    assert answer["choose"] == "placed"
    assert ways["given"]["step_seconds"] < ways["placed"]["step_seconds"]
    assert [key for key, way in ways.items() if not way["whole"]] == ["plain", "sorted_packs", "given"]
    assert all(0 < way["utilisation"] < 0.65 for way in ways.values())
    assert answer["gain"] == pytest.approx(
        min(ways[key]["step_seconds"] for key in ways if key.startswith(("ulysses", "ring")))
        / ways["placed"]["step_seconds"]
    )
    assert answer["in_short"].endswith("plain packing, which leaves out attention between parts of documents.")


def test_stages_of_a_pipeline_stand_beside_other_ways(lengths: Path) -> None:
    options = [*QUICK[:1], "8", *QUICK[2:], "--pipeline", "2", "--chunks", "2"]
    printed = simulate(lengths, *options)
    (answer,) = json.loads(simulate(lengths, *options, "--json"))["simulations"]

    assert max(map(len, printed.splitlines())) <= 80
    assert "pipeline: 2 stages of 2 chunks" in " ".join(printed.split())
    assert "pipeline: 2 stages of 4 data ranks" in " ".join(printed.split())
    assert (answer["num_stages"], answer["chunks"]) == (2, 2)
    assert {way["key"] for way in answer["ways"] if way["in_stages"]} == {
        *("pipeline_plain", "pipeline_placed", "pipeline_shaped")
    }
    assert "has 0 chunks of layers" in refusal(lengths, *QUICK, "--pipeline", "2", "--chunks", "0")
    assert "--chunks 2 needs --pipeline" in refusal(lengths, *QUICK, "--chunks", "2")
    assert "a pipeline of 1 stages is none" in refusal(lengths, *QUICK, "--pipeline", "1")


def test_a_profile_of_ones_own_is_taken(lengths: Path, tmp_path: Path) -> None:
    write(find_profile("h200"), tmp_path / "cluster.json")
    shipped = json.loads(simulate(lengths, *QUICK, "--json"))
    own = json.loads(simulate(lengths, *QUICK, "--cluster", tmp_path / "cluster.json", "--json"))

    assert own["simulations"] == shipped["simulations"]


@pytest.mark.parametrize("device", ["NVIDIA H200 MIG 3g.71gb", "NVIDIA Z9"])
def test_memory_that_is_assumed_is_said(device: str, lengths: Path, tmp_path: Path) -> None:
    profile, words = find_profile("h200"), "is not known: that of an H100 is assumed"
    write(replace(profile, made=replace(profile.made, device=device)), tmp_path / "cluster.json")

    unknown, given, known = (
        " ".join(simulate(lengths, *QUICK, *more).split())
        for more in (
            ["--cluster", tmp_path / "cluster.json"],
            ["--cluster", tmp_path / "cluster.json", "--gpu-gib", "71"],
            [],
        )
    )

    assert (
        f"the memory of '{device}', which the profile was measured on, {words}; give yours with --gpu-gib" in unknown
    )
    assert "90 % of 80 GiB may be used" in unknown
    assert words not in given + known


def test_bad_input_is_one_line(lengths: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.json"
    foreign.write_text("{}")
    table = tmp_path / "config.json"
    no_dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    sizes = {"n_positions": 256, "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 100}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    table.write_text(json.dumps({"model_type": "gpt2", **sizes, **no_dropout}))

    assert "not a cluster profile" in refusal(lengths, *QUICK, "--cluster", foreign)
    assert "nearest is h100" in refusal(lengths, *QUICK, "--cluster", "a100")
    assert "cannot be read" in refusal(lengths, *QUICK, "--cluster", tmp_path / "none.json")
    assert "--gpus 0 must be" in refusal(lengths, "--gpus", "0")
    assert "--gpus 8;9: write whole numbers" in refusal(lengths, "--gpus", "8;9")
    assert "takes documents of up to 256 tokens" in refusal(lengths, *QUICK, "--model", table)
    assert "longer than the 256 that ranks and model take; --context 256 splits" in refusal(
        lengths, "--gpus", "8", "--model", table
    )
    assert "--context 1000000 does not fit" in refusal(lengths, *QUICK[:4], "--context", "1000000")
    assert "model 'lama3-8b' is not known" in refusal(lengths, *QUICK, "--model", "lama3-8b")
    assert "none.json" in refusal(tmp_path / "none.json", *QUICK)
    assert "--token-budget 0" in refusal(lengths, *QUICK, "--token-budget", "0")
    assert "--token-budget inf" in refusal(lengths, *QUICK, "--token-budget", "inf", "--json")
    assert "--context 0 must be" in refusal(lengths, *QUICK, "--context", "0")
    assert "--gpu-gib 0 must be" in refusal(lengths, *QUICK, "--gpu-gib", "0")
    assert "--token-budget 1e+308 must be" in refusal(lengths, *QUICK, "--token-budget", "1e308")
    assert "--gpu-gib 1e+308 must be" in refusal(lengths, *QUICK, "--gpu-gib", "1e308")
    assert "--gpu-gib inf must be" in refusal(lengths, *QUICK, "--gpu-gib", "inf")
    assert "write whole numbers" in refusal(lengths, "--gpus", "9" * 5000)
    assert "--tokens-per-rank 0 must be between" in refusal(lengths, *QUICK, "--tokens-per-rank", "0")
    assert "--model is empty" in refusal(lengths, *QUICK, "--model", "")
    assert "File name too long" in refusal("x" * 300)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "cannot be read as a cluster" in refusal(lengths, *QUICK, "--cluster", tmp_path / "deep.json")


def test_profiles_without_gpus_are_refused(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["profile", "--output", str(tmp_path / "c.json")])

    assert ran.exit_code == 2
    assert "no GPU to measure; --cpu" in ran.stderr
    ran = CliRunner().invoke(app, ["profile", "--cpu", "--output", str(tmp_path / "missing" / "c.json")])
    assert "its folder is missing" in ran.stderr
    for options, words in (
        (["--model", "lama3-8b"], "is not known"),
        (["--kernel", "fastest"], "kernel"),
        (["--output", str(tmp_path)], "it is a folder"),
        (["--as-between-nodes", str(tmp_path / "none.json")], "cannot be read as a cluster profile"),
    ):
        ran = CliRunner().invoke(app, ["profile", "--cpu", "--dry-run", *options])
        assert (ran.exit_code, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1), ran.output
        assert words in ran.stderr


def test_the_line_of_a_profile_as_json(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["profile", "--cpu", "--dry-run", "--json", "--output", str(tmp_path / "c.json")])

    answer = json.loads(ran.stdout)
    assert answer["file"] == str(tmp_path / "c.json")
    assert answer["command"][0] == "torchrun"
    assert answer["command"][-1] == "--json"
