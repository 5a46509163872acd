"""`--attach` and DISTCA_ATTACH: every Trainer that trains is attached for that long, and once."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import distca_hf
from distca_hf.errors import ConfigError
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.trainer.attachment import Attachment
from distca_hf.patches.every_trainer import TRAINED, trained_classes
from distca_hf.patches.every_trainer import every_trainer as patch
from support.commands import REPOSITORY
from support.data import random_dataset
from support.forked import run_forked, run_fresh
from support.models import tiny_model


Make = Callable[..., Trainer]
LABELLED = random_dataset(8, lengths=(12,))
LABELLED = LABELLED.add_column("labels", LABELLED["input_ids"])


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Installed twice, as by the flag and the variable; undone after the test."""
    for _ in range(2):
        patch.apply()
    yield
    patch.revert()
    assert not hasattr(Trainer.train, TRAINED)


class Seen(TrainerCallback):
    """Notes in every step whether the Trainer is attached, and its attention."""

    def __init__(self) -> None:
        self.steps: list[tuple[bool, str]] = []
        self.trainer: Trainer | None = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        model = self.trainer.model
        self.steps.append((Attachment.of(self.trainer) is not None, model.config._attn_implementation))


@pytest.fixture
def seen(make: Make) -> Callable[..., tuple[Trainer, Seen]]:
    def trainer_and_what_it_saw(kind: type[Trainer] = Trainer, **given: Any) -> tuple[Trainer, Seen]:
        model = tiny_model(num_hidden_layers=1, implementation="sdpa")
        callbacks = [watch := Seen(), *given.pop("callbacks", ())]
        trainer = make(LABELLED, model, {"callbacks": callbacks} | given, kind, max_steps=2)
        watch.trainer = trainer
        return trainer, watch

    return trainer_and_what_it_saw


ATTACHED = [(True, "distca")] * 2


def test_a_trainer_is_attached_while_it_trains(seen: Any) -> None:
    trainer, watch = seen()
    before = {*vars(trainer)} - {"_signature_columns"}
    trainer.train()
    trainer.evaluate(LABELLED)

    assert watch.steps == ATTACHED
    assert Attachment.of(trainer) is None
    assert trainer.model.config._attn_implementation == "sdpa"
    assert watch_of(trainer.model) is None
    assert "train" not in vars(trainer)
    assert before <= {*vars(trainer)}
    trainer.args.max_steps = 4
    trainer.train()
    assert watch.steps == ATTACHED * 3, "the second training begins anew"
    assert trained_classes() == {"Trainer"}


def test_losses_are_those_of_attach(seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCA_TOKENS_PER_RANK", "96")  # settings come from the environment
    torch.manual_seed(0)
    trainer, _ = seen()
    trainer.train()
    torch.manual_seed(0)
    other, _ = seen()
    distca_hf.DistCAPlugin(tokens_per_rank=96).attach(other)
    other.train()

    losses = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in (trainer, other)]
    assert losses[0] == losses[1] != []
    assert any("distca/imbalance" in log for log in trainer.state.log_history)


