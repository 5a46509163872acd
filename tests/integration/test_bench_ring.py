"""Modes of the benchmark step that call the package ring-flash-attn: its own code on the kernel of all modes."""

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from distca_hf.testing import attend_documents
from support.commands import REPOSITORY
from support.scripts import run_script


RANKS, MODES = 2, ("ideal", "placed", "zigzag", "llama3")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
is_there = importlib.util.find_spec("ring_flash_attn") is not None


@pytest.fixture
def ring_code(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    return importlib.import_module("lib.baselines.ring_code")


def test_stand_ins_attend_and_derive_as_the_kernel(ring_code: ModuleType) -> None:
    torch.manual_seed(0)
    lengths, scale = [5, 9], 0.3
    q, k, v = (torch.randn(14, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    exact = attend_documents(q, k, v, lengths, scale)
    dout = torch.randn_like(exact)
    interface, offsets = ring_code.interface_of("cpu"), torch.tensor([0, 5, 14], dtype=torch.int32)
    spans = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 9, "max_seqlen_k": 9}
    asked = {**spans, "dropout_p": 0, "softmax_scale": scale, "causal": True}
    with torch.no_grad():
        out, lse, *_ = interface._flash_attn_varlen_forward(q, k, v, **asked)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        interface._flash_attn_varlen_backward(dout, q, k, v, out, lse, *gradients, **asked)

    torch.testing.assert_close(out, exact)
    for gradient, expected in zip(gradients, torch.autograd.grad(exact, (q, k, v), dout), strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.skipif(is_there, reason="the package is there")
def test_modes_are_refused_where_the_package_is_missing(tmp_path: Path) -> None:
    command = ["scripts/benchmarks/attention_step.py", "--device", "cpu", "--modes", "ideal,zigzag"]
    with pytest.raises(AssertionError, match=r"mode zigzag needs ring-flash-attn .*, which is not installed"):
        run_script(1, tmp_path, command)


@pytest.mark.skipif(not is_there, reason="needs ring-flash-attn")
def test_the_package_attends_exactly(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps(CONFIG))
    options = ["--device", "cpu", "--dtype", "bfloat16", "--config", str(config), "--documents", "512,8x64"]
    command = ["scripts/benchmarks/attention_step.py", *options, "--modes", ",".join(MODES), "--no-kernels"]
    run_script(RANKS, tmp_path, [*command, "--rounds", "1", "--warmup", "0", "--out", out])
    facts = json.loads(out.read_text())

    assert all(error <= 1 for errors in facts["errors"].values() for error in errors.values())
    # Keys and values of the other rank, in bf16, forward and recomputed; then keys, values and gradients.
    rows = 512 * 2 * 2 * 16
    sent = {name: facts["modes"][name]["exchanged_bytes"] for name in MODES}
    assert sent["zigzag"] == 3 * rows * 2 + 2 * rows * 4
    assert sent["llama3"] == 4 * rows * 2
