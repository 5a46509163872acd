"""Commands as users type them: real processes, ended with all their children if they hang."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


REPOSITORY = Path(__file__).parents[2]
# Where console scripts of the interpreter that runs the tests are.
SCRIPTS = Path(sys.executable).parent
# Nothing that works takes so long, on however busy a machine; less than the `timeout` of a test in pyproject.toml.
HANG_SECONDS = 400.0


def run_command(command: Sequence[str | Path], cwd: Path = REPOSITORY, **environment: str) -> str:
    """Standard output of a command that succeeds.

    Raises:
        AssertionError: it failed or hung; shows the end of its output.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONWARNINGS": "ignore"} | environment,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=HANG_SECONDS)
        ended = f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        ended = f"was still running after {HANG_SECONDS} s"
    if process.returncode:
        raise AssertionError(f"{' '.join(map(str, command))} {ended}\n{output[-3000:]}\n{errors[-6000:]}")
    return output
