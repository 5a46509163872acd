"""Attention servers under real launchers: libraries see the trainers alone, a server runs no script, losses are those
of one process, servers trace what trainers report, and a server that is killed or stopped is replaced."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from distca_hf.analysis.report.run_folder import read_folder
from support.commands import REPOSITORY, SCRIPTS, run_command
from support.scripts import LAUNCHED_NUMBERS, run_script
from support.waiting import is_running


# Imported by Python at its start: a server that only notes its numbers.
SERVER = """
import json, os, sys, types

def supervise(number, num_trainers, num_servers):
    seen = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "DISTCA_LAUNCHED_SERVERS")]
    with open(os.path.join(os.environ["SEEN"], f"server{number}.json"), "w") as file:
        json.dump([num_trainers, num_servers, *seen], file)
    return 0

module = sys.modules["distca_hf.servers.supervisor"] = types.ModuleType("distca_hf.servers.supervisor")
module.supervise = supervise
"""
NOTE = f"""
import json, os, sys
def note(*more):
    seen = [os.environ[name] for name in {LAUNCHED_NUMBERS}]
    with open(os.path.join(os.environ["SEEN"], f"trainer{{seen[0]}}.json"), "w") as file:
        json.dump([*seen, *more], file)
"""
TRAINING = """
import json, os, sys
sys.path.insert(0, os.environ["TESTS"])
from transformers import Trainer, TrainingArguments
import distca_hf
from support.data import random_dataset
from support.models import tiny_model
ranks = int(os.environ.get("WORLD_SIZE", "1"))
args = TrainingArguments("output", max_steps=4, learning_rate=1e-3, logging_steps=1, save_strategy="no", use_cpu=True)
trainer = Trainer(tiny_model(), args, train_dataset=random_dataset(60))
distca_hf.DistCAPlugin(tokens_per_rank=192 // ranks).attach(trainer)
trainer.train()
if args.process_index == 0:
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    with open(os.path.join(os.environ["SEEN"], f"losses{ranks}.json"), "w") as file:
        json.dump(losses, file)
"""
UNDER_FSDP2 = f"""{NOTE}
sys.path.insert(0, os.environ["TESTS"])
from support.shard_on_cpu import let_accelerate_shard_on_cpu
let_accelerate_shard_on_cpu()
import torch
from accelerate import Accelerator
accelerator = Accelerator()
layer = torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0)
model = torch.nn.Sequential(layer)
model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
total = accelerator.gather(torch.ones(1)).sum().item()
mesh = next(model.parameters()).device_mesh
note(accelerator.distributed_type.name, accelerator.num_processes, accelerator.process_index, mesh.size(), total)
accelerator.end_training()
"""
# The first trainer takes its server away twice, and waits for the next one each time; then all train.
HARMFUL = """
import json, os, signal, sys
sys.path.insert(0, os.environ["TESTS"])
import psutil
from distca_hf.servers.heartbeats import Watch
from distca_hf.servers.job_store import open_store
from support.commands import HANG_SECONDS
from support.waiting import wait_until

def server():
    launched = psutil.Process().parent().children(recursive=True)
    (found,) = (process for process in launched if "distca_hf.servers.server" in process.cmdline())
    return found

def take_away_twice():
    watch = Watch(open_store(HANG_SECONDS), 1, HANG_SECONDS)
    watch.begin()
    wait_until(lambda: watch.restarts(0) is not None)
    restarts, processes = [watch.restarts(0)], [server().ppid()]
    for number in (signal.SIGKILL, signal.SIGSTOP):
        processes.append(server().pid)
        os.kill(processes[-1], number)
        wait_until(lambda: watch.restarts(0) != restarts[-1])
        restarts.append(watch.restarts(0))
    processes.append(server().pid)
    with open(os.path.join(os.environ["SEEN"], "processes.json"), "w") as file:
        json.dump([restarts, processes], file)

if os.environ["RANK"] == "0":
    take_away_twice()
