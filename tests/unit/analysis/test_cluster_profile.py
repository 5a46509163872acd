"""Files of profiles: what is written is read, and nothing else is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.analysis.profiles.__main__ import in_words, main_figures, write
from distca_hf.analysis.profiles.cluster_profile import SCHEMA, ClusterProfile, find_profile, shipped_profiles
from distca_hf.analysis.profiles.curves import Curve, Notes, Surface, kernel_times_of
from distca_hf.errors import ConfigError
from distca_hf.placement.by_kernel_time import KernelTimes
from distca_hf.version import __version__


@pytest.fixture(scope="module")
def profile() -> ClusterProfile:
    return find_profile("h200")


def content_of(profile: ClusterProfile, tmp_path: Path) -> dict[str, Any]:
    write(profile, tmp_path / "cluster.json")
    content: dict[str, Any] = json.loads((tmp_path / "cluster.json").read_text())
    return content


def refusal(tmp_path: Path, content: object) -> str:
    path = tmp_path / "other.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        ClusterProfile.load(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_is_written_is_read(profile: ClusterProfile, tmp_path: Path) -> None:
    write(profile, tmp_path / "cluster.json")
    read = find_profile(str(tmp_path / "cluster.json"))

    assert replace(read, source=profile.source) == profile


def test_shipped_profiles_say_where_they_come_from() -> None:
    assert {"h100", "h200"} <= shipped_profiles().keys()
    for name in shipped_profiles():
        made = find_profile(name).made
        assert made.date
        assert made.command
        assert "torch" in made.versions


def test_other_files_are_refused_in_one_line(profile: ClusterProfile, tmp_path: Path) -> None:
    content = content_of(profile, tmp_path)

    assert "is not a cluster profile" in refusal(tmp_path, {"query_tokens": [1]})
    assert "is not a cluster profile" in refusal(tmp_path, [1, 2])
    assert "cannot be read" in refusal(tmp_path, "{")
    assert f"form {SCHEMA + 1}" in refusal(tmp_path, {**content, "schema": SCHEMA + 1})
    assert "damaged" in refusal(tmp_path, {**content, "attention": []})
    assert "damaged" in refusal(tmp_path, {name: value for name, value in content.items() if name != "rates"})
    with pytest.raises(ConfigError, match="cannot be read"):
        ClusterProfile.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("rates", "matrix_flops", -1.0),
        ("within_node", "num_bytes", [2.0, 1.0]),
        ("within_node", "exchange", [1.0]),
        ("within_node", "one_way", [1.0]),
        ("between_nodes", "one_way", None),
        ("between_nodes", "to_next", 0),
        ("between_nodes", "to_next", [0.0] * 6),
        ("within_node", "attention_beside", "much"),
        ("within_node", "attention_beside", float("nan")),
        ("within_node", "products_beside", -1.0),
        ("within_node", "ranks_per_node", 0),
        ("rates", "copy_bytes", 10**400),
        ("rates", "copy_bytes", 1e-320),
        ("rates", "head_seconds", 1e308),
        ("between_nodes", "attention_beside", 1e308),
        ("made", "device", 5),
        ("attention", "heads", 0),
        ("attention", "head_dim", "many"),
        ("attention", "window_tokens", 1024),
        ("layers", "mlp_size", None),
        ("layers", "liger", "yes"),
    ],
)
def test_damaged_numbers_are_refused(
    part: str, name: str, value: object, profile: ClusterProfile, tmp_path: Path
) -> None:
    content = content_of(profile, tmp_path)
    (content[part][0] if isinstance(content[part], list) else content[part])[name] = value

    assert "damaged" in refusal(tmp_path, content)


@pytest.mark.parametrize("part", [None, "made", "rates", "within_node"])
def test_names_of_a_newer_version_are_no_damage(part: str | None, profile: ClusterProfile, tmp_path: Path) -> None:
    content = content_of(profile, tmp_path) | {"distca_hf": "9.8.7"}
    (content if part is None else content[part])["new_seconds"] = [1.0]

    words = refusal(tmp_path, content)

    assert "damaged" not in words
    assert "new_seconds" in words
    assert f"distca_hf 9.8.7 wrote it, and this is {__version__}, which reads form {SCHEMA}" in words
    assert "install the version that wrote it, or measure again with `distca profile`" in words


def test_a_gpu_without_a_profile_gets_the_nearest_offered() -> None:
    with pytest.raises(ConfigError, match=r"this GPU has no measured profile.*nearest is h100.*3\.17 times"):
        find_profile("a100")
    with pytest.raises(ConfigError, match=r"choose one of .*h100"):
        find_profile("h20")


def test_a_profile_is_a_table_of_kernel_times(profile: ClusterProfile, tmp_path: Path) -> None:
    write(profile, tmp_path / "cluster.json")
    times = KernelTimes.load(tmp_path / "cluster.json")
    full = profile.attention[0]

    of_square = times.of(np.array([0]), np.array([8192]))[0]
    at = full.square_tokens.index(8192.0)
    assert of_square == pytest.approx(full.square_forward[at] + full.square_backward[at])
    # The last queries of a document are a square and a prefix.
    query, key = 2048.0, 32_768.0
    table = kernel_times_of(full)
    assert times.of(np.array([int(key - query)]), np.array([int(key)]))[0] == pytest.approx(
        table["seconds"][table["query_tokens"].index(query)][table["key_tokens"].index(key)]
    )


def test_main_figures_are_those_of_the_file(profile: ClusterProfile) -> None:
    figures = main_figures(profile, Path("cluster.json"))
    full, links = profile.attention[0], profile.within_node
    assert links is not None

    # By hand: two products of 128 numbers for each pair and head of the longest document.
    tokens = full.square_tokens[-1]
    pairs = 32 * tokens * (tokens + 1) / 2
    assert figures["attention_forward_flops"] == pytest.approx(2 * 2 * 128 * pairs / full.square_forward[-1])
    assert figures["attention_backward_flops"] == pytest.approx(2.5 * 2 * 2 * 128 * pairs / full.square_backward[-1])
    assert figures["within_node"]["exchange_bytes_per_second"] == links.num_bytes[-1] / links.exchange[-1]
    without = main_figures(replace(profile, between_nodes=None), Path("cluster.json"))
    assert json.loads(json.dumps(without))["between_nodes"] is None
    assert in_words(without).endswith("links between nodes: not measured")
    assert all(len(line) <= 120 for line in in_words(figures).splitlines())


SIZES = st.lists(st.floats(1, 1e6), min_size=2, max_size=5, unique=True).map(sorted)


@given(SIZES, st.floats(1, 1e6), st.floats(1.0, 2.0))
def test_curves_go_through_measurements_and_keep_the_rate_beyond(
    sizes: list[float], size: float, power: float
) -> None:
    if min(np.diff(np.log(sizes))) < 1e-6:
        return
    curve = Curve.of("size", sizes, [x**power / (3 + number) for number, x in enumerate(sizes)], power)

    assert curve.at(np.array(sizes), Notes()) == pytest.approx(curve.seconds)
    rate = size**power / float(curve.at(size, Notes()))
    assert 3 - 1e-6 <= rate <= 3 + len(sizes)
    assert float(curve.at(4 * sizes[-1], Notes())) == pytest.approx((4 * sizes[-1]) ** power / (2 + len(sizes)))


def test_surfaces_go_through_measurements() -> None:
    rows, columns = np.array([1.0, 10.0]), np.array([2.0, 20.0, 200.0])
    seconds = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    surface = Surface(("rows", "columns"), rows, columns, seconds)

    assert surface.at(np.array([1.0, 10.0]), np.array([20.0, 200.0]), Notes()) == pytest.approx([2.0, 6.0])
    assert surface.at(np.array([0.0]), np.array([20.0]), Notes()).tolist() == [0.0]


def test_sizes_beyond_measured_ones_are_said() -> None:
    notes, curve = Notes(), Curve.of("bytes", [10.0, 100.0], [1.0, 10.0])
    curve.at(np.array([20.0, 50.0]), notes)
    assert notes.lines() == []

    other = Notes()
    curve.at(np.array([400.0]), other)
    notes.merge(other)
    (line,) = notes.lines()
    assert "bytes: up to 400 needed, 10 to 100 measured; 85.1 % of their seconds are extrapolated" in line
