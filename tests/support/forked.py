"""Runs programs in forked processes that have imported neither Transformers nor distca_hf.

Each program decides in which order these register with each other. Packages that take seconds to import are imported
before the fork.
"""

import subprocess
import sys


FORKS = """
import os, sys
import accelerate, datasets, scipy.optimize, torch._dynamo, torch.distributed.tensor

assert not {"transformers", "distca_hf"} & sys.modules.keys()
for program in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            exec(program)
        except Exception as error:
            print(error)
        sys.stdout.flush()
        os._exit(0)  # to take everything down again would cost as much as an import
    os.waitpid(child, 0)
"""


def run_fresh(program: str, *arguments: str) -> str:
    """What a program prints in a fresh interpreter, or the last line of its error."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def run_forked(*programs: str) -> list[str]:
    """The line that each of these programs prints, or its error."""
    return run_fresh(FORKS, *programs).splitlines()
