"""Launched: numbers that a launcher gave to this process, and its role: trainer or attention server.

Apart from the settings (`config`), this is the only place that reads the environment.

An attention server computes attention for trainers, and has no weights. Servers are the last processes of their node.
The others train, and are numbered as if no servers had been launched, so all libraries count only trainers.
"""

import os
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distca_hf.errors import ConfigError


# Environment variable with the number of servers of each node, once roles are taken: "1,1".
LAUNCHED_SERVERS = "DISTCA_LAUNCHED_SERVERS"
# Environment variable that makes every Trainer of the process attached: 1 or 0.
ATTACH = "DISTCA_ATTACH"
# Environment variable with the secret that the processes of a job share, and the file in which the first process of a
# node leaves it for the others.
JOB_SECRET, SECRET_FILE = "DISTCA_JOB_SECRET", "distca_job_secret"
# Exit status of an attention server that has nobody to serve: the trainers or their launcher are gone.
TRAINERS_GONE = 3
NO_STORE = (
    "trainers and attention servers meet in the launcher's store, and this process has none: start it with "
    "torchrun or accelerate launch, several processes, without TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
)


@dataclass(frozen=True)
class Role:
    """The role of one process."""

    is_server: bool  # whether it is an attention server; otherwise it trains
    number: int  # its rank among trainers, or its number among servers; both are counted by node, then by local rank
    num_trainers: int
    num_servers: int
    trainers_per_node: int  # trainers of every node that has any
    servers_of_nodes: tuple[int, ...]

    def environment(self) -> dict[str, str]:
        """Returns the variables that number this process.

        LOCAL_RANK, and so the device, stays as launched; so does the number of the node. Servers get the ranks after
        all trainers, so ranks in log lines are unique.
        """
        launched = {LAUNCHED_SERVERS: ",".join(map(str, self.servers_of_nodes))}
        if self.is_server:
            return launched | {"RANK": str(self.num_trainers + self.number)}
        return launched | {
            "RANK": str(self.number),
            "WORLD_SIZE": str(self.num_trainers),
            "LOCAL_WORLD_SIZE": str(self.trainers_per_node),
            "ROLE_RANK": str(self.number),
            "ROLE_WORLD_SIZE": str(self.num_trainers),
        }


@dataclass(frozen=True)
class LaunchedProcess:
    """Numbers that a launcher gave to a process."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    num_nodes: int

    def role(self, attention_servers: str) -> Role:
        """Returns the role of this process, if there are these servers. `attention_servers` is the number of every
        node, or one for each; at least one server. Raises ConfigError if nodes have unequal numbers of processes or
        trainers, or no process trains. Shows the arithmetic."""
        here, nodes = self.local_world_size, self.num_nodes
        if self.world_size != here * nodes or self.rank != here * self.node + self.local_rank:
            raise ConfigError(
                f"attention_servers={attention_servers}: rank {self.rank} of {self.world_size} is process "
                f"{self.local_rank} of {here} on node {self.node} of {nodes}. With {here} on every node it would be "
                f"rank {here} x {self.node} + {self.local_rank} = {here * self.node + self.local_rank} of {here} x "
                f"{nodes} = {here * nodes}. Launch equally many processes on all nodes"
            )
        servers = servers_of_nodes(attention_servers, nodes)
        _check_trainers(attention_servers, servers, here)
        trainers = [here - count for count in servers]
        is_server = self.local_rank >= trainers[self.node]
        earlier = servers if is_server else trainers
        within_node = self.local_rank - (trainers[self.node] if is_server else 0)
        return Role(
            is_server=is_server,
            number=sum(earlier[: self.node]) + within_node,
            num_trainers=sum(trainers),
            num_servers=sum(servers),
            trainers_per_node=max(trainers),
            servers_of_nodes=servers,
        )


def launched_rank() -> int:
    """Returns the rank that the launcher gave to this process (0 without a launcher)."""
    return int(os.environ.get("RANK", "0"))


def attaches_every_trainer() -> bool:
    """Returns whether the environment asks for every Trainer of this process to be attached. Raises ConfigError if the
    variable is neither 1 nor 0."""
    text = os.environ.get(ATTACH, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"environment variable {ATTACH}={text!r} is neither 1 nor 0")
    return text == "1"


def launched_local_rank() -> int:
    """Returns the number of this process on its node (0 without a launcher)."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def launched_error_file() -> str | None:
    """Returns the file in which torchrun and accelerate look for the error that ended this process."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def launched_world_size() -> int:
    """Returns the number of processes that the launcher started (1 without a launcher)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_store() -> tuple[str, int, int]:
    """Returns host and port of the store that the launcher keeps next to its processes, and the number of earlier
    starts. Raises ConfigError if the launcher keeps no store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "MASTER_ADDR" not in os.environ:
        raise ConfigError(NO_STORE)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), attempt


def job_secret() -> str:
    """Returns the secret with which trainers and attention servers of this job sign their messages. It comes from the
    environment or, on a single node, from a file that only this user can read, in the launcher's folder for this
    attempt. The first process writes the file. Raises ConfigError if there are several nodes and the environment has
    no secret; or there is no folder that can be written to."""
    if given := os.environ.get(JOB_SECRET):
        return given
    error_file = launched_error_file()
    if launched_nodes() > 1 or not error_file:
        why = f"on {launched_nodes()} nodes" if launched_nodes() > 1 else "where the launcher has no folder for logs"
        raise ConfigError(
            f"trainers and attention servers sign their messages, and {why} they need {JOB_SECRET}: one random text "
            f"for all processes of the job, such as export {JOB_SECRET}=$(openssl rand -hex 32)"
        )
    path = Path(error_file).parents[1] / SECRET_FILE
    try:
        descriptor, mine = tempfile.mkstemp(dir=path.parent)  # mode 0600
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was first
            os.link(mine, path)
        os.unlink(mine)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii") as file:
            is_ours, secret = os.fstat(file.fileno()).st_uid == os.geteuid(), file.read()
    except OSError as error:
        raise ConfigError(f"the secret of the job cannot be left in {path} ({error}); set {JOB_SECRET}") from error
    if not is_ours:
        raise ConfigError(f"{path} belongs to another user; start the job again")
    return secret


def launched_ranks_per_node() -> int:
    """Returns the number of processes that the launcher started on this node (0 without a launcher)."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))


