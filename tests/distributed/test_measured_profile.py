"""`distca profile` on ranks over gloo: every part is measured, and links are put into a profile."""

import json
from pathlib import Path

from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.analysis.profiles.measure import Grid
from support.scripts import run_script


MODULE = ["-m", "distca_hf.analysis.profiles", "--cpu", "--model", "qwen3-0.6b"]


def test_two_ranks_write_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    (tmp_path / "links").mkdir()
    printed = run_script(2, tmp_path, [*MODULE, "--output", file])
    profile, grid = ClusterProfile.load(file), Grid.of_cpu((16, 8, 128))

    # 1. Every size of every table.
    full, group, window = profile.attention
    assert (full.heads, full.kv_heads, full.window_tokens) == (16, 8, 0)
    assert (group.heads, group.kv_heads) == (2, 1)
    assert window.window_tokens == grid.tables[-1].window_tokens
    assert full.square_tokens == grid.tables[0].square_tokens
    assert len(full.prefix_forward) == len(grid.tables[0].prefix_queries)
    assert profile.layers[0].tokens == (32.0, 128.0)
    # 2. Links of one node alone.
    assert profile.between_nodes is None
    assert profile.within_node is not None
    assert profile.within_node.ranks == 2
    assert profile.within_node.num_bytes == tuple(map(float, grid.num_bytes))
    assert len(profile.within_node.one_way) == len(profile.within_node.to_next) == len(grid.num_bytes)
    # 3. Where it comes from.
    assert profile.made.processes == 2
    assert "--cpu" in profile.made.command
    assert "torch" in profile.made.versions

    # 4. Words at the end, of one rank.
    assert printed.count(f"{file}: 2 x ") == 1
    assert "links between nodes: not measured" in printed

    # 5. Links alone, as those between nodes; everything else stays.
    run_script(2, tmp_path / "links", [*MODULE, "--as-between-nodes", file, "--remarks", "slow"])
    merged = ClusterProfile.load(file)
    assert merged.between_nodes is not None
    assert "slow" in merged.between_nodes.command
    assert (merged.attention, merged.layers, merged.within_node) == (
        profile.attention,
        profile.layers,
        profile.within_node,
    )


def test_one_rank_has_no_links(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    printed = run_script(1, tmp_path, [*MODULE, "--output", file, "--json"])

    content = json.loads(file.read_text())
    (figures,) = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    assert figures["file"] == str(file)
    assert figures["within_node"] is None
    assert content["within_node"] is None
    assert content["between_nodes"] is None


def test_two_nodes_have_links_of_both_kinds(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    run_script(4, tmp_path, [*MODULE, "--output", file], nodes=2)
    profile, sizes = ClusterProfile.load(file), len(Grid.of_cpu((16, 8, 128)).num_bytes)

    assert (profile.made.processes, profile.made.nodes) == (4, 2)
    for links, ranks in ((profile.within_node, 2), (profile.between_nodes, 4)):
        assert links is not None
        assert (links.ranks, links.ranks_per_node) == (ranks, 2)
        assert len(links.one_way) == len(links.to_next) == sizes
