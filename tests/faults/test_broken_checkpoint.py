"""A checkpoint that is half written, or of another training, is refused instead of beginning anew without a word."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback, TrainingArguments

import distca_hf
from distca_hf.errors import ConfigError
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import start_ranks
from support.training import quiet_arguments


STEPS = 4


def _trainer(folder: Path, **arguments: Any) -> Trainer:
    args = TrainingArguments(
        **quiet_arguments(
            folder,
            max_steps=STEPS,
            save_strategy="steps",
            save_steps=2,
            use_cpu=True,
            **arguments,
        )
    )
    trainer = Trainer(model=tiny_model(num_hidden_layers=1), args=args, train_dataset=random_dataset())
    distca_hf.DistCAPlugin(tokens_per_rank=192 // args.world_size).attach(trainer)
    return trainer


def _killed_while_it_saves(folder: Path) -> None:
    """Both ranks end in the second save, when the model is written and the state is not."""
    trainer = _trainer(folder)
    save = trainer._save_rng_state

    def save_or_die(output_dir: str) -> None:
        if output_dir.endswith("checkpoint-4"):
            os.kill(os.getpid(), signal.SIGKILL)
        save(output_dir)

    trainer._save_rng_state = save_or_die
    trainer.train()


def test_half_written_checkpoint_is_refused_and_the_one_before_it_goes_on(tmp_path: Path) -> None:
    outcomes = start_ranks(2, _killed_while_it_saves, tmp_path / "ranks", tmp_path / "run")
    assert {outcome.exit_code for outcome in outcomes} == {-signal.SIGKILL}
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}

    trainer = _trainer(tmp_path / "run")
    whole = re.escape(str(tmp_path / "run" / "checkpoint-2"))
    with pytest.raises(ConfigError, match=rf'checkpoint-4 was not written to its end: .*checkpoint="{whole}" goes on'):
        trainer.train(resume_from_checkpoint=True)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert trainer.state.global_step == STEPS


def test_checkpoint_without_our_position_is_refused_unless_data_begins_anew(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    trainer.train()
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["distca_loader"]
    path.write_text(json.dumps(state))

    with pytest.raises(ConfigError, match="the checkpoint of step 2 holds no position in placed batches"):
        _trainer(tmp_path).train(resume_from_checkpoint=str(path.parent))
    again = _trainer(tmp_path, ignore_data_skip=True)
    again.train(resume_from_checkpoint=str(path.parent))
    assert again.state.global_step == STEPS


class Never(TrainerCallback):
    """Fails when a step begins."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise AssertionError("a step was begun")


def test_truncated_state_is_refused(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    trainer.train()
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    cut_off = path.read_text()[:-40]
    trainer.add_callback(Never())
    strange = tmp_path / "checkpoint-²"
    strange.mkdir()
    (strange / "trainer_state.json").write_text(path.read_text())
    for content, words in (
        (cut_off, "ends early, or is not JSON"),
        ("[" * 100_000, "ends early, or is not JSON"),
        ("[]", "has the global_step None"),
        ('{"global_step": NaN}', "has the global_step nan"),
        ('{"global_step": -1}', "has the global_step -1"),
    ):
        path.write_text(content)
        with pytest.raises(
            ConfigError, match=f"checkpoint-2 was not written to its end: .* {words}.* goes on from there"
        ):
            trainer.train(resume_from_checkpoint=str(path.parent))
