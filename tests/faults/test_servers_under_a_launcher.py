"""A trainer of a job with an attention server is killed under torchrun: no process stays behind.

Also a script of its own: `torchrun ... -m distca_hf.run ... test_servers_under_a_launcher.py` trains.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.commands import HANG_SECONDS, REPOSITORY, SCRIPTS
from support.waiting import wait_until


# A variable that all processes of a job inherit.
MARK = "JOB_OF_A_TEST"
KILLED = 1


def train() -> None:
    """Trains for a step. Then a trainer is killed while the other one, and the server, have nothing to do."""
    import torch.distributed as dist

    import distca_hf
    from support.data import random_dataset
    from support.models import tiny_model

    dist.init_process_group("gloo")
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    model = distca_hf.enable(tiny_model(num_hidden_layers=1), plugin).train()
    model(**next(iter(plugin.dataloader(random_dataset())))).loss.backward()
    dist.barrier()
    if dist.get_rank() == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG_SECONDS)


def of_job(mark: str) -> list[int]:
    """Processes that inherited the mark, and have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:  # it ended, or is another user's
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_all_processes_end_with_a_killed_trainer(tmp_path: Path) -> None:
    recipe, mark = tmp_path / "recipe.yaml", str(tmp_path)
    recipe.write_text("plugin:\n  attention_servers: 1\n")
    launcher: list[str | Path] = [SCRIPTS / "torchrun", "--standalone", "--nproc-per-node", "3"]
    line = [*launcher, "-m", "distca_hf.run", "--recipe", recipe, Path(__file__)]
    path = os.pathsep.join([str(REPOSITORY / "tests"), os.environ["PYTHONPATH"]])
    variables = {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", MARK: mark}
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(line, stdout=log, stderr=log, env=os.environ | variables)
    try:
        status = job.wait(HANG_SECONDS)
        wait_until(lambda: not of_job(mark))
    finally:
        for process in of_job(mark):
            os.kill(process, signal.SIGKILL)

    words = (tmp_path / "log").read_text()
    assert status == 1, words
    assert f"local_rank: {KILLED}" in words
    assert "Unable to shutdown" not in words  # the launcher had to kill nobody


if __name__ == "__main__":
    train()
