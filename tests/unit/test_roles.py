"""Roles of launched processes: who trains under which number, who serves, and what is refused."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.errors import ConfigError
from distca_hf.launched import (
    LAUNCHED_SERVERS,
    LaunchedProcess,
    Role,
    check_launched_servers,
    read_servers,
    servers_of_nodes,
)


def launched(num_nodes: int, processes: int) -> list[LaunchedProcess]:
    """All processes of a job, in the launcher's order."""
    return [
        LaunchedProcess(node * processes + local, local, num_nodes * processes, processes, node, num_nodes)
        for node in range(num_nodes)
        for local in range(processes)
    ]


def roles(num_nodes: int, processes: int, servers: str) -> list[Role]:
    return [process.role(servers) for process in launched(num_nodes, processes)]


def refusal(num_nodes: int, processes: int, servers: str) -> str:
    """The one error of all processes of a job."""
    said = set()
    for process in launched(num_nodes, processes):
        with pytest.raises(ConfigError) as refused:
            process.role(servers)
        said.add(str(refused.value))
    (message,) = said
    return message


@pytest.mark.parametrize(
    ("num_nodes", "processes", "servers", "shown"),
    [
        (1, 3, "1", "T0 T1 S0"),
        (1, 2, "1", "T0 S0"),
        (1, 8, "1", "T0 T1 T2 T3 T4 T5 T6 S0"),
        (2, 3, "1", "T0 T1 S0 T2 T3 S1"),
        (2, 4, "2", "T0 T1 S0 S1 T2 T3 S2 S3"),
        (2, 2, "0,2", "T0 T1 S0 S1"),
        (2, 2, "2,0", "S0 S1 T0 T1"),
        (3, 2, " 1, 2,1", "T0 S0 S1 S2 T1 S3"),
    ],
)
def test_last_processes_of_a_node_serve(num_nodes: int, processes: int, servers: str, shown: str) -> None:
    found = roles(num_nodes, processes, servers)

    assert " ".join("TS"[role.is_server] + str(role.number) for role in found) == shown


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, str]:
    """Nodes, processes of each, and servers that leave equally many trainers on some nodes, and none on others."""
    num_nodes, processes = draw(st.integers(1, 5)), draw(st.integers(2, 9))
    some = draw(st.integers(1, processes - 1))
    counts = draw(st.lists(st.sampled_from((some, processes)), min_size=num_nodes, max_size=num_nodes))
    counts[draw(st.integers(0, num_nodes - 1))] = some
    return num_nodes, processes, str(some) if set(counts) == {some} else ",".join(map(str, counts))


@given(jobs())
def test_trainers_see_a_job_of_their_own_and_servers_are_numbered_on(job: tuple[int, int, str]) -> None:
    num_nodes, processes, servers = job
    found = roles(*job)
    trainers = [role for role in found if not role.is_server]
    counts = servers_of_nodes(servers, num_nodes)

    assert [role.number for role in trainers] == list(range(len(trainers)))
    assert [role.number for role in found if role.is_server] == list(range(sum(counts)))
    assert {(role.num_trainers, role.num_servers) for role in found} == {(len(trainers), sum(counts))}
    assert {role.servers_of_nodes for role in found} == {counts}
    for process, role in zip(launched(num_nodes, processes), found, strict=True):
        local_trainers = processes - counts[process.node]
        assert role.is_server == (process.local_rank >= local_trainers)
        assert role.is_server or role.trainers_per_node == local_trainers