def launched_nodes() -> int:
    """Returns the number of nodes of the launcher (1 without a launcher)."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def launched_servers() -> tuple[int, ...]:
    """Returns how many processes of each node were made attention servers; () if none."""
    return read_servers(os.environ[LAUNCHED_SERVERS]) if LAUNCHED_SERVERS in os.environ else ()


def launched_process() -> LaunchedProcess:
    """Returns the numbers that the launcher gave to this process, from which its role follows. Raises ConfigError if
    it was not started by a launcher with a store, or roles were already taken."""
    if not is_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(NO_STORE)
    if LAUNCHED_SERVERS in os.environ:
        raise ConfigError(
            f"{LAUNCHED_SERVERS}={os.environ[LAUNCHED_SERVERS]}: this process has its role already. Where its "
            f"script starts another training, remove {LAUNCHED_SERVERS} from the environment of that one"
        )
    return LaunchedProcess(
        rank=launched_rank(),
        local_rank=launched_local_rank(),
        world_size=launched_world_size(),
        local_world_size=launched_ranks_per_node(),
        node=int(os.environ.get("GROUP_RANK", "0")),
        num_nodes=launched_nodes(),
    )


def is_launched() -> bool:
    """Returns whether a launcher (torchrun, accelerate launch) started this process as one of its ranks. The first two
    names do not suffice: cluster schedulers number nodes by them."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= set(os.environ)


def read_servers(attention_servers: str) -> tuple[int, ...]:
    """Returns the numbers in the setting `attention_servers`: one for all nodes, or one for each. Raises ConfigError
    if the setting is something else."""
    parts = [part.strip() for part in attention_servers.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(
            f"attention_servers={attention_servers!r} must be the number of servers of every node (1), or one number "
            "for each node (0,8); none is below 0"
        )
    return tuple(map(int, parts))


def servers_of_nodes(attention_servers: str, num_nodes: int) -> tuple[int, ...]:
    """Returns the number of servers of each node. Raises ConfigError if the setting is for another number of nodes."""
    counts = read_servers(attention_servers)
    if len(counts) not in (1, num_nodes):
        raise ConfigError(
            f"attention_servers={attention_servers} has {len(counts)} numbers, and the job {num_nodes} nodes: write "
            "one number for all nodes, or one for each"
        )
    return counts if len(counts) == num_nodes else counts * num_nodes


def _check_trainers(attention_servers: str, servers: tuple[int, ...], processes: int) -> None:
    """Checks that some processes train, equally many on every node that has any; the error shows the arithmetic."""
    trainers = [processes - count for count in servers]
    shown = ", ".join(
        f"{processes} - {count} = {left} on node {node}"
        for node, (count, left) in enumerate(zip(servers, trainers, strict=True))
    )
    if min(trainers) < 0:
        raise ConfigError(
            f"attention_servers={attention_servers} are more than the {processes} processes of a node ({shown}): give "
            f"at most {processes} for a node that only serves, and fewer for one that trains"
        )
    if not any(trainers):
        raise ConfigError(
            f"attention_servers={attention_servers} leaves no process to train ({shown}): give fewer than {processes} "
            "for some node, or launch more processes"
        )
    if len({left for left in trainers if left}) > 1:
        raise ConfigError(
            f"attention_servers={attention_servers} leaves unequally many trainers ({shown}): nodes that train must "
            "have equally many; other nodes only serve"
        )


def check_launched_servers(attention_servers: str, trainers_attend: bool, launched: tuple[int, ...]) -> None:
    """Checks that a plugin asks for the servers that were launched. `launched` has the servers of each node; () for
    none. Raises ConfigError if it asks for other servers, or only servers may attend and there are none."""
    wanted = read_servers(attention_servers)
    if not any(launched):
        if any(wanted):
            raise ConfigError(
                f"attention_servers={attention_servers}, but no server was launched: start the script with distca "
                "train, or with torchrun or accelerate launch -m distca_hf.run, which make some processes servers"
            )
        if not trainers_attend:
            raise ConfigError(
                "trainers_attend=False leaves all attention to servers, and attention_servers is 0: give servers, or "
                "let trainers attend"
            )
        return
    if len(wanted) not in (1, len(launched)) or servers_of_nodes(attention_servers, len(launched)) != launched:
        raise ConfigError(
            f"attention_servers={attention_servers} in the plugin, but {','.join(map(str, launched))} servers were "
            "launched on the nodes: give the number in the recipe or with --attention-servers, and none in the script"
        )
