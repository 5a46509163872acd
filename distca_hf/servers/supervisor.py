"""Supervisor: the launched process of an attention server. Starts the server as its child, and restarts it if it dies
or hangs.

    launcher ──▶ supervisor ──▶ server, restart 0, then 1, ...
                     ◀── a byte per heartbeat, in a pipe

    the child                                                      the supervisor
    ends with 0: the trainers' scripts have ended                  ends with 0
    ends with `TRAINERS_GONE`: they are gone, or their launcher    ends with the same
    is killed, or is silent for too long                           starts the next process
    ends with an error                                             the same, once; then it ends with that status
    ends after SIGTERM or SIGINT, which both of them get           ends with 128 + signal; it starts the next one
                                                                   if only the child got it

A launcher ends all processes if one of them fails, so the supervisor must survive its child. It does not import torch:
it can neither hang in a driver nor be killed for its memory. If it dies, so does the child.
"""

import ctypes
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from distca_hf.config import DistCAConfig
from distca_hf.launched import TRAINERS_GONE
from distca_hf.telemetry import OF_THIS_RANK, get_logger


log = get_logger(__name__)

SERVER = (sys.executable, "-m", "distca_hf.servers.server")
# Signals that end a job. Launchers send them to all processes; servers then serve until the trainers have saved.
LEAVING = (signal.SIGTERM, signal.SIGINT)
LEFT = tuple(128 + number for number in LEAVING)
# Seconds between two looks at the child. Silence is counted in looks: a supervisor that was itself stopped together
# with its child does not kill it.
LOOK_SECONDS = 0.2
# Silence after which a child is killed, as a multiple of the limit after which trainers count it as lost.
SILENT_LIMITS = 3
# Silence that is allowed before the first byte: on a busy file system imports may take minutes.
START_SECONDS = 600.0
# A child that has lived this long was able to serve.
STEADY_SECONDS = 60.0
# Children in a row that end sooner before no other is started. Each costs trainers a step and this machine its
# imports: a server that cannot live must not be restarted forever. The limit is high, because a borrowed GPU may be
# taken away many times; at some seconds for each child it is still reached within minutes.
SHORT_LIVES = 50
# Number of errors of children that ends the job: the same error would come again.
ERRORS = 2


def supervise(number: int, num_trainers: int, num_servers: int, line: Sequence[str] = SERVER) -> int:
    """Keeps a server alive until the trainers have ended, and returns the exit status. The three numbers, its earlier
    restarts and a file descriptor are appended to `line`."""
    silence_seconds = SILENT_LIMITS * DistCAConfig().timeouts.heartbeat_limit_seconds
    command = (*line, *map(str, (number, num_trainers, num_servers)))
    return Supervisor(f"attention server {number}", command, silence_seconds).run()


class Child:
    """One process of a server.

    Args:
        line: its command; the file descriptor of the pipe is appended.
        silence_seconds: silence after which it is killed.
    """

    def __init__(self, line: Sequence[str], silence_seconds: float) -> None:
        self._allowed_seconds, self._silence_seconds = max(START_SECONDS, silence_seconds), silence_seconds
        self._silent_seconds = 0.0
        self.is_silent = False  # whether it was killed for its silence
        self._pipe, end = os.pipe()
        try:
            self.process = subprocess.Popen([*line, str(end)], pass_fds=[end], preexec_fn=_die_with(os.getpid()))
        finally:
            os.close(end)

    def listen(self) -> None:
        """Waits briefly for a byte, and kills a child that has been silent for too long."""
        if select.select([self._pipe], [], [], LOOK_SECONDS)[0]:
            if os.read(self._pipe, 4096):
                self._silent_seconds, self._allowed_seconds = 0.0, self._silence_seconds
                return
            time.sleep(LOOK_SECONDS)  # the other end is closed: the child is ending
        self._silent_seconds += LOOK_SECONDS
        if self._silent_seconds > self._allowed_seconds:
            self.is_silent = True
            self.process.kill()

    def close(self) -> None:
        """Closes the pipe of a child that has ended."""
        os.close(self._pipe)


class Supervisor:
    """Starts one child after the other.

    Args:
        line: command of a server; its earlier restarts and a file descriptor are appended.
        silence_seconds: silence after which a child is killed.
    """

    def __init__(self, name: str, line: Sequence[str], silence_seconds: float) -> None:
        self._name, self._line, self._silence_seconds = name, line, silence_seconds
        self._signal: int | None = None

    def run(self) -> int:
        """Runs children until no other is to be started, and returns the exit status."""
        for one in LEAVING:
            signal.signal(one, self._note_signal)
        short_lives = errors = 0
        for restarts in itertools.count():
            began = time.monotonic()
            status, message = self._live(restarts)
            if status in (0, TRAINERS_GONE):
                return status
            if self._signal is not None:
                return 128 + self._signal
            short_lives = short_lives + 1 if time.monotonic() - began < STEADY_SECONDS else 0
            errors += status > 0
            if errors == ERRORS:
                log.error("%s %s, as an earlier process of it; the job ends", self._name, message)
                return status
            if short_lives == SHORT_LIVES:
                log.error(
                    "%s %s, as %d processes of it in a row; no other is started, the job goes on without it",
                    self._name,
                    message,
                    short_lives,
                )
                return 0
            log.warning("%s %s; another process takes its place", self._name, message, extra=OF_THIS_RANK)
        raise AssertionError

    def _live(self, restarts: int) -> tuple[int, str]:
        """Runs a child, and returns its exit status and a message about its end."""
        child = Child([*self._line, str(restarts)], self._silence_seconds)
        passed_on = False
        while (status := child.process.poll()) is None:
            if self._signal is not None and not passed_on:
                child.process.send_signal(self._signal)
                passed_on = True
            child.listen()
        child.close()
        if child.is_silent:
            return status, f"(restart {restarts}) was silent for too long, and was killed"
        if status in LEFT:  # only the child got the signal, or both did
            status = 128 - status
        if status < 0:
            return status, f"(restart {restarts}) was killed by signal {-status}"
        return status, f"(restart {restarts}) ended with status {status}"

    def _note_signal(self, number: int, frame: object) -> None:
        if self._signal is None:
            self._signal = number


def _die_with(parent: int) -> Callable[[], None] | None:
    """Returns a call for a new process that makes the kernel kill it when this process ends. None if the system cannot
    do so: a server then ends at its next heartbeat, because the pipe is broken."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, see prctl(2)

    def call() -> None:
        libc.prctl(set_parent_death_signal, int(signal.SIGKILL))
        if os.getppid() != parent:  # the parent ended before the call
            os.kill(os.getpid(), signal.SIGKILL)

    return call


def is_running(process: int) -> bool:
    """Returns whether there is a process with this number on this host."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
