"""Uncaught errors: left where the launcher's summary finds them, and ours are shown once per job.

An error that all ranks have alike would come with a traceback from each of them. The first rank that leaves its words
at the job's store shows it; every other rank points there. Errors of somebody else are shown as ever.
"""

import hashlib
import re
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from distca_hf.comm.rollcall import tells_of_a_lost_peer
from distca_hf.errors import DistCAError, PeerLostError
from distca_hf.launcher import leave_for_launcher
from distca_hf.telemetry import NAME, this_rank
from distca_hf.torch_private import default_store


ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def show_errors_once() -> None:
    """Shows uncaught errors of ours once per job from now on; calling it again changes nothing."""
    if not isinstance(sys.excepthook, ShownOnce):
        sys.excepthook = ShownOnce(sys.excepthook)


class ShownOnce:
    """An exception hook.

    Args:
        earlier: the hook that shows an error.
    """

    def __init__(self, earlier: ExceptHook) -> None:
        self._earlier = earlier

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Shows the error, or points to the rank that does."""
        words, rank = f"{kind.__name__}: {error}", this_rank()
        if isinstance(error, Exception):  # not Ctrl-C
            leave_for_launcher(words, follows=tells_of_a_lost_peer(error))
        if not isinstance(error, DistCAError):
            self._earlier(kind, error, trace)
            return
        shown_by = first_rank_with(words, rank)
        if shown_by != rank:
            self._point(f"ends with the same {kind.__name__} as rank {shown_by}, which shows it")
            return
        self._point(words)  # before a traceback of many lines
        if not isinstance(
            error, PeerLostError
        ):  # names the rank whose error it is; where this one waited says nothing
            self._earlier(kind, error, trace)

    def _point(self, words: str) -> None:
        sys.stderr.write(f"{NAME} [rank {this_rank()}] {words}\n")
        sys.stderr.flush()


def first_rank_with(words: str, rank: int) -> int:
    """Returns the rank that was the first to end with these words; this one if the job's store cannot be asked.

    Words in which a rank names itself count as the same.
    """
    alike = re.sub(rf"\brank {rank}\b", "rank", words)
    key = hashlib.blake2b(alike.encode(), digest_size=8).hexdigest()
    try:
        if not dist.is_initialized():
            return rank
        store = PrefixStore(f"{NAME}/uncaught", default_store())
        return int(store.compare_set(key, "", str(rank)))
    except (RuntimeError, ValueError):  # the store went with the rank that kept it
        return rank
