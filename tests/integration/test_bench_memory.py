"""The benchmark of memory runs on two CPU processes, where there is nothing to count."""

import json
from pathlib import Path

from support.scripts import run_script


CONFIG = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_every_way_runs_all_its_steps(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    steps = ["--tokens-per-rank", "256", "--longest", "400", "--steps", "2", "--parts", "2"]
    printed = run_script(2, tmp_path, ["scripts/benchmarks/memory.py", "--device", "cpu", "--config", config, *steps])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]

    expected = [[way, part] for way in ("constant", "placed", "given") for part in ("1 to 1", "2 to 2")]
    assert [row[:2] for row in rows[2:]] == expected
    assert all(row[2:] == ["0.00", "0.00", "-", "0", "0"] for row in rows[2:])
    assert "documents prolong_up, longest 400; 256 tokens per rank and step" in printed
