"""The benchmark step on ranks that plans take for those of two nodes: what they send is what the plan says."""

import importlib
import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest

from support.commands import REPOSITORY
from support.scripts import run_script, small_llama


CONFIG = small_llama()


def test_nccl_takes_nodes_for_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    nodes = importlib.import_module("lib.nodes")
    hosts = []
    for rank in range(4):
        launched = {"RANK": str(rank), "WORLD_SIZE": "4", "NCCL_NSOCKS_PERTHREAD": "2"}
        with mock.patch.dict(os.environ, launched):
            nodes.set_apart(2)
            hosts.append(os.environ["NCCL_HOSTID"])
            assert os.environ["NCCL_NSOCKS_PERTHREAD"] == "2", "what is set stays"
            assert os.environ["NCCL_NVLS_ENABLE"] == "0"

    assert hosts == ["node-0", "node-0", "node-1", "node-1"]


def test_ranks_of_two_nodes_send_what_is_planned(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps(CONFIG))
    options = ["--device", "cpu", "--dtype", "bfloat16", "--config", str(config), "--documents", "6144,32x64"]
    quick = [
        "--nodes",
        "2",
        "--no-fsdp",
        "--modes",
        "placed",
        "--no-exposed",
        "--no-kernels",
        "--rounds",
        "1",
        "--warmup",
        "0",
        "--out",
        out,
    ]
    printed = run_script(4, tmp_path, ["scripts/benchmarks/attention_step.py", *options, *quick])

    assert "2 nodes of 2 ranks" in printed
    assert "chunks; stripes: tokens " in printed
    rows = re.findall(r"^\| (\d) \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", printed, re.MULTILINE)
    assert [row[:2] for row in rows] == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]
    for _, _, inside_planned, inside, between_planned, between in rows:
        assert inside_planned == inside
        assert between_planned == between
        assert float(inside) > 0
        assert float(between) > 0
    assert all(error <= 1 for error in json.loads(out.read_text())["errors"]["placed"].values())
