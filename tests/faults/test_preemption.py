"""SIGTERM, Ctrl-C: all ranks end the same step, save, leave, and go on later as if nothing had been."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader, dataloader
from torch.utils.data._utils import signal_handling
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

import distca_hf
from distca_hf.patches.data_workers import SIGNALS, _end_workers, _protecting, data_workers
from support.commands import HANG_SECONDS
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks, start_ranks
from support.resuming import resumes_on_cpu_ranks
from support.signalled import PLACES, checkpoints, losses, send_from_outside, train_into_signal
from support.thorough import is_thorough
from support.training import quiet_arguments


WORLD = 2
STEPS = 24
# A signal is sent after so many steps, and may come in the midst of one of the next.
BEGIN_STEPS = 3
# Training waits here until the signal was sent, if that took long.
WAIT_STEPS = 12
# Slow enough for a signal to come before.
STEP_SECONDS = 0.03
LEFT = 143


class Diary(TrainerCallback):
    """Writes every step down."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._path.write_text(str(state.global_step))


class Pace(TrainerCallback):
    """Takes some time for every step; saves, or goes on after some steps, only when the last signal was sent."""

    def __init__(self, sent: Path) -> None:
        self._sent = sent

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(STEP_SECONDS)
        if state.global_step >= WAIT_STEPS:
            self._wait()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._wait()  # a signal behind the end of training would end the process as ever

    def _wait(self) -> None:
        while not self._sent.exists():
            time.sleep(0.01)


def make_trainer(batches: str, folder: Path, steps: int) -> Trainer:
    """A Trainer that saves nothing unless it is asked to; evaluation would take for ever."""
    args = TrainingArguments(
        **quiet_arguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            use_cpu=True,
            seed=3,
        )
    )
    dataset = random_dataset(80)
    if batches == "placed":
        trainer = Trainer(model=tiny_model(num_hidden_layers=1), args=args, train_dataset=dataset)
        distca_hf.DistCAPlugin(tokens_per_rank=150).attach(trainer)
        return trainer
    labelled = dataset.add_column("labels", dataset["input_ids"])
    return Trainer(
        model=tiny_model(num_hidden_layers=1),
        args=args,
        train_dataset=labelled,
        data_collator=DataCollatorWithFlattening(),
        callbacks=[distca_hf.DistCACallback(distca_hf.DistCAPlugin())],
    )


def paced_trainer(batches: str, folder: Path, steps: int, sent: Path) -> Trainer:
    """A Trainer with a diary, at a pace at which signals come; the file is named that tells that they were sent."""
    trainer = make_trainer(batches, folder, steps)
    trainer.callback_handler.callbacks[:0] = [Diary(folder / f"steps-{os.environ['RANK']}"), Pace(sent)]
    return trainer


def train_as_a_script(trainer: Trainer) -> None:
    """Trains; the exit status is that of a script which ends in SystemExit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        trainer.train()
    except SystemExit as leaving:
        os._exit(int(str(leaving.code)))


def train_at_a_pace(batches: str, folder: Path, steps: int) -> None:
    train_as_a_script(paced_trainer(batches, folder, steps, folder / "sent"))


def send(number: int, ranks: tuple[int, ...], folder: Path, processes: list[Any]) -> None:
    """Sends a signal to some ranks, one after the other, in the midst of training."""
    deadline = time.monotonic() + HANG_SECONDS
    while not (folder / "steps-0").is_file() or int((folder / "steps-0").read_text() or 0) < BEGIN_STEPS:
        assert time.monotonic() < deadline, "no training to interrupt"
        time.sleep(0.01)
    for rank in ranks:
        os.kill(processes[rank].pid, number)
        time.sleep(0.04)
    (folder / "sent").touch()


@pytest.fixture(autouse=True)
def _usual_handler() -> Iterator[None]:
    """A shell's background jobs ignore Ctrl-C, and so would the tests that one runs."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[int, float]]:
    """Losses of a training that gets no signal, by kind of batches."""
    known: dict[str, dict[int, float]] = {}

    def of(batches: str) -> dict[int, float]:
        if batches not in known:
            folder = tmp_path_factory.mktemp(batches)
            known[batches] = run_ranks(WORLD, losses, folder / "ranks", "forward", batches, 0, folder, False)[0]
        return known[batches]

    return of


# Both signals, both kinds of batches, and loaders with workers and without; at each place all of these are in
# `scripts/faults/signal_places.py`.
SAMPLE = {
    place: (place, "packs" if number % 2 and place != "placed evaluation" else "placed", 2 * (number % 4 in (0, 3)))
    for number, place in enumerate(PLACES)
}
if not is_thorough():  # where another evaluation, or the end of a step, is interrupted
    for place in ("placed evaluation", "generation", "evaluation after the last step", "after the last step"):
        del SAMPLE[place]


