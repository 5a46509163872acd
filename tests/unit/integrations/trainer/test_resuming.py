"""A Trainer that goes on with other sizes, or anywhere: every document is trained as often as there are epochs.

One process: a micro-batch of n ranks is one of n times as many tokens. `tests/distributed` resumes on several ranks.
"""

import json
import threading
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers.trainer
from transformers import ProgressCallback, Trainer

import distca_hf
from distca_hf.errors import ConfigError
from support.resuming import TOKENS, TOKENS_PER_RANK, Diary, StopAt, all_tokens, count_tokens, numbered_trainer, train
from support.thorough import is_thorough


WORLDS = (1, 2, 3, 4)


class Run:
    """A Trainer that is attached, and what it has trained on when last asked to."""

    def __init__(self, folder: Path, world: int = 1, compute: bool = False, regroup: bool = True, **arguments: Any):
        self.folder = folder
        self.trainer = numbered_trainer(folder, **{"num_train_epochs": 1, "logging_strategy": "no"} | arguments)
        plugin = distca_hf.DistCAPlugin(
            tokens_per_rank=world * TOKENS_PER_RANK, pad_to_multiple_of=1, regroup_steps=regroup
        )
        plugin.attach(self.trainer)
        self.loader = self.trainer.get_train_dataloader()
        self.steps_per_epoch = -(-len(self.loader) // self.trainer.args.gradient_accumulation_steps)
        self._counter = count_tokens(self.trainer, compute)
        self._diary = Diary()
        self.trainer.add_callback(self._diary)

    def train(self, resume: bool | str | None = None, stop_at: int | None = None) -> "Run":
        self._counter.clear()
        self._diary.epochs.clear()
        train(self.trainer, resume, stop_at)
        self.seen, self.epochs = Counter(self._counter), list(self._diary.epochs)
        return self

    @property
    def state(self) -> Any:
        return self.trainer.state

    @property
    def checkpoint(self) -> str:
        """Of the last step."""
        return str(self.folder / f"checkpoint-{self.state.global_step}")

    @property
    def position(self) -> tuple[int, int]:
        """Where that checkpoint is in the data."""
        state = json.loads(Path(self.checkpoint, "trainer_state.json").read_text())
        saved = state["stateful_callbacks"]["distca_loader"]
        return saved["epoch"], saved["micro_batch"]

    def assert_ended(self, epochs: int) -> None:
        """Steps, epochs and schedule agree that training is over."""
        assert self.state.global_step == self.state.max_steps
        assert self.state.epoch == epochs
        assert self.trainer.lr_scheduler.last_epoch == self.state.max_steps
        assert self.trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.0)


