"""The search for the longest document that trains: lengths that it tries, attempts that fail, and one that trains."""

import json
import runpy
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support.commands import REPOSITORY
from support.scripts import run_script, small_llama


GIB = 2**30
CONFIG = small_llama(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


def ended(search: ModuleType, peak_bytes: int | None, trained: bool = True) -> object:
    """An attempt that trained, or ran out of memory."""
    return search.Attempt("", {"peak_bytes": peak_bytes} if trained else None, "", 0, 1.0)


@pytest.mark.parametrize("knows_peaks", [True, False])
@pytest.mark.parametrize("most_tokens", [64, 100, 128, 199, 1000, 1037])
def test_search_ends_at_the_longest_length(
    script: Callable[[str], ModuleType], most_tokens: int, knows_peaks: bool
) -> None:
    search = script("lib.longest")
    tried: dict[int, object] = {}
    while tokens := search.next_tokens(tried, 128, 16, 10 * (most_tokens + 5) if knows_peaks else None):
        assert tokens % 16 == 0
        assert tokens not in tried
        tried[tokens] = ended(search, 10 * (tokens + 5) if knows_peaks else None, tokens <= most_tokens)

    assert search.longest_of(tried) == most_tokens // 16 * 16
    assert len(tried) < 12


def test_peaks_say_where_the_limit_is(script: Callable[[str], ModuleType]) -> None:
    search = script("lib.longest")
    tried = {128: ended(search, 40 * GIB), 256: ended(search, 60 * GIB)}
    assert search.next_tokens(tried, 128, 16, 75 * GIB) == 352
    assert search.next_tokens(tried, 128, 16, 200 * GIB) == 512
    assert search.next_tokens(tried, 128, 16, 60 * GIB) == 272
    assert search.next_tokens({128: ended(search, None, trained=False)}, 128, 128) is None


def try_command(
    script: Callable[[str], ModuleType], folder: Path, code: str, free: list[int] | None = None, seconds: float = 1e9
) -> object:
    """How an attempt ends whose program is `code`; `free` are readings of the host's memory, the last one for ever."""
    readings = iter(free or [])
    last = [10 * GIB]

    def free_bytes() -> int:
        last[0] = next(readings, last[0])
        return last[0]

    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    return script("lib.longest").run_attempt(command, folder, free_bytes, GIB, seconds)


def test_outcomes_of_attempts(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    write = "import sys, pathlib; folder = pathlib.Path(sys.argv[1]);"
    trained = try_command(
        script, tmp_path / "a", f"{write} (folder / 'result.json').write_text('[5]')", [9 * GIB, 3 * GIB]
    )
    assert (trained.outcome, trained.figures) == ("trained", [5])

    full = f"{write} (folder / 'out_of_memory.3.txt').write_text('rank 3: full'); sys.exit(1)"
    assert (out := try_command(script, tmp_path / "b", full)).outcome == "GPU memory"
    assert out.reason == "rank 3: full"

    assert try_command(script, tmp_path / "c", "import os; os.kill(os.getpid(), 9)").outcome == "host memory"
    waits = "import signal; signal.pause()"
    short = try_command(script, tmp_path / "d", waits, [9 * GIB, 2 * GIB, GIB - 1])
    assert (short.outcome, short.host_bytes) == ("host memory", 8 * GIB + 1)
    assert try_command(script, tmp_path / "e", waits, seconds=0).outcome == "time"
    with pytest.raises(SystemExit, match=r"failed with 1:[\s\S]*ZeroDivisionError"):
        try_command(script, tmp_path / "f", "1 / 0")


def test_errors_of_a_full_gpu_are_known(script: Callable[[str], ModuleType]) -> None:
    is_out_of_memory = script("lib.longest").is_out_of_memory
    cause = ValueError("another")
    cause.__cause__ = torch.OutOfMemoryError("tried to allocate 2 GiB")
    assert is_out_of_memory(cause)
    assert is_out_of_memory(RuntimeError("NCCL error: Cuda failure 2 'out of memory'"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_free_memory_of_a_container_counts(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    for folder in (group, tmp_path / "proc"):
        folder.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 300 kB\nMemAvailable:  200 kB\n")
    free_host_bytes = script("lib.longest").free_host_bytes
    assert free_host_bytes(tmp_path) == 200 * 1024

    (group / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) == 200 * 1024
    (group / "memory.max").write_text("150000\n")
    (group / "memory.current").write_text("100000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 7000\n")
    assert free_host_bytes(tmp_path) == 57_000


@pytest.mark.parametrize(
    ("attended", "most", "ends", "found"),
    [(64, 1 << 30, "GPU memory", 640), (0, 1 << 30, "GPU memory", 640), (0, 256, "", 256), (0, 1 << 30, "time", None)],
)
def test_search_reports_the_longest(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    attended: int,
    most: int,
    ends: str,
    found: int | None,
) -> None:
    attempts = script("lib.longest")

    def run_attempt(command: list[str], *_: object) -> object:
        tokens = int(command[-1])
        assert out.is_file() == (tokens != 256), "figures are written after every attempt"
        if tokens <= 700 and ends != "time":
            figures = {"peak_bytes": tokens, "step_seconds": 1.0, "tokens_per_second": 1.0, "utilisation": None}
            return attempts.Attempt("trained", {**figures, "header": "a header"}, "", 0, 1.0)
        return attempts.Attempt(ends, None, "", 0, 1.0)

    monkeypatch.setattr(attempts, "run_attempt", run_attempt)
    program, out = REPOSITORY / "scripts/benchmarks/longest_context.py", tmp_path / "out.json"
    words = ["--device", "cpu", "--ranks", "2", "--first-tokens", "256", "--resolution", "128", "--head", "none"]
    limits = ["--attended-tokens", str(attended), "--most-tokens", str(most), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [str(program), *words, *limits])
    with nullcontext() if found else pytest.raises(SystemExit, match=r"nothing trained: --minutes 60\.0 ended"):
        runpy.run_path(str(program), run_name="__main__")
    printed, written = capsys.readouterr().out, json.loads(out.read_text())

    assert ("ALST" in printed) == (found is not None and not attended)
    told = f"longest{', unconfirmed' * bool(attended)}: {2 * (found or 0):,} tokens on 2 ranks, {found} on each"
    assert (told in printed) == (found is not None)
    assert written["longest_tokens_per_rank"] == found


def test_an_attempt_trains_on_two_ranks(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    model = ["--device", "cpu", "--config", str(config), "--head", "none", "--kernel", "reference"]
    saved = ["--mlp-tokens", "50", "--attention-kv-heads", "1", "--offload"]
    losses = []
    for attended_tokens in ("0", "16"):
        folder = tmp_path / attended_tokens
        folder.mkdir()
        given = ["--attempt", str(folder), "--tokens-per-rank", "128", "--attended-tokens", attended_tokens]
        run_script(2, folder, ["scripts/benchmarks/longest_context.py", *model, *saved, *given])
        figures = json.loads((folder / "result.json").read_text())
        losses.append(figures["loss"])

        assert figures["tokens_per_rank"] == 128
        assert len(figures["seconds"]) == 1
        assert "MLPs on 50 tokens at a time; attention on 1 KV heads at a time" in figures["header"]
        assert "fused AdamW on the host" in figures["header"]
    assert losses[0] != losses[1]
