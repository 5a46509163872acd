"""Launched: numbers that a launcher gave to this process, in variables of the environment.

Beside the settings (`config`), this is the only place that reads the environment.
"""

import os

from distca_hf.errors import ConfigError
from distca_hf.roles import CARVED, LaunchedProcess, read_servers


NO_STORE = (
    "trainers and attention servers meet in the launcher's store, and this process has none: start it with "
    "torchrun or accelerate launch, several processes, without TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
)


def launched_rank() -> int:
    """Returns the rank that the launcher gave to this process (0 without a launcher)."""
    return int(os.environ.get("RANK", "0"))


def launched_local_rank() -> int:
    """Returns the number of this process on its node (0 without a launcher)."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def launched_error_file() -> str | None:
    """Returns the file in which torchrun and accelerate look for the error that ended this process."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def launched_world_size() -> int:
    """Returns the number of processes the launcher started (1 without a launcher)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_store() -> tuple[str, int, int]:
    """Returns host and port of the store that the launcher keeps beside its processes, and how often it has started
    them before.

    Raises:
        ConfigError: it keeps none.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "MASTER_ADDR" not in os.environ:
        raise ConfigError(NO_STORE)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), attempt


def launched_ranks_per_node() -> int:
    """Returns the number of processes that the launcher started on this node (0 without a launcher)."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))


def launched_node() -> int:
    """Returns the number that the launcher gave to this node (0 without a launcher)."""
    return int(os.environ.get("GROUP_RANK", "0"))


def launched_nodes() -> int:
    """Returns the number of nodes of the launcher (1 without a launcher)."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def carved_servers() -> tuple[int, ...]:
    """Returns how many processes of each node were made attention servers; () if none."""
    return read_servers(os.environ[CARVED]) if CARVED in os.environ else ()


def launched_process() -> LaunchedProcess:
    """Returns the numbers that the launcher gave to this process, to take its role by.

    Raises:
        ConfigError: no launcher with a store started it, or roles were taken before.
    """
    if not is_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(NO_STORE)
    if CARVED in os.environ:
        raise ConfigError(
            f"{CARVED}={os.environ[CARVED]}: this process has its role already. Where its script starts another "
            f"training, remove {CARVED} from the environment of that one"
        )
    return LaunchedProcess(
        rank=launched_rank(),
        local_rank=launched_local_rank(),
        world_size=launched_world_size(),
        local_world_size=launched_ranks_per_node(),
        node=launched_node(),
        num_nodes=launched_nodes(),
    )


def is_launched() -> bool:
    """Returns whether a launcher (torchrun, accelerate launch) started this process as one of its ranks. Schedulers
    of clusters number nodes by the first two names."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= set(os.environ)
