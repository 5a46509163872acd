"""Predicted seconds of a run: from the measured profile of each GPU, by kinds of layers, or an estimate."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, find_profile, profile_of_device
from distca_hf.analysis.report.estimates import Predictor
from distca_hf.cli import app
from distca_hf.trace_file import read_trace
from distca_hf.traces import HeadSizes, LayersTrace, ModelSizes, RankTrace, file_name
from support.made_traces import llama_layers, made_trace, write_served_run


LAYERS = 3
H200, H100 = find_profile("h200"), find_profile("h100")
FULL, GROUP, WINDOW = (
    next(x for x in H200.attention if (x.heads, x.window_tokens) == key) for key in ((32, 0), (4, 0), (32, 1024))
)


def trace_of(*kinds: LayersTrace, **changes: Any) -> RankTrace:
    return replace(made_trace(0, 1, layers=LAYERS), kinds=kinds, **changes)


def full(*tasks: tuple[int, int, int], layers: int = LAYERS) -> LayersTrace:
    return LayersTrace(0, layers, tasks)


def attention(trace: RankTrace, predictor: Predictor | None = None) -> float | None:
    (seconds,) = (predictor or Predictor()).predict({0: trace}, 1).predicted_attention
    return seconds


def square(tokens: int, profile: ClusterProfile = H200) -> tuple[float, float]:
    """Measured seconds of a document, forward and backward."""
    times = profile.attention[0]
    at = times.square_tokens.index(tokens)
    return times.square_forward[at], times.square_backward[at]


def test_documents_take_what_their_kernels_were_measured_to_take() -> None:
    expected = LAYERS * (2 * sum(square(8192)) + sum(square(2048)))

    assert attention(trace_of(full((8192, 0, 0), (8192, 0, 0), (2048, 0, 0)))) == pytest.approx(expected)


def test_attention_that_is_recomputed_takes_its_forward_twice() -> None:
    forward, backward = square(8192)
    model = replace(llama_layers(LAYERS), recomputes_attention=True)
    seconds = attention(trace_of(full((8192, 0, 0)), model=model))

    assert seconds == pytest.approx(LAYERS * (2 * forward + backward))


def test_tasks_of_a_group_of_heads_have_times_of_their_own() -> None:
    """4 of 32 heads, with keys before: a square and a prefix."""
    at, row, column = GROUP.square_tokens.index(2048), GROUP.prefix_queries.index(2048), 2
    keys = int(GROUP.prefix_keys[column])
    passes = (GROUP.square_forward, GROUP.prefix_forward), (GROUP.square_backward, GROUP.prefix_backward)
    expected = sum(squares[at] + prefixes[row][column] for squares, prefixes in passes)

    assert attention(trace_of(full((2048, keys, 1)))) == pytest.approx(LAYERS * expected)


def test_every_kind_of_layers_has_its_own_seconds() -> None:
    at = WINDOW.square_tokens.index(8192)
    of_window = WINDOW.square_forward[at] + WINDOW.square_backward[at]
    kinds = LayersTrace(1024, 5, ((8192, 0, 0),)), full((8192, 0, 0), layers=1)

    assert attention(trace_of(*kinds)) == pytest.approx(5 * of_window + sum(square(8192)))


def test_layers_that_attend_inside_of_chunks_compute_squares_of_a_chunk() -> None:
    kind = LayersTrace(2048, LAYERS, ((8192, 0, 0),), chunked=True)

    assert attention(trace_of(kind)) == pytest.approx(LAYERS * 4 * sum(square(2048)))


def test_tasks_that_were_not_known_predict_nothing() -> None:
    assert attention(trace_of(full((8192, 0, 0)), LayersTrace(1024, 1, None))) is None


def test_rest_is_that_of_measured_layers_and_the_head() -> None:
    layer = next(layer for layer in H200.layers if (layer.hidden_size, layer.liger) == (4096, False))
    tokens = int(layer.tokens[-1])
    head = H200.rates.head_seconds * 128.256 * tokens

    def rest(model: ModelSizes) -> float:
        (seconds,) = Predictor().predict({0: trace_of(full(), tokens=tokens, model=model)}, 1).predicted_rest
        assert seconds is not None
        return seconds

    model = llama_layers(LAYERS)
    kept = LAYERS * (layer.kept[-1] + layer.backward[-1])
    assert rest(model) == pytest.approx(kept + LAYERS * layer.forward[-1] + head)
    assert rest(replace(model, recomputes_layers=False)) == pytest.approx(kept + head)
    assert rest(replace(model, recomputes_layers=False, head_weights=0)) == pytest.approx(kept)
    frozen = replace(model, recomputes_layers=False, head_weights=0, backward_share=0.5)
    assert rest(frozen) == pytest.approx(LAYERS * (layer.kept[-1] + layer.backward[-1] / 2))


# --- whose profile


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-80GB", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("cpu", None),
    ],
)
def test_shipped_profile_is_found_by_the_name_of_the_gpu(device: str, name: str | None) -> None:
    profile = profile_of_device(device)

    assert (None if profile is None else profile.source) == name


def test_gpu_without_a_profile_has_an_estimate_that_says_so() -> None:
    trace = trace_of(full((8192, 0, 0)), device="NVIDIA A100-SXM4-80GB")
    found = Predictor().predict({0: trace}, 1)

    assert found.rates == "H200"
    assert found.source == ("the rates of an H200, an estimate: no profile was measured on NVIDIA A100-SXM4-80GB")
    assert found.predicted_attention == [pytest.approx(trace.work[0] * 3.5e-11)]
    assert Predictor().predict({0: replace(trace, costs=None, device="cpu")}, 1).predicted_attention == ()


def report(folder: Path, *options: str) -> Any:
    done = CliRunner().invoke(app, ["report", str(folder), "--json", *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_every_rank_is_predicted_from_the_profile_of_its_own_gpu(tmp_path: Path) -> None:
    """A server that is an H100, beside trainers on H200s; the option wins over both."""
    write_served_run(tmp_path)
    path = tmp_path / file_name(3, is_server=True)
    server = read_trace(path.read_text(), "here")
    path.write_text(replace(server, device="NVIDIA H100 80GB HBM3").line())
    both, one = (report(tmp_path, *options)["steps"][0] for options in ((), ("--cluster", "h200")))
    seconds = both["seconds"]

    assert seconds["rates"] == "h200, h100"
    assert ["predicted with", seconds["source"]] in both["facts"]
    squares = [2 * 8 * sum(square(8192, profile)) for profile in (H200, H200, H200, H100)]
    assert seconds["predicted_attention"] == pytest.approx(squares, rel=1e-4)
    assert seconds["predicted_rest"][0] == seconds["predicted_rest"][1] > 0
    assert seconds["predicted_rest"][2:] == [0, 0]
    assert one["seconds"]["rates"] == "h200"
    assert one["seconds"]["predicted_attention"] == pytest.approx([squares[0]] * 4, rel=1e-4)


def test_profile_of_the_setting_is_taken_for_its_gpu(tmp_path: Path) -> None:
    """A profile of this very machine says more than the shipped one. One that is gone is named, and so is anything
    else than a file in the run's folder: a trace may name what it likes."""
    twice = replace(
        H200.attention[0],
        square_forward=tuple(2 * x for x in FULL.square_forward),
        square_backward=tuple(2 * x for x in FULL.square_backward),
    )
    own = replace(H200, attention=(twice, *H200.attention[1:]))
    (tmp_path / "own.json").write_text(json.dumps(own.as_json()))
    trace = trace_of(full((8192, 0, 0)), profile=str(tmp_path / "own.json"))
    predictor, shipped = Predictor(folder=tmp_path), LAYERS * sum(square(8192))
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    others = ("gone.json", "pipe.json", "zero.json", "/etc/passwd", "/dev/zero", "../own.json", "a\0b")

    assert attention(trace, predictor) == pytest.approx(2 * shipped)
    for name in others:
        assert attention(replace(trace, profile=str(tmp_path / name)), predictor) == pytest.approx(shipped)
    assert [line.split(":")[0] for line in predictor.lines()] == [
        "The file of the setting kernel_times is not a profile to predict from"
    ] * len(others)
    assert attention(replace(trace, device="NVIDIA H100 80GB HBM3"), Predictor()) == pytest.approx(
        LAYERS * sum(square(8192, H100))
    )


def test_other_heads_than_measured_are_noted() -> None:
    heads = HeadSizes(0, 32, 8, 64, 64, 8)
    predictor = Predictor()
    attention(trace_of(full((8192, 0, 0)), model=replace(llama_layers(LAYERS), heads=(heads,))), predictor)

    words = "Predicted seconds: heads of 64 and 64 numbers are taken at the rate of 128, by operations."
    assert words in predictor.lines()


def test_cluster_is_for_runs_and_must_be_known(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    for source, cluster, words in (
        (tmp_path / "plan.json", "h200", "is not the folder of one"),
        (tmp_path, "b300", "--cluster b300: choose one of h100, h200"),
    ):
        refused = CliRunner().invoke(app, ["report", str(source), "--cluster", cluster])
        assert refused.exit_code == 2
        assert words in refused.output


def test_sizes_that_nothing_can_be_computed_with_are_one_line(tmp_path: Path) -> None:
    wrong = asdict(llama_layers(2)) | {"layers": 0}
    content = json.loads(made_trace(0, 1).line()) | {"model": wrong}
    (tmp_path / file_name(0)).write_text(json.dumps(content))
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])

    assert refused.exit_code == 2
    assert "a model of 0 layers" in refused.output
