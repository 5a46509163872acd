"""Modes of the benchmark step that call other packages: ring-flash-attn, axolotl-ringmaster, MagiAttention."""

import importlib
import importlib.util
import json
import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.cost import Mask
from distca_hf.testing import attend_documents
from support.commands import REPOSITORY
from support.scripts import run_script


RANKS, STEP, PLAIN = 2, "scripts/benchmarks/attention_step.py", ("ideal", "placed")
PACKAGES = {"zigzag": "ring_flash_attn", "ringmaster-ring": "ringmaster", "magi": "magi_attention"}


def is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_there(package), reason=f"needs {package}")


def measured(
    folder: Path, modes: Sequence[str], *options: str, script: Sequence[str | Path] = (STEP,), **environment: str
) -> dict[str, Any]:
    """Figures of one round on two CPU processes. The program itself compares losses of the modes."""
    out, model = folder / "out.json", ["--device", "cpu", "--preset", "tiny", "--layers", "1"]
    words = [*script, *model, "--documents", "512,8x64", "--modes", ",".join(modes)]
    run_script(RANKS, folder, [*words, "--rounds", "1", "--warmup", "0", "--out", out, *options], **environment)
    facts: dict[str, Any] = json.loads(out.read_text())
    assert all(error <= 1 for errors in facts["errors"].values() for error in errors.values())
    return facts


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
        yield importlib.import_module("lib.baselines.peers")


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

    flash = interface.flash_attn_varlen_func
    spanned = flash(q, k, v, *spans.values(), dropout_p=0.0, softmax_scale=scale, causal=True)
    expected = torch.autograd.grad(exact, (q, k, v), dout)

    for found in (out, spanned):
        torch.testing.assert_close(found, exact)
    for found in (gradients, torch.autograd.grad(spanned, (q, k, v), dout)):
        torch.testing.assert_close(tuple(found), expected)


@pytest.mark.parametrize(("mode", "package"), PACKAGES.items())
def test_modes_are_refused_where_the_package_is_missing(tmp_path: Path, mode: str, package: str) -> None:
    if is_there(package):
        pytest.skip("the package is there")
    with pytest.raises(AssertionError, match=rf"mode {mode} needs {package} \(pip .*\), which is not installed"):
        run_script(1, tmp_path, [STEP, "--device", "cpu", "--modes", f"ideal,{mode}"])


@needs("ring_flash_attn")
def test_ring_flash_attn_attends_exactly(tmp_path: Path) -> None:
    facts = measured(tmp_path, [*PLAIN, "zigzag", "llama3"], "--dtype", "bfloat16")
    # Keys and values of the other rank, in bf16, forward and recomputed; then keys, values and gradients.
    rows = 512 * 2 * 2 * 16
    assert facts["modes"]["zigzag"]["exchanged_bytes"] == 3 * rows * 2 + 2 * rows * 4
    assert facts["modes"]["llama3"]["exchanged_bytes"] == 4 * rows * 2


@needs("ringmaster")
def test_ringmaster_attends_exactly(tmp_path: Path) -> None:
    measured(tmp_path, [*PLAIN, "ringmaster-ulysses", "ringmaster-ring"])