@resumes_on_cpu_ranks
@pytest.mark.parametrize(("place", "batches", "workers"), SAMPLE.values(), ids=SAMPLE)
def test_a_signal_at_every_place_leaves_a_checkpoint_that_resumes_bit_equal(
    place: str, batches: str, workers: int, undisturbed: Callable[[str], dict[int, float]], tmp_path: Path
) -> None:
    number = (signal.SIGTERM, signal.SIGINT)[len(place) % 2]
    folder, ranks = tmp_path / "run", (1,) if place in ("forward", "evaluation") else (0, 1)
    arguments = (place, batches, workers, folder, number, ranks)
    outcomes = start_ranks(WORLD, train_into_signal, folder / "ranks", *arguments)

    assert [outcome.exit_code for outcome in outcomes] == [128 + number] * WORLD, outcomes
    if workers and (batches == "packs" or place == "before the first step"):  # others have drawn all rows of the epoch
        assert int((folder / "sent-1").read_text()) >= workers, "they get the signal, too"
    assert checkpoints(folder)
    resumed = run_ranks(WORLD, losses, tmp_path / "resumed", place, batches, workers, folder, True)[0]
    assert resumed == undisturbed(batches)


def _launch(folder: Path) -> None:
    """Does what torchrun does, but forks its ranks: processes that it starts import for half a minute together."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    dist.destroy_process_group()
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "run_id": "test"}
    elastic_launch(LaunchConfig(1, 1, WORLD, **place, max_restarts=0, start_method="fork"), _train_launched)(folder)


def _train_launched(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a process that is started has no handler of its launcher
    try:
        paced_trainer("placed", folder, STEPS, sent=folder / "sent").train()
    except SystemExit as leaving:
        (folder / f"left-{os.environ['RANK']}").write_text(str(leaving.code))
        raise


def test_launcher_that_is_terminated_lets_its_ranks_save(tmp_path: Path) -> None:
    meanwhile: Callable[[list[Any]], None] = partial(send, signal.SIGTERM, (0,), tmp_path)
    (launcher,) = start_ranks(1, _launch, tmp_path / "launcher", tmp_path, meanwhile=meanwhile)

    assert launcher.exit_code != 0
    assert "SignalException" in launcher.output
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert (checkpoint / "trainer_state.json").is_file()
    left = [(tmp_path / f"left-{rank}").read_text() for rank in range(WORLD)]
    assert left == [f"{LEFT}"] * WORLD, launcher.output


def test_attention_servers_serve_until_the_checkpoint_is_saved(tmp_path: Path) -> None:
    ranks = (WORLD, *range(WORLD))  # the server first
    meanwhile: Callable[[list[Any]], None] = partial(send, signal.SIGTERM, ranks, tmp_path)
    outcomes = start_ranks(
        WORLD, train_at_a_pace, tmp_path / "ranks", "placed", tmp_path, STEPS, meanwhile=meanwhile, servers=1
    )

    assert [outcome.exit_code for outcome in outcomes] == [LEFT] * len(ranks), outcomes
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    step = checkpoint.name.removeprefix("checkpoint-")
    assert [(tmp_path / f"steps-{rank}").read_text() for rank in range(WORLD)] == [step] * WORLD


class AtStep(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self._step, self._action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._action()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def has_default_handler() -> bool:
    usual = (signal.SIG_DFL, signal.default_int_handler)
    return (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == usual


def test_handler_is_there_while_training_runs_and_gone_afterwards(tmp_path: Path) -> None:
    seen = []
    trainer = make_trainer("placed", tmp_path, 1)
    trainer.add_callback(AtStep(1, lambda: seen.append(has_default_handler())))

    assert has_default_handler()
    trainer.train()
    assert seen == [False]
    assert has_default_handler()


def test_signal_that_a_shell_ignores_for_jobs_in_background_stays_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        make_trainer("placed", tmp_path, 1).train()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, earlier)

    assert "handler of SIGINT" not in caplog.text


def test_handler_of_somebody_else_stays_and_is_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    got = []
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        trainer = make_trainer("placed", tmp_path, 3)
        trainer.add_callback(AtStep(2, terminate))
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, earlier)

    assert got == [signal.SIGTERM]
    assert trainer.state.global_step == 3
    assert "another handler of SIGTERM is installed" in caplog.text


def test_alone_a_rank_saves_at_once(tmp_path: Path) -> None:
    for batches in ("placed", "packs"):
        trainer = make_trainer(batches, tmp_path / batches, 6)
        trainer.callback_handler.callbacks.insert(0, AtStep(2, terminate))
        with pytest.raises(SystemExit) as leaving:
            trainer.train()
        assert leaving.value.code == LEFT
        assert [path.name for path in (tmp_path / batches).glob("checkpoint-*")] == ["checkpoint-2"]
        assert has_default_handler()


def test_second_keyboard_interrupt_ends_training_at_once(tmp_path: Path) -> None:
    def interrupt_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    trainer = make_trainer("placed", tmp_path, 6)
    trainer.callback_handler.callbacks.insert(0, AtStep(2, interrupt_twice))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()

    assert not list(tmp_path.glob("checkpoint-*"))
    assert has_default_handler()


def _raise() -> None:
    raise ArithmeticError


def _terminate_after(what: str, folder: Path) -> None:
    """SIGTERM when nobody is left to save: training has failed, or has ended, or another Trainer trains."""
    trainer = make_trainer("placed", folder, 2)
    if what != "the end":
        trainer.add_callback(AtStep(1, _raise))
        with pytest.raises(ArithmeticError):
            trainer.train()
    else:
        trainer.train()
    if what == "a failure before another Trainer":
        rows = Dataset.from_dict({"input_ids": [[3, 4]] * 8, "labels": [[3, 4]] * 8})
        other = Trainer(tiny_model(implementation="sdpa", num_hidden_layers=1), trainer.args, train_dataset=rows)
        other.add_callback(AtStep(1, terminate))
        other.train()
        return  # it would train to its end otherwise
    terminate()
    signal.pause()


@pytest.mark.parametrize("what", ["a failure", "the end", "a failure before another Trainer"])
def test_signal_that_comes_too_late_ends_the_process_as_ever(what: str, tmp_path: Path) -> None:
    (outcome,) = start_ranks(1, _terminate_after, tmp_path, what, tmp_path / "run")

    assert outcome.exit_code == -signal.SIGTERM  # it would wait for ever otherwise


def _train_beside_older_workers(folder: Path, number: signal.Signals) -> None:
    """A worker that started before the plugin was attached gets a signal, and its rank gets none."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    data_workers.revert()
    signal_handling._SIGCHLD_handler_set = False  # the fork server has put its handler back, unknown to torch
    older = DataLoader(range(4), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    assert next(iter(older)) == 0
    (worker,) = multiprocessing.active_children()
    trainer = make_trainer("placed", folder, 6)

    def end_worker() -> None:
        send_from_outside(number, worker.pid)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)

    trainer.callback_handler.callbacks.insert(0, AtStep(2, end_worker))
    train_as_a_script(trainer)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, LEFT), (signal.SIGKILL, 1)])
