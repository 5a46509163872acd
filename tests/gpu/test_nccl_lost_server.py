"""An attention server is killed while GPUs exchange with it over NCCL: training goes on, with the same losses."""

import sys

import pytest
import torch

from support.commands import REPOSITORY, run_command
from support.gpus import loaded_nccl_version


SCRIPT = REPOSITORY / "scripts" / "faults" / "lose_servers.py"

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_lost_server_costs_a_step(how: str) -> None:
    """On two GPUs; or on one, with a version of NCCL that lets several ranks share it."""
    shared = torch.cuda.device_count() < 2
    if shared and loaded_nccl_version() < (2, 30):
        pytest.skip(f"two ranks need two GPUs, or NCCL 2.30; loaded is {loaded_nccl_version()}")
    line = [
        sys.executable,
        SCRIPT,
        "--trainers",
        "1",
        "--servers",
        "1",
        "--wrap",
        "ddp",
        "--losses",
        "2",
        "--how",
        how,
    ]
    output = run_command(
        [*line, "--device", "cuda", *["--one-gpu"] * shared], NCCL_MULTI_RANK_GPU_ENABLE=str(int(shared))
    )
    assert f"2 servers lost ({how})" in output
    assert "2 run again" in output
