"""Attempts that may run out of memory: each in new processes, which are watched from outside.

A process that ran out of a GPU's memory says so in a file. Memory of the host must not run out: the kernel would kill
any process of the machine. So an attempt is stopped as soon as less than a margin is free.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


RESULT, OUT_OF_MEMORY = "result.json", "out_of_memory.{rank}.txt"
# What errors of torch, CUDA, NCCL and the product say about a GPU without room.
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
    seconds: float  # time that it took, with the start of its processes


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a GPU had no room: by the message of an error, or of one that it came from."""
    chain: BaseException | None = error
    while chain is not None:
        if MEMORY_WORDS.search(f"{type(chain).__name__}: {chain}"):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def run_attempt(
    command: Sequence[str], folder: Path, free_bytes: Callable[[], int], margin_bytes: int, most_seconds: float
) -> Attempt:
    """Runs a command that writes its figures, or that it is out of memory, to a folder, which is made and gets its
    output, too; returns how it ended. Exits with the end of the output if the command failed for another reason.

    It is stopped if less of the host's memory is free than the margin, or after so many seconds.
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
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs: a launcher ends those that it started."""
    if process.poll() is None:
        process.terminate()
        _wait(process, STOP_SECONDS)
    if process.poll() is None:
        process.kill()
    process.wait()


def free_host_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that are free on the machine or in the container (a control group of version 2), whichever is
    less. `proc` and `sys` are found in `root`."""
    free, group = _numbers(root / "proc/meminfo")["MemAvailable"] * 1024, root / "sys/fs/cgroup"
    limit = (group / "memory.max").read_text().strip() if (group / "memory.max").is_file() else "max"
    if limit == "max":
        return free
    cache = _numbers(group / "memory.stat").get("inactive_file", 0)  # would be given back
    return min(free, int(limit) - int((group / "memory.current").read_text()) + cache)


def _numbers(file: Path) -> dict[str, int]:
    """Returns the numbers of lines `name: number unit`."""
    lines = [line.replace(":", " ").split() for line in file.read_text().splitlines()] if file.is_file() else []
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def longest_of(attempts: Mapping[int, Attempt]) -> int | None:
    """Returns the most tokens of a rank that trained, of attempts by their tokens; None if none did."""
    return max((tokens for tokens, one in attempts.items() if one.figures), default=None)


def next_tokens(
    attempts: Mapping[int, Attempt], first_tokens: int, resolution_tokens: int, limit_bytes: int | None = None
) -> int | None:
    """Returns how many tokens of a rank to try next, a multiple of the resolution; None at the end.

    Lengths double until memory is out, and halve while nothing trains. Then the gap between the longest that trained
    and the shortest that did not is halved. An attempt close to the limit costs minutes: as soon as two lengths have
    trained, a line through their peaks says where the limit of a GPU's memory is, and that is tried instead of the
    double. `limit_bytes` is None if it is not known.
    """
    longest = longest_of(attempts)
    shortest = min((tokens for tokens, one in attempts.items() if not one.figures), default=None)
    if longest is None:
        chosen = first_tokens if shortest is None else shortest // 2
        return chosen // resolution_tokens * resolution_tokens or None
    if shortest is None:
        double = 2 * longest
        predicted = _predicted(attempts, limit_bytes)
        if predicted is None or predicted >= double:
            return double
        return max(predicted // resolution_tokens * resolution_tokens, longest + resolution_tokens)
    if shortest - longest <= resolution_tokens:
        return None
    return (longest + shortest) // 2 // resolution_tokens * resolution_tokens


def _predicted(attempts: Mapping[int, Attempt], limit_bytes: int | None) -> int | None:
    """Returns at how many tokens the limit is met, if peaks go on as between the two longest that trained."""
    peaks = {tokens: one.figures["peak_bytes"] for tokens, one in attempts.items() if one.figures}
    known = sorted((tokens, peak) for tokens, peak in peaks.items() if peak)
    if limit_bytes is None or len(known) < 2:
        return None
    (fewer, lower), (more, higher) = known[-2:]
    if higher <= lower:
        return None
    return more + int((limit_bytes - higher) * (more - fewer) / (higher - lower))
