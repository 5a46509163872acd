"""Threads of gloo at the end of a process: they come to rest before the interpreter ends.

A thread that has finished an operation lets go of it a moment later, which a machine under load makes long. It needs
the interpreter for that: tensors belong to Python objects. If the interpreter begins to end while the thread waits for
it, CPython ends the thread inside of a C++ destructor, and the process dies of SIGABRT with "terminate called without
an active exception". A thread that comes later does no harm: torch leaves the object where it is.
"""

import time
from pathlib import Path


# The name that torch gives them, in Linux's words.
NAME = "pt_gloo_runloop"
POLL_SECONDS = 0.001
# A thread that still computes is no reason to wait longer.
LONGEST_WAIT_SECONDS = 2.0


def let_rest() -> None:
    """Waits until all threads of gloo sleep, also of groups that others have opened and still hold."""
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while True:
        time.sleep(POLL_SECONDS)  # a thread that waits for the interpreter gets it, or is awake
        if "R" not in states() or time.monotonic() > deadline:
            break


def states() -> str:
    """Returns a letter for every thread of gloo in this process: R if it runs or could run, S if it sleeps.

    Empty where the system has no /proc.
    """
    letters = []
    for file in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = file.read_text().partition("(")[2].rpartition(") ")
        except OSError:  # it ended meanwhile
            continue
        if name == NAME:
            letters.append(rest[0])
    return "".join(letters)
