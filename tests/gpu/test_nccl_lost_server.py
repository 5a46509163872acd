"""An attention server is killed while GPUs exchange with it over NCCL: training goes on, with the same losses."""

import sys

import pytest
import torch

from support.commands import REPOSITORY, run_command


SCRIPT = REPOSITORY / "scripts" / "faults" / "lose_servers.py"

pytestmark = pytest.mark.multigpu


@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_lost_server_costs_a_step(how: str) -> None:
    """On two GPUs; or on one that ranks share, see `gpu_ranks`."""
    shared = torch.cuda.device_count() == 1
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
