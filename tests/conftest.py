"""Fixtures and settings for all tests."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support import package_metadata
from support.thorough import VARIABLE, is_thorough


# Nothing here may reach the hub, and two cores are shared by all ranks.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Torch's compiler would compile programs for seconds to learn which vectors this CPU has. Its kernels need none here.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Nor does it need processes to compile in: each would import torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Without compiled files every process would compile the package again, and pytest all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What launched processes begin with.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "support" / "launched"), os.environ.get("PYTHONPATH")])
)

package_metadata.read_once()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="run all combinations of cases, 300 drawn examples and long trainings"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("thorough"):
        os.environ[VARIABLE] = "1"
    settings.register_profile(
        "distca",
        max_examples=300 if is_thorough() else 50,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("distca")


# What is imported and collected stays to the end: to look through it for garbage would take a fifth of that time.
gc.disable()


@pytest.fixture(scope="session", autouse=True)
def modules_are_no_garbage() -> None:
    """Accelerate collects garbage after every training, and would spend half of the time of tests with a Trainer on
    what imported modules hold. Pytest would look through that at the end, too."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """Lets ranks that are threads share a core: to hand the interpreter from core to core costs as much again. Each
    process of pytest-xdist has its own."""
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        yield
        return
    usual = os.sched_getaffinity(0)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(usual)[number % len(usual)]})
    yield
    os.sched_setaffinity(0, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need GPUs where there are none."""
    import torch

    from support.gpus import gpu_ranks

    devices, ranks = torch.cuda.device_count(), gpu_ranks()
    needs = {1: "a CUDA device", 2: "2 CUDA devices, or NCCL 2.30 with which ranks share one"}
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed > ranks:
            item.add_marker(pytest.mark.skip(reason=f"needs {needs[needed]}, {devices} are here"))
