"""Scripts of the repository on ranks that a fork server starts, for tests of the script and not of its launcher: a
launched process imports for seconds what these have imported already."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distca_hf.launched import launched_servers
from support.commands import REPOSITORY
from support.ranks import run_ranks


# Variables in which a launcher, and `distca_hf.run`, number a process.
LAUNCHED_NUMBERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "DISTCA_LAUNCHED_SERVERS",
)


_destroy = dist.destroy_process_group


def small_llama(**changes: object) -> dict[str, object]:
    """Returns the configuration of a Llama of one small layer, as programs take it in a file."""
    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return {"model_type": "llama", **sizes, "num_attention_heads": 2, "num_key_value_heads": 2, **changes}


def run_script(
    world_size: int, folder: Path, words: Sequence[str | Path], *, servers: int = 0, nodes: int = 1, **environment: str
) -> str:
    """What a script prints on all ranks together, those of rank 0 first.

    Args:
        folder: where it runs.
        servers: attention servers beside the ranks.
        nodes: that a launcher would have started equally many of the ranks on.
        words: the script, or "-m" and a module, from the repository's root, and what follows on a launcher's line.

    Raises:
        AssertionError: it failed or hung; shows the end of its output.
    """
    places = [REPOSITORY / word if (REPOSITORY / word).is_file() else word for word in words]
    logs = folder / "ranks"
    words_of_all = [str(word) for word in places]
    run_ranks(world_size, _run, logs, folder, words_of_all, environment, nodes, servers=servers)
    return "".join((logs / f"rank-{rank}.log").read_text(errors="replace") for rank in range(world_size))


def _run(folder: Path, words: list[str], environment: dict[str, str], nodes: int) -> None:
    """Runs the script with this rank's group, or without one on a rank that is alone."""
    os.chdir(folder)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start processes
    if nodes > 1:
        ranks_per_node = dist.get_world_size() // nodes
        os.environ.update(
            LOCAL_RANK=str(dist.get_rank() % ranks_per_node),
            LOCAL_WORLD_SIZE=str(ranks_per_node),
            GROUP_WORLD_SIZE=str(nodes),
        )
    os.environ.update(environment)
    if dist.get_world_size() == 1 and not launched_servers():
        dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            del os.environ[name]
    else:
        dist.init_process_group, dist.destroy_process_group = _keep_the_group, _keep_until_all_end
    try:
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def _keep_the_group(backend: str, **_: Any) -> None:
    """Stands for `init_process_group`: the group is there already."""
    assert backend == dist.get_backend()


def _keep_until_all_end(group: dist.ProcessGroup | None = None) -> None:
    """Stands for `destroy_process_group`, after which torch may hang: a DDP model that is dropped later holds the
    interpreter's lock while it waits for gloo's threads, and one of them may wait for the lock."""
    if group is not None and group is not dist.group.WORLD:
        _destroy(group)
