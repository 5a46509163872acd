"""Memory of the host that processes can still take: of the machine, and of the container that they run in."""

from pathlib import Path


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