# Any two of the three numbers meet.
@pytest.mark.parametrize(
    ("before", "accumulation", "epochs"),
    [
        (before, accumulation, 1 + (before + accumulation // 3) % 2)
        for before in WORLDS
        for accumulation in ((1, 3) if is_thorough() else (1 + before % 2 * 2,))
    ],
)
def test_every_document_is_trained_once_per_epoch_whatever_world_goes_on(
    before: int, accumulation: int, epochs: int, tmp_path: Path
) -> None:
    """Stopped twice: begun on one number of ranks, on another one with another accumulation, ended as it was begun."""
    ours = Run(tmp_path, before, gradient_accumulation_steps=accumulation, num_train_epochs=epochs)
    ours.train(stop_at=1)
    seen, made, begun = ours.seen, ours.epochs, ours.checkpoint
    for after in WORLDS:
        folder, other = tmp_path / f"{after}", 4 - accumulation
        between = Run(folder, after, gradient_accumulation_steps=other, num_train_epochs=epochs)
        between.train(begun, stop_at=2)
        ours.train(between.checkpoint)
        steps = [*made, *between.epochs, *ours.epochs]

        assert seen + between.seen + ours.seen == all_tokens(epochs), (before, after)
        assert all(earlier < later for earlier, later in pairwise(steps)), steps
        assert len(steps) == ours.state.global_step
        ours.assert_ended(epochs)


@pytest.mark.parametrize("regroup", [True, False])
def test_steps_end_with_the_epoch_and_say_so_where_each_has_another_size(regroup: bool, tmp_path: Path) -> None:
    """Six sizes in three epochs; the checkpoints of a strategy by epoch are at the ends of epochs of the data."""
    seen: Counter[int] = Counter()
    steps: list[float] = []
    ends: set[tuple[float, tuple[int, int]]] = set()
    last = 0
    for world, accumulation in product((2, 1, 3), (2, 3)):
        sizes = {"gradient_accumulation_steps": accumulation, "regroup": regroup}
        run = Run(tmp_path, world, num_train_epochs=3, save_strategy="epoch", **sizes)
        save = run.trainer._save_checkpoint

        def noted(*args: Any, run: Run = run, save: Any = save) -> None:
            save(*args)
            if run.state.epoch % 1 == 0:
                ends.add((run.state.epoch, run.position))

        run.trainer._save_checkpoint = noted
        last += 4
        run.train(resume=last > 4, stop_at=last if last < 24 else None)
        seen, steps = seen + run.seen, steps + run.epochs

    assert seen == all_tokens(3)
    assert all(earlier < later for earlier, later in pairwise(steps)), steps
    assert sorted(ends) == [(1.0, (1, 0)), (2.0, (2, 0)), (3.0, (3, 0))]
    run.assert_ended(3)


def test_progress_bar_ends_with_the_new_number_of_steps(tmp_path: Path) -> None:
    Run(tmp_path, 3).train(stop_at=2)
    run = Run(tmp_path, 1, disable_tqdm=False)
    bars = []
    (progress,) = (c for c in run.trainer.callback_handler.callbacks if isinstance(c, ProgressCallback))
    close = progress.on_train_end

    def noted(*args: Any, **kwargs: Any) -> None:
        bars.append((progress.training_bar.n, progress.training_bar.total))
        close(*args, **kwargs)

    progress.on_train_end = noted
    run.train(resume=True)

    assert run.state.max_steps not in (run.steps_per_epoch, 0)
    assert bars == [(run.state.max_steps, run.state.max_steps)]


@pytest.mark.parametrize(("before", "after", "accumulation"), [(1, 4, 3), (4, 1, 1)])
def test_number_of_steps_that_was_asked_for_stays(before: int, after: int, accumulation: int, tmp_path: Path) -> None:
    """In whatever epoch of the data it ends; every document is trained as often as every other one, or once more."""
    sizes = {"max_steps": 12, "gradient_accumulation_steps": accumulation}
    first = Run(tmp_path, before, **sizes).train(stop_at=8)
    second = Run(tmp_path, after, **sizes).train(resume=True)
    times = {(first.seen + second.seen)[token] / count for token, count in TOKENS.items()}

    assert second.state.global_step == second.state.max_steps == 12
    assert all(count % 1 == 0 for count in times)
    assert max(times) - min(times) <= 1
    assert second.trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.0)


def share_trained(seen: Counter[int]) -> float:
    return seen.total() / TOKENS.total()


@pytest.mark.parametrize(("epochs", "before", "after"), [(1.5, 1, 1), (0.5, 1, 3), (1.5, 3, 1), (0.5, 4, 2)])
def test_fraction_of_an_epoch_is_a_share_of_its_tokens(epochs: float, before: int, after: int, tmp_path: Path) -> None:
    first, second = (Run(tmp_path, world, num_train_epochs=epochs) for world in (before, after))
    first.train(stop_at=1 if epochs < 1 else first.steps_per_epoch + 1)
    second.train(resume=True, stop_at=first.state.max_steps if before == after else None)
    trained, step_share = share_trained(first.seen + second.seen), 1 / second.steps_per_epoch

    assert epochs - 0.02 <= trained <= epochs + 2 * step_share
    assert second.state.global_step == second.state.max_steps
    assert second.state.epoch == pytest.approx(trained, abs=step_share)


@pytest.mark.parametrize(
    ("end", "world"), [({"num_train_epochs": 2}, 1), ({"num_train_epochs": 1.4}, 2), ({"max_steps": 7}, 1)]
)
def test_training_that_is_over_trains_nothing_more(end: dict[str, Any], world: int, tmp_path: Path) -> None:
    first = Run(tmp_path, 2, save_strategy="steps", **end).train()
    again = Run(tmp_path, world, **end).train(resume=True)

    assert again.seen == {}
    assert again.state.global_step == first.state.global_step == again.state.max_steps
    assert again.state.epoch == first.state.epoch


@pytest.mark.parametrize("world", [1, 2, 3])
def test_epoch_after_one_that_was_just_over_is_whole(world: int, tmp_path: Path) -> None:
    first = Run(tmp_path, 2, num_train_epochs=2)
    first.train(stop_at=first.steps_per_epoch)
    second = Run(tmp_path, world, num_train_epochs=2).train(resume=True)

    assert (first.position, first.state.epoch) == ((1, 0), 1.0)
    assert first.seen == second.seen == TOKENS
    assert second.state.global_step == first.steps_per_epoch + second.steps_per_epoch
    second.assert_ended(2)


def noise_of(run: Run) -> None:
    """Lets the model depend on torch's random numbers, as dropout does."""

    def add(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.1 * torch.randn_like(output) if module.training else output

    run.trainer.model.get_input_embeddings().register_forward_hook(add)


def history_of(run: Run) -> list[tuple[float, ...]]:
    names = ("step", "epoch", "loss", "grad_norm", "learning_rate")
    return [tuple(log[name] for name in names) for log in run.state.log_history if "loss" in log]


@pytest.mark.parametrize(("resized", "accumulation"), [(False, 3), (True, 1)])
def test_run_that_resumes_with_its_own_sizes_is_bit_equal(resized: bool, accumulation: int, tmp_path: Path) -> None:
    """Also where it had gone on with other sizes before: in the rest of that epoch, at its end, and later."""
    saves = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1}
    sizes = saves | {"gradient_accumulation_steps": accumulation, "compute": True, "logging_strategy": "steps"}
    begin = Run(tmp_path, 3, gradient_accumulation_steps=2, **saves).train(stop_at=1).checkpoint if resized else None
    whole = Run(tmp_path, 2, **sizes)
    noise_of(whole)
    whole.train(begin)
    ends = [log["epoch"] for log in whole.state.log_history if "loss" in log].index(1.0) + 1
    for step in {2, 3, ends, ends + 1}:
        resumed = Run(tmp_path / f"{step}", 2, **sizes | {"save_strategy": "no"})
        noise_of(resumed)
        resumed.train(str(tmp_path / f"checkpoint-{step}"))

        assert history_of(resumed) == history_of(whole)
        assert resumed.state.max_steps == whole.state.max_steps
        weights = whole.trainer.model.state_dict()
        for name, value in resumed.trainer.model.state_dict().items():
            assert torch.equal(value, weights[name]), name


def test_one_trainer_may_resume_begin_anew_and_resume_again(tmp_path: Path) -> None:
    first = Run(tmp_path, 1).train(stop_at=2)
    assert "distca-ahead" not in [thread.name for thread in threading.enumerate()], (
        "nobody prepares what is not trained"
    )
    run = Run(tmp_path, 2)
    for resume in (first.checkpoint, None, None, first.checkpoint):
        run.train(resume)
        assert run.seen + (first.seen if resume else Counter()) == TOKENS
        assert (run.state.global_step == run.steps_per_epoch) is (resume is None)
        run.assert_ended(1)


class AlwaysResumes(Trainer):
    """Finds its checkpoint by itself."""

    def train(self, resume_from_checkpoint: Any = None) -> Any:
        return super().train(resume_from_checkpoint=True)


def test_subclass_that_resumes_by_itself_goes_on_in_the_data(tmp_path: Path) -> None:
    first = Run(tmp_path, 1).train(stop_at=2)
    second = Run(tmp_path, 3, kind=AlwaysResumes).train()

    assert first.seen + second.seen == TOKENS
    second.assert_ended(1)


def test_data_begins_anew_if_asked_to(tmp_path: Path) -> None:
    Run(tmp_path, 2).train(stop_at=2)
    second = Run(tmp_path, 2, ignore_data_skip=True, num_train_epochs=2).train(resume=True)

    assert TOKENS <= second.seen, "the first epoch is trained from its beginning"
    assert second.state.global_step == second.state.max_steps


class StopEpochAt(StopAt):
    """Ends an epoch after a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == self.step


def test_epoch_that_a_callback_stops_is_left_behind(tmp_path: Path) -> None:
    """As with Trainer's own loaders; the next epoch is whole."""
    run = Run(tmp_path, 1, num_train_epochs=2)
    run.trainer.add_callback(StopEpochAt(2))
    run.train()

    assert 0 < share_trained(run.seen - TOKENS) < 1
    assert TOKENS <= run.seen
    assert run.state.epoch == 2.0


def test_trainer_that_counts_in_another_way_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run(tmp_path, 1).train(stop_at=2)
    with monkeypatch.context() as patched:
        patched.delattr(Trainer, "_run_epoch")
        patched.setattr(Trainer, "_init_training_state", lambda self, steps: (0, 0))
        run = Run(tmp_path, 1)

    told = r"at step 2, .* Transformers \S+ has changed _init_training_state, _run_epoch .* ignore_data_skip=True"
    with pytest.raises(ConfigError, match=told):
        run.train(resume=True)
    assert run.train().seen == TOKENS, "to begin is as ever"


def test_nothing_but_the_attached_trainer_is_changed(tmp_path: Path) -> None:
    before = [dict(vars(part)) for part in (transformers.trainer, Trainer)]
    Run(tmp_path / "placed", 1)

    assert [dict(vars(part)) for part in (transformers.trainer, Trainer)] == before
    assert transformers.trainer.skip_first_batches is accelerate.skip_first_batches
