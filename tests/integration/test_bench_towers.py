"""The benchmark of towers runs on two CPU processes; its packs are what its help says."""

import json
from pathlib import Path

import pytest

from support.scripts import run_script
from support.versions import images_may_move


SIZES = {"layers": 2, "page_side": 16, "photo_side": 4, "pages": 2, "photos": 2, "texts": 2}
TEXT = {"page_tokens": 60, "photo_tokens": 40}
RANKS, ROUNDS = 2, 1


@images_may_move
def test_towers_are_even(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = [word for name, size in (SIZES | TEXT).items() for word in (f"--{name.replace('_', '-')}", str(size))]
    words = ["scripts/benchmarks/image_towers.py", "--device", "cpu", "--size", "tiny", "--out", out]
    printed = run_script(RANKS, tmp_path, [*words, *sizes, "--rounds", str(ROUNDS), "--warmup", "0"])
    workloads = json.loads(out.read_text())["workloads"]

    assert [*workloads] == ["mix", "even"]
    for name, modes in workloads.items():
        assert f"documents of {name}; " in printed
        assert [*modes] == ["plain", "ideal", "arrived", "moved"]
        for mode, figures in modes.items():
            assert len(figures["seconds"]) == ROUNDS
            if mode != "ideal":
                assert figures["loss"] == pytest.approx(modes["plain"]["loss"], rel=1e-5)
    mix, even = workloads["mix"], workloads["even"]
    assert mix["arrived"]["towers"] > 1.8 > 1.01 > mix["moved"]["towers"]
    assert even["moved"]["towers"] == even["arrived"]["towers"] == 1
    assert mix["moved"]["exchanged_bytes"] > mix["arrived"]["exchanged_bytes"]
    assert even["moved"]["exchanged_bytes"] == even["arrived"]["exchanged_bytes"] == 0