def test_worker_that_outlives_no_signal_ends_training_with_a_checkpoint_unless_it_was_killed(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    (outcome,) = start_ranks(1, _train_beside_older_workers, tmp_path, tmp_path / "run", number)

    assert outcome.exit_code == status, outcome.output
    assert checkpoints(tmp_path / "run") == [2] * (number == signal.SIGTERM)
    assert f"is killed by signal: {signal.strsignal(number)}" in outcome.output


def _hang(worker: int) -> None:
    signal.pause()


def _leave_workers_that_hang() -> list[int]:
    """Children while there are iterators, when one of these is gone, and at exit."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    dataloader._utils.MP_STATUS_CHECK_INTERVAL = 0.1
    data_workers.apply()
    settings: dict[str, Any] = {"num_workers": 1, "worker_init_fn": _hang, "multiprocessing_context": "fork"}
    iterators = [iter(DataLoader(range(4), **settings)) for _ in range(2)]
    seen = [len(multiprocessing.active_children())]
    iterators.pop()
    while len(multiprocessing.active_children()) == 2:  # one was killed
        time.sleep(0.01)
    seen.append(len(multiprocessing.active_children()))
    _end_workers()
    while multiprocessing.active_children():
        time.sleep(0.01)
    return seen


def test_workers_that_hang_end_with_their_iterator_or_at_exit(tmp_path: Path) -> None:
    assert run_ranks(1, _leave_workers_that_hang, tmp_path) == [[2, 1]]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_only_workers_inherit_blocked_signals(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: dict[str, set[Any]] = {}

    def note(name: str) -> None:
        blocked[name] = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(forkserver, "ensure_running", lambda: note("fork server"))
    loader = DataLoader(range(4), num_workers=1, multiprocessing_context=method)
    _protecting(lambda loader: note("workers"))(loader)

    assert blocked["workers"] == before | set(SIGNALS)
    assert blocked.get("fork server") == (before if method == "forkserver" else None)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_setting_leaves_the_signal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCA_SAVE_ON_SIGNAL", "no")
    seen = []
    trainer = make_trainer("placed", tmp_path, 1)
    trainer.add_callback(AtStep(1, lambda: seen.append(has_default_handler())))
    trainer.train()

    assert seen == [True]
