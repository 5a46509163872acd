"""An attention server that is lost inside a step: a rank says when, and the parent process harms it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn


class ServerHarm:
    """Has a server harmed by the parent process, at a call of a layer."""

    def __init__(self, folder: Path, at_call: int, phase: str) -> None:
        self._folder, self._at_call, self._phase, self._calls = folder, at_call, phase, 0

    def watch(self, layer: nn.Module) -> None:
        if self._phase == "forward":
            layer.register_forward_pre_hook(lambda *_: self._note())
        else:
            layer.register_full_backward_pre_hook(lambda *_: self._note())

    def _note(self) -> None:
        self._calls += 1
        if self._calls == self._at_call:
            (self._folder / "now").touch()
            while not (self._folder / "done").exists():
                time.sleep(0.01)


def harm_server(folder: Path, server: int, how: signal.Signals) -> Callable[[list[Any]], None]:
    """Harms a process when `ServerHarm` says so; for `start_ranks(meanwhile=...)`."""

    def meanwhile(processes: list[Any]) -> None:
        while not (folder / "now").exists() and processes[0].is_alive():
            time.sleep(0.01)
        os.kill(processes[server].pid, how)
        (folder / "done").touch()

    return meanwhile
