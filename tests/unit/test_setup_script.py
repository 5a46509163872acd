"""scripts/setup.sh says what it does while pip works, and fails when pip does."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import REPOSITORY


PIP = """#!/usr/bin/env bash
[ "$1" = -c ] && exit 1  # no torch yet
echo "Collecting torch==2.13.0"
echo "  Downloading https://index.example/ab/torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)"
echo "Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (190.4 MB)"
echo "  Downloading https://index.example/ab/rich-14.0-py3-none-any.whl (310 kB)"
echo "Using cached numpy-2.3.5-cp311-cp311-manylinux_2_28_x86_64.whl (16.6 MB)"
echo "Installing collected packages: torch, rich, numpy"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script, and an environment whose pip prints a few lines."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(REPOSITORY / "scripts" / "setup.sh", tmp_path / "scripts")
    return tmp_path


def run_setup(checkout: Path, pip: str) -> subprocess.CompletedProcess[str]:
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(pip)
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    script = checkout / "scripts" / "setup.sh"
    return subprocess.run([script, "report"], env=environment, capture_output=True, text=True)


def test_stages_and_large_downloads_are_shown(checkout: Path) -> None:
    done = run_setup(checkout, PIP)
    told = [line for line in done.stdout.splitlines() if line.startswith(" ")]

    assert done.returncode == 0, done.stderr
    assert [line[:5] for line in done.stdout.splitlines() if line.startswith("[")] == ["[1/3]", "[2/3]", "[3/3]"]
    torch, numpy, unpacking = told[:3]
    assert torch.split() == ["torch", "2.13.0", "(190.4", "MB)"]
    assert numpy.split() == ["numpy", "2.3.5", "(16.6", "MB,", "from", "the", "cache)"]
    assert unpacking.split() == ["unpacking", "3", "packages"]
    assert told in (told[:3], told[:3] * 2), "once for torch, unless there is a GPU, and once for all others"


def test_pip_that_fails_ends_the_script(checkout: Path) -> None:
    failing = PIP + 'echo "ERROR: no such package" >&2\nexit 1\n'
    done = run_setup(checkout, failing)

    assert done.returncode == 1
    assert "ERROR: no such package" in done.stderr
    assert "installed in" not in done.stdout
