"""Attempts that may run out of memory: each in processes of its own, watched from outside.

A process that ran out of a GPU's memory says so in a file. Memory of the host must not run out: the kernel would kill
any process of the machine. So an attempt is stopped as soon as less than a margin is free.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


RESULT, OUT_OF_MEMORY = "result.json", "out_of_memory.{rank}.txt"
# Words of errors of torch, CUDA, NCCL and the product for a GPU without room.
MEMORY_WORDS = re.compile(r"out of memory|OutOfMemory|OUT_OF_MEMORY|bytes are free on cuda")
KILLED = re.compile(r"exitcode\s*:\s*-9\b")  # of torchrun, for a process that the kernel killed
POLL_SECONDS, STOP_SECONDS = 0.25, 60
LOG_TAIL = 6000


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended."""

    outcome: str  # "trained", "GPU memory", "host memory" or "time"
    figures: dict[str, Any] | None  # what it wrote, if it trained
    reason: str  # the first line of its error, if there is one
    host_bytes: int  # memory of the host that was taken while it ran
    seconds: float  # that it took, with the start of its processes


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a GPU had no room: by the words of an error, or of one that it came from."""
    chain: BaseException | None = error
    while chain is not None:
        if MEMORY_WORDS.search(f"{type(chain).__name__}: {chain}"):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def run_attempt(
    command: Sequence[str], folder: Path, free_bytes: Callable[[], int], margin_bytes: int, most_seconds: float
) -> Attempt:
    """Runs a command that writes its figures, or that it is out of memory, to `folder`; returns how it ended.

    Args:
        command: program and arguments.
        folder: is made; the command's output goes there, too.
        free_bytes: returns those of the host.
        margin_bytes: the command is stopped if less of the host's memory is free.
        most_seconds: the command is stopped after so long.

    Raises:
        SystemExit: it failed for another reason; shows the end of its output.
    """
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    began, free_before = time.monotonic(), free_bytes()
    least, stopped = free_before, ""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and not stopped:
                least = min(least, free_bytes())
                if least < margin_bytes:
                    stopped = "host memory"
                elif time.monotonic() - began > most_seconds:
                    stopped = "time"
                else:
                    _wait(process, POLL_SECONDS)
        finally:
            _stop(process)
    printed = log.read_text(errors="replace")
    reasons = [path.read_text() for path in sorted(folder.glob(OUT_OF_MEMORY.format(rank="*")))]
    if not stopped and process.returncode == 0 and (folder / RESULT).is_file():
        outcome, reason = "trained", ""
    elif reasons:
        outcome, reason = "GPU memory", reasons[0]
    elif stopped:
        outcome, reason = stopped, ""
    elif process.returncode == -9 or KILLED.search(printed):
        outcome, reason = "host memory", "a process was killed (signal 9)"
    else:
        raise SystemExit(f"{' '.join(command)}\nfailed with {process.returncode}:\n{printed[-LOG_TAIL:]}")
    figures = json.loads((folder / RESULT).read_text()) if outcome == "trained" else None
    return Attempt(outcome, figures, reason, free_before - least, time.monotonic() - began)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs: a launcher ends those that it started."""
    if process.poll() is None:
        process.terminate()
        _wait(process, STOP_SECONDS)
    if process.poll() is None:
        process.kill()
    process.wait()


# Limit, use, and what of the use is a cache that would be given back; of control groups of version 2 and 1.
CONTAINERS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that are free on the machine or in the container, whichever is less.

    Args:
        root: folder in which `proc` and `sys` are found.
    """
    free = [_numbers(_text(root / "proc/meminfo"))["MemAvailable"] * 1024]
    for limit, use, cache in CONTAINERS:
        folder = (root / "sys/fs/cgroup" / limit).parent
        most = _text(root / "sys/fs/cgroup" / limit)
        if most not in ("", "max"):
            used = int(_text(root / "sys/fs/cgroup" / use)) - _numbers(_text(folder / "memory.stat")).get(cache, 0)
            free.append(int(most) - used)
    return min(free)


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def _numbers(text: str) -> dict[str, int]:
    """Returns the numbers of lines `name: number unit`."""
    lines = [line.replace(":", " ").split() for line in text.splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


@dataclass(frozen=True)
class Tried:
    """A length that was tried."""

    tokens: int  # on each rank
    trained: bool  # whether it did; else memory was out
    peak_bytes: int | None = None  # memory of the fullest GPU; None if it is not known


def longest_of(tried: Sequence[Tried]) -> Tried | None:
    """Returns the longest length that trained; None if none did."""
    return max((one for one in tried if one.trained), key=lambda one: one.tokens, default=None)


def next_tokens(
    tried: Sequence[Tried], first_tokens: int, resolution_tokens: int, limit_bytes: int | None = None
) -> int | None:
    """Returns how many tokens of a rank to try next, a multiple of the resolution; None at the end.

    Lengths double until memory is out, and halve while nothing trains. Then the gap between the longest that trained
    and the shortest that did not is halved. An attempt close to the limit costs minutes: as soon as two lengths have
    trained, a line through their peaks says where the limit is, and that is tried instead of the double.

    Args:
        tried: so far.
        first_tokens: of a rank, at the beginning.
        resolution_tokens: to which the limit is found.
        limit_bytes: memory of a GPU; None if it is not known.
    """
    longest = longest_of(tried)
    shortest = min((one.tokens for one in tried if not one.trained), default=None)
    if longest is None:
        chosen = first_tokens if shortest is None else shortest // 2
        return chosen // resolution_tokens * resolution_tokens or None
    if shortest is None:
        double = 2 * longest.tokens
        predicted = _predicted(tried, limit_bytes)
        if predicted is None or predicted >= double:
            return double
        return max(predicted // resolution_tokens * resolution_tokens, longest.tokens + resolution_tokens)
    if shortest - longest.tokens <= resolution_tokens:
        return None
    return (longest.tokens + shortest) // 2 // resolution_tokens * resolution_tokens


def _predicted(tried: Sequence[Tried], limit_bytes: int | None) -> int | None:
    """Returns at how many tokens the limit is met, if peaks go on as between the two longest that trained."""
    known = sorted((one.tokens, one.peak_bytes) for one in tried if one.trained and one.peak_bytes)
    if limit_bytes is None or len(known) < 2:
        return None
    (fewer, lower), (more, higher) = known[-2:]
    if higher <= lower:
        return None
    return more + int((limit_bytes - higher) * (more - fewer) / (higher - lower))
