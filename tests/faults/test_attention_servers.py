"""An attention server is killed, refuses, or gets a wrong message: trainers end with its name and the place."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import distca_hf
from distca_hf.comm.rollcall import RollCall
from distca_hf.errors import PlanError, UnsupportedAttentionError
from distca_hf.runtime import attention, op
from distca_hf.runtime.alike_layers import LayerLookup
from distca_hf.runtime.remote_queries import BackwardRemoteQueries, ForwardRemoteQueries
from distca_hf.servers import server
from distca_hf.servers.orders import Order, Outbox, _queue
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import Outcome, start_ranks


NUM_LAYERS = 2
TRAINERS, STEPS = 2, 3
# Micro-batch that comes to harm, and its layer.
HARMED_STEP, HARMED_LAYER = 1, 0
# Runs that share the machine: much of their time is waiting.
AT_ONCE = 3


def die(*args: object, **kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class OnCall:
    """A function that does harm on one of its calls.

    Args:
        number: of the call, counted from 0.
        harm: called then with the arguments, instead of the function.
    """

    def __init__(self, function: Callable[..., Any], number: int, harm: Callable[..., Any]) -> None:
        self._function, self._number, self._harm, self._calls = function, number, harm, 0

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls, self._calls = self._calls, self._calls + 1
        return (self._harm if calls == self._number else self._function)(*args, **kwargs)


def _harm(owner: object, name: str, number: int, harm: Callable[..., Any]) -> None:
    setattr(owner, name, OnCall(getattr(owner, name), number, harm))


def _fail(error: Exception) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


# Calls of a layer's forward and backward before the harm.
FORWARD = HARMED_STEP * NUM_LAYERS + HARMED_LAYER
BACKWARD = HARMED_STEP * NUM_LAYERS + NUM_LAYERS - 1 - HARMED_LAYER


def nothing() -> None:
    """No harm."""


def is_killed_before_forward() -> None:
    _harm(server, "attend", FORWARD, die)


def is_killed_in_forward() -> None:
    _harm(ForwardRemoteQueries, "attend", FORWARD, die)


def is_killed_before_backward() -> None:
    _harm(server, "attend_backward", BACKWARD, die)


def is_killed_in_backward() -> None:
    _harm(BackwardRemoteQueries, "derive", BACKWARD, die)


def has_no_room() -> None:
    _harm(attention, "check_room", HARMED_STEP, _fail(PlanError("attention needs 7 bytes and 3 are free")))


def has_no_kernel() -> None:
    _harm(LayerLookup, "kernel", 0, _fail(UnsupportedAttentionError("no kernel computes this")))


def breaks_in_a_kernel() -> None:
    _harm(BackwardRemoteQueries, "derive", BACKWARD, _fail(RuntimeError("the kernel is broken")))


def is_of_another_version() -> None:
    vars(server)["__version__"] = "0.0.9"


def has_no_device() -> None:
    _harm(server.Server, "_device", 0, _fail(RuntimeError("CUDA error: no device")))


# --- harm to messages, done by trainers


def strangers_write_to_its_mailbox() -> None:
    """Garbage, a message that nobody signed, and copies of those before, between all orders of the trainer."""
    copies: list[bytes] = []

    def post(outbox: Outbox, order: Order) -> None:
        for member, sequences in outbox._sequences.items():
            message = sequences.encode(order)
            for foreign in (b"garbage", message, *copies[-2:]):
                outbox._store.plain.queue_push(_queue(*member), foreign)
            outbox._store.push(_queue(*member), message)
            copies.append(outbox._store._signed(_queue(*member), message))

    Outbox.post = post  # type: ignore[method-assign]


def a_message_is_lost() -> None:
    def post_none(outbox: Outbox, order: Order) -> None:
        for sequences in outbox._sequences.values():
            sequences.encode(order)

    _harm(Outbox, "post", 1, post_none)


def train(folder: Path, harm: Callable[[], None] = nothing) -> None:
    """Trains, and writes down every finished step."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        harm()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    loader = plugin.dataloader(random_dataset(lengths=(150, 30)))
    model = distca_hf.enable(tiny_model(num_hidden_layers=NUM_LAYERS), plugin).train()
    for step, batch in enumerate(loader):
        model(**batch).loss.backward()
        (folder / f"steps-{rank}").write_text(str(step + 1))
        if step + 1 == STEPS:
            return


@dataclass(frozen=True)
class Case:
    """A harm, and the words of both trainers.

    Attributes:
        steps: that trainers finish.
        in_server: whether it is done in the server, or on trainer 0.
    """

    harm: Callable[[], None]
    steps: int
    words: tuple[str, ...]
    in_server: bool = True