"""


def run_launched(
    folder: Path, launcher: list[str | Path], script: str, recipe: dict[str, object], **more: str
) -> None:
    """Runs a script from a recipe under a launcher; all processes end well."""
    (folder / "script.py").write_text(script)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"plugin": recipe}))
    (folder / "seen").mkdir()
    line = [*launcher, "-m", "distca_hf.run", "--recipe", folder / "recipe.yaml", folder / "script.py"]
    run_command([SCRIPTS / line[0], *line[1:]], folder, OMP_NUM_THREADS="1", **variables_of(folder), **more)


def variables_of(folder: Path) -> dict[str, str]:
    return {"SEEN": str(folder / "seen"), "TESTS": str(REPOSITORY / "tests")}


def seen_in(folder: Path) -> dict[str, list[Any]]:
    """The notes of all processes."""
    return {path.stem: json.loads(path.read_text()) for path in (folder / "seen").iterdir()}


@pytest.fixture(scope="module", autouse=True)
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Path]]:
    """A launch that loses its server twice, and then trains; it mostly waits, beside the launch of the other test."""
    folder = tmp_path_factory.mktemp("trained")
    launcher: list[str | Path] = ["torchrun", "--standalone", "--nproc-per-node", "3"]
    settings: dict[str, object] = {"attention_servers": 1, "trainers_attend": False, "report_every_steps": 2}

    def launch() -> Path:
        run_launched(folder, launcher, HARMFUL + TRAINING, settings)
        return folder

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(launch)


def test_fsdp2_of_accelerate_shards_over_the_trainers(tmp_path: Path) -> None:
    config = yaml.safe_load((REPOSITORY / "recipes" / "accelerate" / "fsdp2_4gpu.yaml").read_text())
    config["fsdp_config"] |= {
        "fsdp_transformer_layer_cls_to_wrap": "TransformerEncoderLayer",
        "fsdp_cpu_ram_efficient_loading": False,
    }
    (tmp_path / "accelerate.yaml").write_text(
        yaml.safe_dump(config | {"num_processes": 3, "mixed_precision": "no", "use_cpu": True})
    )
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SERVER)
    launcher: list[str | Path] = ["accelerate", "launch", "--config_file", tmp_path / "accelerate.yaml"]
    run_launched(tmp_path, launcher, UNDER_FSDP2, {"attention_servers": 1}, PYTHONPATH=str(tmp_path / "site"))

    assert seen_in(tmp_path) == {
        "trainer0": ["0", "2", "0", "2", "0", "2", "1", "FSDP", 2, 0, 2, 2.0],
        "trainer1": ["1", "2", "1", "2", "1", "2", "1", "FSDP", 2, 1, 2, 2.0],
        "server0": [2, 1, "2", "2", "1"],
    }


def test_a_server_that_is_killed_or_stopped_is_replaced(trained: Future[Path]) -> None:
    restarts, processes = seen_in(trained.result())["processes"]

    assert restarts == [0, 1, 2]
    assert len(set(processes)) == 4  # the supervisor, and three servers
    assert not any(map(is_running, processes))


def test_trainers_that_leave_attention_to_a_server_lose_as_one_process_does(trained: Future[Path]) -> None:
    folder = trained.result()
    (folder / "script.py").write_text(TRAINING)
    run_script(1, folder, [folder / "script.py"], **variables_of(folder))
    seen = seen_in(folder)

    assert len(seen["losses1"]) == 4
    assert seen["losses2"] == pytest.approx(seen["losses1"], abs=1e-5)
    steps = read_folder(folder / "output").steps  # where the Trainer, and no setting, says
    assert [(step.label.split(",")[0], step.servers, step.missing) for step in steps] == [
        *[("step 2", (0,), []), ("step 4", (0,), [])],
    ]
    for step in steps:
        assert step.seconds is not None
        assert list(step.work[:2]) == [0, 0], "the server computes all"
        assert step.seconds.attention[2] > 0  # type: ignore[operator]