# MagiAttention as far as it runs on CPUs: its own torch attention, kernels of Triton interpreted, nothing compiled.
MAGI_ON_CPUS = """
import contextlib, runpy, sys, types
import torch
extension = types.ModuleType("magi_attention.magi_attn_ext")
class KernelBarrier:
    def __init__(self, target): pass
    reset = synchronize = lambda self: None
extension.KernelBarrier = KernelBarrier
sys.modules[extension.__name__] = extension
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.nvtx.range = lambda *_, **__: contextlib.nullcontext()
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
import triton.language as tl
from triton.language.extra import libdevice
libdevice.log1p = lambda x: tl.log(1 + x)
import magi_attention
del sys.argv[0]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@needs("magi_attention")
def test_magi_attention_attends_exactly(tmp_path: Path) -> None:
    script = tmp_path / "magi_on_cpus.py"
    script.write_text(MAGI_ON_CPUS)
    environment = {"TRITON_INTERPRET": "1", "MAGI_ATTENTION_KERNEL_BACKEND": "sdpa"}
    options = ["--magi-settings", "0:1,64:1,64:2"]
    facts = measured(tmp_path, [*PLAIN, "magi"], *options, script=(script, STEP), **environment)
    settings = {f"magi@{setting}" for setting in ("0:1", "64:1", "64:2")}
    assert set(facts["modes"]) == {*PLAIN, *settings}
    assert set(facts["planning_seconds"]) == settings
    assert min(facts["planning_seconds"].values()) > 0


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("text", ["512", "512:", "x:1", "512:1:1", ""])
def test_settings_of_magi_attention_are_two_numbers(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not"):
        importlib.import_module("lib.parser").magi_settings(text)


@given(st.integers(1, 8), st.integers(1, 2000), st.integers(0, 1000), st.integers(1, 16))
def test_chunks_of_magi_attention_leave_nothing_to_pad(
    peers: ModuleType, ranks: int, tokens: int, wanted: int, least_chunks: int
) -> None:
    chunk = peers.chunk_tokens(ranks * tokens, ranks, wanted, least_chunks)
    # What the package does with it: at least so many chunks for a rank, and padding up to whole chunks of all ranks.
    most = math.ceil(ranks * tokens / (least_chunks * ranks))

    assert tokens % chunk == 0
    assert chunk == min(chunk, most)
    assert not any(tokens % larger == 0 for larger in range(chunk + 1, min(wanted or most, most) + 1))


class DealtOut:
    """Stands in for `magi_attention.api`: keeps what it is asked for, and deals chunks out at random."""

    def __init__(self, rank: int, chunk: int, dealt: list[int]) -> None:
        self.rank, self.chunk, self.dealt = rank, chunk, dealt
        self.asked: list[tuple[Any, ...]] = []
        self.DispatchConfig = self.OverlapConfig = dict
        self.DistAttnConfig = lambda *configs: configs

    def magi_attn_varlen_key(self, *given: Any, **named: Any) -> str:
        self.asked.append((*given, named))
        return "a key"

    def clear_cache(self, group: object) -> None:
        self.asked.append(("cleared", group))

    def dispatch(self, values: torch.Tensor, key: str) -> torch.Tensor:
        assert key == "a key"
        chunks = values.split(self.chunk)
        return torch.cat([chunk for chunk, rank in zip(chunks, self.dealt, strict=True) if rank == self.rank])


def test_packages_are_measured_with_equal_layers_alone(peers: ModuleType) -> None:
    model = importlib.import_module("lib.model")
    narrow, wide = (model.AttentionKind(Mask(), 4, 2, dim, dim, 0.25) for dim in (16, 32))
    with pytest.raises(SystemExit, match="layers attend in 2 ways: leave modes of other packages out"):
        model.Shape(0.0, {narrow: [None], wide: [None]}).only_kind  # noqa: B018


@given(st.data())
def test_documents_reach_magi_attention_and_return(peers: ModuleType, data: st.DataObject) -> None:
    ranks, chunk = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    chunks = ranks * data.draw(st.integers(8, 10))
    dealt = data.draw(st.permutations([number % ranks for number in range(chunks)]))
    ends = data.draw(st.sets(st.integers(1, chunks * chunk - 1), max_size=6))
    offsets = [0, *sorted(ends), chunks * chunk]
    lengths = [stop - start for start, stop in pairwise(offsets)]
    tokens = [np.arange(start, stop) for start, stop in pairwise(offsets)]
    model = importlib.import_module("lib.model")
    shape = model.Shape(0.0, {model.AttentionKind(Mask(), 4, 2, 16, 16, 0.25): [None]})
    found = []
    for rank in range(ranks):
        api = DealtOut(rank, chunk, dealt)
        wires = SimpleNamespace(world_size=ranks, group="a group")
        package = ModuleType("magi_attention")
        package.api = api  # type: ignore[attr-defined]
        package.env = SimpleNamespace(general=SimpleNamespace(min_chunks_per_rank=lambda: 8))  # type: ignore[attr-defined]
        with mock.patch.dict(sys.modules, {"magi_attention": package}):
            work = peers.MagiWork(f"{chunk}:2", shape, wires, lengths, torch.device("cpu"))
        batch = work.batch(tokens)
        found += zip(batch["input_ids"][0].tolist(), batch["position_ids"][0].tolist(), strict=True)
        with work.planned():
            pass

        planned, cleared, again = api.asked
        assert cleared == ("cleared", "a group")
        for queries, keys, *sizes, named in (planned, again):
            assert queries.tolist() == keys.tolist() == offsets
            assert sizes == [4, 2, 16, 0, "a group"]
            limits = {"chunk_size": work.chunk_tokens}, {"degree": 2}
            assert named == {"causal": True, "dist_attn_config": limits}
        assert len(work.planning_seconds) == 1
    assert sorted(found) == [(start + at, at) for start, stop in pairwise(offsets) for at in range(stop - start)]