@given(jobs())
def test_environment_numbers_trainers_as_if_nothing_else_was_launched(job: tuple[int, int, str]) -> None:
    found = roles(*job)
    ranks = [int(role.environment()["RANK"]) for role in found]
    seen = Counter(
        tuple(role.environment()[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"))
        for role in found
        if not role.is_server
    )
    (world_size, local, role_world_size), num_trainers = seen.popitem()

    assert not seen
    assert num_trainers == int(world_size) == int(role_world_size) == found[0].num_trainers
    assert num_trainers % int(local) == 0
    assert sorted(ranks) == list(range(len(found))), "servers have ranks behind those of trainers"
    assert all("LOCAL_RANK" not in role.environment() for role in found)
    assert {role.environment()[LAUNCHED_SERVERS] for role in found} == {",".join(map(str, found[0].servers_of_nodes))}


@pytest.mark.parametrize(
    ("num_nodes", "processes", "servers", "told"),
    [
        (1, 3, "3", ["attention_servers=3", "leaves no process to train", "3 - 3 = 0 on node 0"]),
        (2, 1, "1", ["leaves no process to train", "1 - 1 = 0 on node 0, 1 - 1 = 0 on node 1"]),
        (2, 4, "4,4", ["leaves no process to train", "4 - 4 = 0 on node 0, 4 - 4 = 0 on node 1"]),
        (1, 3, "4", ["more than the 3 processes of a node", "3 - 4 = -1 on node 0"]),
        (2, 8, "0,9", ["more than the 8 processes of a node", "8 - 0 = 8 on node 0, 8 - 9 = -1 on node 1"]),
        (2, 8, "1,2", ["unequally many trainers", "8 - 1 = 7 on node 0, 8 - 2 = 6 on node 1"]),
        (2, 8, "0,1,8", ["has 3 numbers, and the job 2 nodes"]),
        (1, 8, "0,8", ["has 2 numbers, and the job 1 nodes"]),
        (2, 8, "-1", ["attention_servers='-1'", "none is below 0"]),
        (2, 8, "0,-8", ["attention_servers='0,-8'", "none is below 0"]),
    ],
)
def test_servers_that_cannot_be_are_refused_with_the_arithmetic(
    num_nodes: int, processes: int, servers: str, told: list[str]
) -> None:
    message = refusal(num_nodes, processes, servers)

    assert [part for part in told if part not in message] == []


@pytest.mark.parametrize("text", ["", ",", "1,", "one", "1.5", "1;2", "1 2", "True", "--", "+1"])
def test_text_without_numbers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be the number of servers of every node"):
        read_servers(text)


@pytest.mark.parametrize("processes", [(2, 3), (3, 2), (4, 2, 6), (2, 4, 6), (1, 1, 2)])
def test_nodes_of_unequally_many_processes_are_refused(processes: tuple[int, ...]) -> None:
    """One process sees its own node alone, so that not all of them find out."""
    refused = 0
    for node, here in enumerate(processes):
        for local in range(here):
            numbers = (sum(processes[:node]) + local, local, sum(processes), here, node, len(processes))
            try:
                LaunchedProcess(*numbers).role("1")
            except ConfigError as error:
                refused += "Launch equally many processes on all nodes" in str(error)

    assert refused > 0


def test_unequal_nodes_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"rank 5 of 6 is process 3 of 4 on node 1 of 2.* rank 4 x 1 \+ 3 = 7 of 4 x"
    ):
        LaunchedProcess(5, 3, 6, 4, 1, 2).role("1")


@pytest.mark.parametrize(
    ("servers", "launched"), [("0", ()), ("0,0", ()), ("1", (1,)), ("1", (1, 1)), ("1,1", (1, 1)), ("0,8", (0, 8))]
)
def test_plugin_asks_for_the_servers_that_are_there(servers: str, launched: tuple[int, ...]) -> None:
    check_launched_servers(servers, trainers_attend=True, launched=launched)


@pytest.mark.parametrize(
    ("servers", "trainers_attend", "launched", "told"),
    [
        ("1", True, (), "attention_servers=1, but no server was launched: start the script with distca train"),
        ("0,8", False, (), "attention_servers=0,8, but no server was launched"),
        ("0", False, (), "trainers_attend=False leaves all attention to servers, and attention_servers is 0"),
        ("0", True, (1,), "attention_servers=0 in the plugin, but 1 servers were launched on the nodes"),
        ("2", True, (1, 1), "attention_servers=2 in the plugin, but 1,1 servers were launched"),
        ("1,2", True, (1,), "attention_servers=1,2 in the plugin, but 1 servers were launched"),
    ],
)
def test_plugin_that_asks_for_other_servers_is_refused(
    servers: str, trainers_attend: bool, launched: tuple[int, ...], told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_launched_servers(servers, trainers_attend, launched)

    assert told in str(refused.value)
