"""Attention servers among launched processes: trainers run the script under numbers of their own, servers serve."""

import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from distca_hf import run
from distca_hf.cli import app
from distca_hf.errors import ConfigError
from distca_hf.launched import job_secret
from distca_hf.recipe import EXAMPLES
from support.scripts import LAUNCHED_NUMBERS


SCRIPT = f"""
import os, sys
from distca_hf.config import DistCAConfig
from distca_hf.launched import launched_servers
numbers = [os.environ.get(name) for name in {LAUNCHED_NUMBERS}]
print(numbers, DistCAConfig().attention_servers, launched_servers(), sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def recipe_of(folder: Path, **plugin: object) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"plugin": plugin, "script": {"steps": 5}}))
    return str(path)


def numbered(rank: int, processes: int, num_nodes: int = 1) -> dict[str, str]:
    """Variables of torchrun for one process."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": processes * num_nodes,
        "LOCAL_RANK": rank % processes,
        "LOCAL_WORLD_SIZE": processes,
        "GROUP_RANK": rank // processes,
        "GROUP_WORLD_SIZE": num_nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": processes * num_nodes,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "DISTCA_JOB_SECRET": "of a test",
    }
    return {name: str(number) for name, number in numbers.items()}


def run_process(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distca_hf.run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A launched process whose environment ends with the test, whose script is noted, and whose server ends with 5."""
    served: list[tuple[int, ...]] = []
    scripts: list[object] = []
    environment = dict(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(run, "run_script", lambda *given: scripts.append(given))
    monkeypatch.setattr(run, "supervise", lambda *numbers: served.append(numbers) or 5)
    return SimpleNamespace(served=served, scripts=scripts, environment=environment)


def test_script_of_a_trainer_sees_trainers_alone(script: Path, tmp_path: Path) -> None:
    """Rank 4 of two nodes of three is rank 3 of four trainers."""
    recipe = recipe_of(tmp_path, attention_servers=1)
    done = run_process(numbered(4, 3, num_nodes=2), "--recipe", recipe, script, "--steps", "6")

    assert done.returncode == 0, done.stderr
    numbers = ["3", "4", "1", "2", "3", "4", "1,1"]
    assert done.stdout == f"{numbers} 1 (1, 1) {['--steps', '5', '--steps', '6']}\n"


@pytest.mark.parametrize("recipe", [{}, {"attention_servers": 0}, {"attention_servers": "0,0"}])
def test_without_servers_nothing_is_numbered_anew(recipe: dict[str, object], script: Path, tmp_path: Path) -> None:
    """Nor is a launcher needed whose processes know their node."""
    launched = numbered(1, 2) | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    done = run_process(launched, "--recipe", recipe_of(tmp_path, **recipe), script)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{['1', '2', '1', '2', '1', '2', None]} ")


def test_processes_of_a_node_find_one_secret(script: Path, tmp_path: Path, in_process: SimpleNamespace) -> None:
    """In the folder of the launcher's attempt, for this user alone; a script and a server get it with their role."""
    errors = [tmp_path / "attempt_0" / str(rank) / "error.json" for rank in range(8)]
    for file in errors:
        file.parent.mkdir(parents=True)
    secrets = set()
    for rank, file in enumerate(errors):
        in_process.environment.update(numbered(rank, 8) | {"TORCHELASTIC_ERROR_FILE": str(file)})
        del in_process.environment["DISTCA_JOB_SECRET"]
        with suppress(SystemExit):
            run.main(["--attention-servers", "4", str(script)])
        secrets.add(in_process.environment["DISTCA_JOB_SECRET"])
        for name in ("DISTCA_JOB_SECRET", "DISTCA_LAUNCHED_SERVERS"):
            del in_process.environment[name]

    (secret,) = secrets
    (left,) = (path for path in (tmp_path / "attempt_0").iterdir() if path.is_file())
    assert len(secret) == 64
    assert (left.read_text(), stat.S_IMODE(left.stat().st_mode)) == (secret, 0o600)


@pytest.mark.parametrize(("nodes", "words"), [(2, "on 2 nodes"), (1, "where the launcher has no folder for logs")])
def test_without_a_secret_no_server_is_started(
    nodes: int, words: str, script: Path, in_process: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    in_process.environment.update(numbered(0, 2, nodes) | {"DISTCA_JOB_SECRET": "", "TORCHELASTIC_ERROR_FILE": ""})
    with pytest.raises(SystemExit, match="2"):
        run.main(["--attention-servers", "1", str(script)])

    assert f"{words} they need DISTCA_JOB_SECRET: one random text for all" in capsys.readouterr().err
    assert not in_process.scripts


def test_a_secret_that_another_user_has_left_is_refused(
    tmp_path: Path, in_process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "distca_job_secret").write_text("guessed")
    in_process.environment["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / "0" / "error.json")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.raises(ConfigError, match="belongs to another user"):
        job_secret()


ONE_OF_EACH, ALL_OF_THE_SECOND = (1, 6, 2), (3, 4, 4)


@pytest.mark.parametrize(
    ("recipe", "variable", "options", "served"),
    [
        ({}, "1", [], ONE_OF_EACH),
        ({}, "0,4", [], ALL_OF_THE_SECOND),
        ({"attention_servers": 1}, "0,4", [], ONE_OF_EACH),
        ({"attention_servers": "0,4"}, None, ["--attention-servers", "1"], ONE_OF_EACH),
        ({"attention_servers": 1}, "1", ["--attention-servers=0,4"], ALL_OF_THE_SECOND),
    ],
)
@pytest.mark.parametrize("comes_last", [False, True])
def test_option_wins_over_recipe_and_recipe_over_environment(
    recipe: dict[str, object],
    variable: str | None,
    options: list[str],
    served: tuple[int, ...],
    comes_last: bool,
    tmp_path: Path,
    script: Path,
    in_process: SimpleNamespace,
) -> None:
    """Numbers of the last process of two nodes of four: its own, trainers, servers."""
    in_process.environment |= numbered(7, 4, num_nodes=2)
    if variable is not None:
        in_process.environment["DISTCA_ATTENTION_SERVERS"] = variable
    line = ["--recipe", recipe_of(tmp_path, **recipe), str(script), "--steps", "6"]
    with pytest.raises(SystemExit) as left:
        run.main([*line, *options] if comes_last else [*options, *line])

    assert left.value.code == 5
    assert (in_process.served, in_process.scripts) == ([served], [])


def test_server_is_prepared_by_the_recipe_and_ranks_behind_the_trainers(
    tmp_path: Path, script: Path, in_process: SimpleNamespace
) -> None:
    in_process.environment |= numbered(2, 3, num_nodes=2)
    with pytest.raises(SystemExit):
        run.main(["--recipe", recipe_of(tmp_path, attention_servers=1, kernel="reference"), str(script)])

    told = {
        name: in_process.environment[name]
        for name in ("RANK", "LOCAL_RANK", "DISTCA_LAUNCHED_SERVERS", "DISTCA_SETTINGS_OF_RECIPE")
    }
    assert in_process.served == [(0, 4, 2)]
    assert told == {
        "RANK": "4",
        "LOCAL_RANK": "2",
        "DISTCA_LAUNCHED_SERVERS": "1,1",
        "DISTCA_SETTINGS_OF_RECIPE": '{"attention_servers": 1, "kernel": "reference"}',
    }


@pytest.mark.parametrize(
    ("environment", "arguments", "told"),
    [
        (numbered(0, 2), ["--attention-servers", "2"], "leaves no process to train (2 - 2 = 0 on node 0)"),
        (numbered(0, 2), ["--attention-servers", "-1"], "attention_servers='-1' must be the number of servers"),
        (numbered(0, 2), ["--attention-servers"], "expected a value after --attention-servers, got none"),
        (
            numbered(0, 2),
            ["--attention-servers=1", "--attention-servers=1"],
            "expected one --attention-servers, got 2",
        ),
        ({}, ["--attention-servers", "1"], "meet in the launcher's store, and this process has none"),
    ],
)
def test_servers_that_cannot_be_end_all_processes_with_one_line(
    environment: dict[str, str],
    arguments: list[str],
    told: str,
    tmp_path: Path,
    script: Path,
    in_process: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = tmp_path / "error.json"
    in_process.environment |= environment | {"TORCHELASTIC_ERROR_FILE": str(error)}
    with pytest.raises(SystemExit) as left:
        run.main(["--recipe", recipe_of(tmp_path), str(script), *arguments])

    assert left.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[0]
    assert told in error.read_text()
    assert in_process.served == in_process.scripts == []


def test_distca_train_hands_the_number_on(monkeypatch: pytest.MonkeyPatch, in_process: SimpleNamespace) -> None:
    shown = CliRunner().invoke(app, ["train", "quickstart", "--attention-servers", "1", "--steps", "3", "--dry-run"])
    line = shown.output.split()

    assert shown.exit_code == 0, shown.output
    servers, rest = run._take(line[line.index("--recipe") :], "--attention-servers")
    assert (servers, rest[-3:]) == ("1", [str(EXAMPLES.find("quickstart")), "--steps", "3"])


@pytest.mark.parametrize(("rank", "served"), [(1, []), (2, [(0, 2, 1)])])
def test_distca_train_takes_roles_in_launched_processes(
    rank: int, served: list[tuple[int, ...]], in_process: SimpleNamespace
) -> None:
    """As `torchrun --no-python distca train` starts them."""
    in_process.environment |= numbered(rank, 3)
    ran = CliRunner().invoke(app, ["train", "quickstart", "--attention-servers", "1"])

    assert ran.exit_code == (5 if served else 0), ran.output
    assert in_process.served == served
    assert len(in_process.scripts) == (not served)