NAME = f"attention server 0 on {os.uname().nodename}"
KILLED = f"{NAME} does not answer"
PLACE = f"micro-batch {HARMED_STEP}, layer {HARMED_LAYER}"
CASES = (
    Case(is_killed_before_forward, 1, (KILLED, f"{PLACE}, forward")),
    Case(is_killed_in_forward, 1, (KILLED, f"{PLACE}, forward")),
    Case(is_killed_before_backward, 1, (KILLED, f"{PLACE}, backward")),
    Case(is_killed_in_backward, 1, (KILLED, f"{PLACE}, backward")),
    Case(has_no_room, 1, (f"{NAME} left: PlanError: attention needs 7 bytes and 3 are free", f"{PLACE}, forward")),
    Case(has_no_kernel, 0, (f"{NAME} left: UnsupportedAttentionError: no kernel computes this",)),
    Case(breaks_in_a_kernel, 1, (f"{NAME} left: RuntimeError: the kernel is broken", f"{PLACE}, backward")),
    Case(is_of_another_version, 0, ("attention server 0 refuses: ", "attention server 0 runs 0.0.9; install one")),
    Case(has_no_device, 0, ("attention server 0 refuses: RuntimeError: CUDA error: no device",)),
    Case(strangers_write_to_its_mailbox, STEPS, (), in_server=False),
    Case(a_message_is_lost, 0, (f"{NAME} left: PlanMismatchError: ", "one was lost"), in_server=False),
)


def _run(case: Case, folder: Path) -> list[Outcome]:
    folder.mkdir()
    in_server, on_trainer = (case.harm, nothing) if case.in_server else (None, case.harm)
    return start_ranks(TRAINERS, train, folder, folder, on_trainer, servers=1, before_serving=in_server)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, tuple[Path, Future[list[Outcome]]]]]:
    """All runs, some of them at once."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        places = {case: folder / case.harm.__name__ for case in CASES}
        yield {case: (place, pool.submit(_run, case, place)) for case, place in places.items()}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.harm.__name__)
def test_trainers_end_with_the_name_of_the_server_and_take_no_step(
    case: Case, runs: dict[Case, tuple[Path, Future[list[Outcome]]]]
) -> None:
    """Messages of strangers change nothing."""
    folder, run = runs[case]
    *trainers, served = run.result()

    ended = 0 if case.steps == STEPS else 1
    assert served.exit_code == (-signal.SIGKILL if "killed" in case.harm.__name__ else ended), served.output
    assert ("7 bytes are not signed" in served.output) == ("came again, after order" in served.output) == (not ended)
    for outcome in trainers:
        assert outcome.exit_code == ended, outcome.output
        steps = folder / f"steps-{outcome.rank}"
        assert (int(steps.read_text()) if steps.is_file() else 0) == case.steps
        for words in case.words:
            assert words in outcome.output


def break_in_backward(folder: Path, server_leaves_first: bool) -> None:
    """Trainer 1 raises in the first step, in backward of its second layer."""
    if os.environ["RANK"] == "1":
        _harm(op, "attend_backward", 1, _fail(ValueError("the hook is broken")))
    elif server_leaves_first:
        ask = RollCall.missing

        def ask_late(call: RollCall, *given: Any) -> dict[int, str]:
            while TRAINERS in call._ranks and not call._store.check([f"left/{TRAINERS}"]):
                time.sleep(0.02)
            return ask(call, *given)

        RollCall.missing = ask_late  # type: ignore[method-assign]
    train(folder)


@pytest.mark.parametrize("server_leaves_first", [False, True], ids=["", "server follows at once"])
def test_a_trainer_that_fails_in_a_layer_is_named_and_no_server_is_blamed(
    tmp_path: Path, server_leaves_first: bool
) -> None:
    survivor, failed, _ = start_ranks(TRAINERS, break_in_backward, tmp_path, tmp_path, server_leaves_first, servers=1)

    assert "ValueError: the hook is broken" in failed.output
    assert "PeerLostError: rank 0, micro-batch 0, layer 0, backward" in survivor.output, survivor.output
    assert "rank 1 left: ValueError: the hook is broken" in survivor.output
    assert NAME not in survivor.output
    assert "ServerLostError" not in survivor.output


def fail_in_other_code(folder: Path) -> None:
    train(folder)
    if os.environ["RANK"] == "0":
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")


def test_no_server_is_blamed_for_a_failed_collective_of_other_code(tmp_path: Path) -> None:
    failed, *_ = start_ranks(TRAINERS, fail_in_other_code, tmp_path, tmp_path, servers=1)

    assert "distca_hf: rank 1 does not answer" in failed.output, failed.output
    assert "attention server 0" not in failed.output.partition("Traceback")[2]


def leave_without_a_word(folder: Path) -> None:
    train(folder)
    os._exit(0)


def test_a_server_ends_when_its_trainers_have_left_without_a_word(tmp_path: Path) -> None:
    *trainers, served = start_ranks(TRAINERS, leave_without_a_word, tmp_path, tmp_path, servers=1)

    assert [outcome.exit_code for outcome in trainers] == [0, 0]
    assert served.exit_code == 0, served.output
    assert "left without an end of their script" in served.output
