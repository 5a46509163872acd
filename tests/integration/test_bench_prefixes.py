"""The benchmark of shared prefixes runs on two CPU processes; its documents are what its help says."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from support.scripts import run_script, small_llama


SIZES = {"prompt_tokens": 300, "turn_tokens": 150, "tool_tokens": 30, "turns": 3, "branches": 4}
OF_GROUPS = {"rows": 4, "generations": 4, "micro_batches": 2}
RANKS, ROUNDS = 2, 1


def test_prefixes_are_computed_once(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps(small_llama(vocab_size=512)))
    sizes = [word for name, size in (SIZES | OF_GROUPS).items() for word in (f"--{name.replace('_', '-')}", str(size))]
    steps = ["--tasks", "2", "--rounds", str(ROUNDS), "--warmup", "0", "--checkpointing", "full"]
    words = ["scripts/benchmarks/shared_prefixes.py", "--device", "cpu", "--config", config, "--out", out]
    printed = run_script(RANKS, tmp_path, [*words, *sizes, *steps])
    workloads = json.loads(out.read_text())["workloads"]

    assert [*workloads] == ["trees", "grpo", "dpo", "none"]
    for name, modes in workloads.items():
        assert f"documents of {name}; " in printed
        assert [*modes] == ["plain", "unshared", "shared"]
        given, trie = modes["shared"]["given_tokens"], modes["shared"]["trie_tokens"]
        for mode, figures in modes.items():
            assert len(figures["seconds"]) == ROUNDS
            assert figures["loss"] == pytest.approx(modes["plain"]["loss"], rel=1e-5)
            assert figures["ratio_to_first"] > 0
            assert all(
                least / whole <= work <= 1
                for least, whole, work in zip(trie, given, figures["remaining_work"], strict=True)
            )
            assert 0 < figures["ratio_to_work"] <= figures["ratio_to_trie"]
            if mode != "shared" or name == "none":
                assert figures["computed_tokens"] == given
            else:
                assert all(tokens >= least for tokens, least in zip(figures["computed_tokens"], trie, strict=True))
                saved = [whole - tokens for whole, tokens in zip(given, figures["computed_tokens"], strict=True)]
                assert all(0.7 * (whole - least) < of for whole, least, of in zip(given, trie, saved, strict=True))
    assert workloads["trees"]["plain"]["exchanged_bytes"] == 0 < workloads["trees"]["shared"]["exchanged_bytes"]


def documents_of(prefixes: ModuleType, workload: str, **changes: int) -> Any:
    options = argparse.Namespace(seed=0, **(SIZES | OF_GROUPS | changes))
    return prefixes.WORKLOADS[workload](prefixes.Drawn(options, workload, 0, 512), RANKS)


def test_documents_are_those_of_trainers(script: Callable[[str], ModuleType]) -> None:
    prefixes = script("lib.prefix_documents")

    [[first, second], [others, _]] = documents_of(prefixes, "trees", branches=5)
    trajectories = [*first, *second]
    assert [len(first), len(second)] == [2, 3]
    prompt = trajectories[0][:300]
    assert (others[0][:300] != prompt).any()  # of another task
    least, most = (SIZES["turns"] * (SIZES["turn_tokens"] + SIZES["tool_tokens"]) * half // 2 for half in (1, 3))
    for tokens in trajectories:
        assert (tokens[:300] == prompt).all()
        assert least <= len(tokens) - 300 <= most
    common, _ = prefixes.equal_beginnings(trajectories)
    assert all(tokens >= 300 for tokens in sorted(common)[1:])
    assert max(common) > 302  # one branched off after a turn of another

    micro_batches = documents_of(prefixes, "grpo")
    prompts = [[{tuple(tokens[:300]) for tokens in of_rank} for of_rank in micro] for micro in micro_batches]
    assert len(prompts) == OF_GROUPS["micro_batches"]
    of_ranks = [set.union(*(micro[rank] for micro in prompts)) for rank in range(RANKS)]
    assert [len(of_rank) for of_rank in of_ranks] == [2, 2]  # 8 consecutive rows, 4 of each prompt
    assert not of_ranks[0] & of_ranks[1]
    assert any(len(of_rank) == 2 for micro in prompts for of_rank in micro)  # shuffled

    [pairs] = documents_of(prefixes, "dpo")
    for of_rank in pairs:
        heads = [tuple(tokens[:300]) for tokens in of_rank]
        assert heads[: len(heads) // 2] == heads[len(heads) // 2 :]
        assert len({*heads}) == len(heads) // 2


def test_a_trie_counts_equal_beginnings_once(script: Callable[[str], ModuleType]) -> None:
    beginnings = script("lib.prefix_documents").equal_beginnings
    documents = [np.array(of) for of in ([1, 2, 3], [1, 2], [1, 300, 3], [2, 2, 3], [1, 2, 3, 4], [1, 2, 3])]

    common, lengths = beginnings(documents)
    assert sorted(lengths) == sorted(map(len, documents))
    assert sum(lengths) - sum(common) == len({tuple(of[: n + 1]) for of in documents for n in range(len(of))})