def test_a_method_around_trainers_runs_once(seen: Any) -> None:
    calls = []

    class Own(Trainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return super().train(*args, **kwargs)

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("loop")
            return super()._inner_training_loop(*args, **kwargs)

    trainer, watch = seen(Own)
    trainer.train()

    assert calls == [(), "loop"]
    assert watch.steps == ATTACHED


class NamesItsParent(Trainer):
    def train(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.train(self, *args, **kwargs)


def test_a_method_may_call_its_parent_by_name(seen: Any) -> None:
    trainer, watch = seen(NamesItsParent)
    trainer.train()

    assert watch.steps == ATTACHED


def test_each_training_ends_its_connections(seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = [], []
    transport, close = distca_hf.DistCAPlugin.transport, distca_hf.DistCAPlugin.close
    monkeypatch.setattr(
        distca_hf.DistCAPlugin, "transport", lambda self, device: opened.append(self) or transport(self, device)
    )
    monkeypatch.setattr(distca_hf.DistCAPlugin, "close", lambda self: closed.append(self) or close(self))
    trainer, _ = seen()
    for _ in range(2):
        trainer.train()

    assert {*map(id, opened)} == {*map(id, closed)}
    assert len(closed) == 2


def test_a_program_that_balances_by_itself_is_left_alone(seen: Any) -> None:
    plugin = distca_hf.DistCAPlugin()
    by_attach, watch = seen()
    plugin.attach(by_attach)
    attachment = Attachment.of(by_attach)
    by_attach.train()
    assert Attachment.of(by_attach) is attachment
    assert watch.steps == ATTACHED

    by_callback, watch = seen(callbacks=[distca_hf.DistCACallback(plugin)])
    by_callback.train()
    assert watch.steps == [(False, "distca")] * 2

    by_enable, watch = seen()
    distca_hf.enable(by_enable.model, plugin)
    by_enable.train()
    assert watch.steps == [(False, "distca")] * 2


@pytest.mark.parametrize("method", ["train", "_inner_training_loop"])
def test_a_loop_of_ones_own_is_named(method: str, seen: Any) -> None:
    own = type("LoopTrainer", (Trainer,), {})

    def loop(self: Trainer, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("it must not run")

    setattr(own, method, loop)
    own = type("LoopTrainer", (own,), {})
    trainer, _ = seen(own)
    with pytest.raises(ConfigError, match=rf"LoopTrainer\.{method} makes its own loop.*distca_hf\.enable"):
        trainer.train()
    trainer.evaluate(LABELLED)


def test_what_attach_refuses_is_refused(seen: Any) -> None:
    trainer, watch = seen()
    trainer.args.auto_find_batch_size = True
    trainer.model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(distca_hf.UnsupportedAttentionError, match=r"attention dropout 0\.1"):
        trainer.train()

    assert watch.steps == []
    assert "train" not in vars(trainer)
    assert trainer.model.config._attn_implementation == "sdpa"


def test_an_error_in_training_is_raised_and_the_trainer_detached(seen: Any) -> None:
    class Fails(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("disk full")

    trainer, _ = seen(callbacks=[Fails()])
    with pytest.raises(OSError, match="disk full"):
        trainer.train()

    assert Attachment.of(trainer) is None
    assert trainer.model.config._attn_implementation == "sdpa"


def test_a_trainer_that_was_changed_in_training_stays_attached(seen: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Replaces(TrainerCallback):
        trainer: Trainer

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.trainer.compute_loss = lambda *args, **kwargs: torch.zeros(())

    replaces = Replaces()
    trainer, _ = seen(callbacks=[replaces])
    replaces.trainer = trainer
    trainer.train()

    assert Attachment.of(trainer) is not None
    assert "Trainer stays attached after its training: compute_loss of this Trainer was replaced" in caplog.text


PROGRAM = """
import sys
{first}
from transformers import AttentionInterface, AttentionMaskInterface, Trainer
registered = {{"distca" in AttentionInterface(), "distca" in AttentionMaskInterface()}}
print(hasattr(Trainer.train, "_distca_trained"), "distca_hf" in sys.modules, *registered)
"""
# Does what distca_startup.pth does when a process starts.
STARTED = """
import os
if value := {value!r}:
    os.environ["DISTCA_ATTACH"] = value
    value == "0" or __import__("distca_startup")
"""


def test_variable_acts_in_every_process_of_a_trainer() -> None:
    """Attention and mask are registered in all of them, whichever package is imported first."""
    ms_swift = REPOSITORY / "examples/ms_swift_plugin.py"
    cases = [
        ("1", "", "True True True"),
        ("1", "from distca_hf import DistCACallback", "True True True"),  # imports Trainer while it is imported itself
        ("1", "import distca_hf.integrations.trainer.attach", "True True True"),
        ("0", "import distca_hf", "False True True"),
        ("", "from transformers import PreTrainedModel\nimport distca_hf", "False True True"),
        ("", f"import runpy; runpy.run_path({str(ms_swift)!r})", "True True True"),
        ("yes", "", "environment variable DISTCA_ATTACH='yes' is neither 1 nor 0"),
    ]
    printed = run_forked(*(STARTED.format(value=value) + PROGRAM.format(first=first) for value, first, _ in cases))

    for line, (value, first, expected) in zip(printed, cases, strict=True):
        assert line == expected if "True" in expected else expected in line, (value, first)


def test_wrong_value_does_no_harm_in_processes_without_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they start. `test_package.py` tests that an installation acts on the variable."""
    monkeypatch.setenv("DISTCA_ATTACH", "yes")
    assert run_fresh("print('harmless')") == "harmless"
