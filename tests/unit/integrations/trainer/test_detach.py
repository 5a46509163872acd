"""Detaching: Trainer and model are as they were before `attach`, and train with their own batches."""

from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback

import distca_hf
from distca_hf.errors import ConfigError
from distca_hf.integrations.attention import LAYER_SETTINGS
from distca_hf.integrations.models.forward_watch import watch_of
from support.models import tiny_model


ROWS = Dataset.from_dict({"input_ids": [[3, 4, 5, 6]] * 12, "labels": [[3, 4, 5, 6]] * 12})


@pytest.fixture
def make(make: Callable[..., Trainer]) -> Callable[..., Trainer]:
    def of_two_layers(model: Any = None) -> Trainer:
        model = tiny_model(num_hidden_layers=2) if model is None else model
        return make(ROWS, model, {"eval_dataset": ROWS}, max_steps=2, disable_tqdm=False)

    return of_two_layers


def attributes(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """All attributes of a Trainer, its arguments, callbacks and modules; hooks by their number."""
    handler = trainer.callback_handler
    of_modules = {
        f"model.{name}": {
            attribute: list(value) if attribute.endswith(("_hooks", "_with_kwargs")) else value
            for attribute, value in vars(module).items()
        }
        for name, module in trainer.model.named_modules()
    }
    # A list of columns, which Trainer reads from its model when it first needs them.
    of_trainer = {name: value for name, value in vars(trainer).items() if name != "_signature_columns"}
    return {
        "trainer": of_trainer,
        "args": dict(vars(trainer.args)),
        "callbacks": dict(enumerate(handler.callbacks)),
        **{f"callback {number}": dict(vars(callback)) for number, callback in enumerate(handler.callbacks)},
        **of_modules,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens_per_rank": 64},
        {"tokens_per_rank": 64, "evaluate": "distca", "save_on_signal": False},
        {},
        {"evaluate": "distca", "metrics": "all"},
    ],
    ids=["placed", "placed evaluation", "kept", "kept with all metrics"],
)
def test_attributes_are_those_from_before(settings: dict[str, Any], make: Callable[..., Trainer]) -> None:
    trainer = make()
    before = attributes(trainer)
    plugin = distca_hf.DistCAPlugin(**settings)
    plugin.attach(trainer)
    attached = attributes(trainer)
    plugin.detach(trainer)

    assert attached["trainer"] != before["trainer"]
    assert attached["model."] != before["model."]
    assert attributes(trainer) == before


@pytest.mark.parametrize("tokens_per_rank", [64, 0], ids=["placed", "kept"])
def test_trains_again_with_its_own_batches(tokens_per_rank: int, make: Callable[..., Trainer]) -> None:
    """In a second training only the weights are left of the first."""
    trainer, plugin = make(), distca_hf.DistCAPlugin(tokens_per_rank=tokens_per_rank)
    plugin.attach(trainer)
    trainer.train()
    balanced = trainer.state.log_history
    plugin.detach(trainer)
    other = make(tiny_model(num_hidden_layers=2))
    other.model.load_state_dict(trainer.model.state_dict())
    for one in (trainer, other):
        one.optimizer = one.lr_scheduler = None
        one.train()

    has_metrics = any("distca" in name for log in balanced for name in log)
    assert has_metrics == bool(tokens_per_rank), "one rank attends to its own batches alone"
    steps = [log for log in trainer.state.log_history if "loss" in log]
    assert [name for log in trainer.state.log_history for name in log if "distca" in name] == []
    assert [log["loss"] for log in steps] == [log["loss"] for log in other.state.log_history if "loss" in log]
    assert vars(trainer).keys() == vars(other).keys()
    assert type(trainer.get_train_dataloader()) is type(other.get_train_dataloader())


def test_checkpointing_is_as_it_was(make: Callable[..., Trainer]) -> None:
    model = tiny_model(num_hidden_layers=2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.model.layers[0]
    before = layer._gradient_checkpointing_func
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=64)
    trainer = make(model)
    plugin.attach(trainer)
    trainer.train()
    saving = layer._gradient_checkpointing_func
    plugin.detach(trainer)

    assert "context_fn" in saving.keywords
    assert layer._gradient_checkpointing_func is before
    assert "_distca_replaced" not in vars(layer)


def test_earlier_plugin_counts_again(make: Callable[..., Trainer]) -> None:
    """A model that was enabled before `attach` is enabled as it was."""
    model = tiny_model(num_hidden_layers=2)
    first = distca_hf.DistCAPlugin(tokens_per_rank=32, deterministic=True)
    distca_hf.enable(model, first)
    watch, second = watch_of(model), distca_hf.DistCAPlugin(tokens_per_rank=64)
    trainer = make(model)
    second.attach(trainer)
    assert watch_of(model).context is second
    second.detach(trainer)

    assert watch_of(model) is watch
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    settings = getattr(model.model.layers[1].self_attn, LAYER_SETTINGS)
    assert (settings.deterministic, int(settings.number)) == (True, 1)


def test_adapters_around_the_model_stay(make: Callable[..., Trainer]) -> None:
    model = get_peft_model(
        tiny_model(num_hidden_layers=2), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    )
    trainer, plugin = make(model), distca_hf.DistCAPlugin(tokens_per_rank=64)
    plugin.attach(trainer)
    trainer.train()
    plugin.detach(trainer)
    trainer.train()

    assert watch_of(model) is None
    assert watch_of(model.get_base_model()) is None


# --- refused


def test_trainer_that_was_never_attached_is_refused(make: Callable[..., Trainer]) -> None:
    trainer, plugin = make(), distca_hf.DistCAPlugin(tokens_per_rank=64)
    with pytest.raises(ConfigError, match="nothing is attached to this Trainer"):
        plugin.detach(trainer)
    plugin.attach(trainer)
    plugin.detach(trainer)
    with pytest.raises(ConfigError, match="nothing is attached to this Trainer"):
        plugin.detach(trainer)


@pytest.mark.parametrize("undo", [distca_hf.DistCAPlugin.detach, distca_hf.DistCAPlugin.attach])
def test_method_that_was_replaced_since_is_not_dropped(
    undo: Callable[[distca_hf.DistCAPlugin, Trainer], None], make: Callable[..., Trainer]
) -> None:
    trainer, plugin = make(), distca_hf.DistCAPlugin(tokens_per_rank=64)
    plugin.attach(trainer)
    attached = trainer.train
    trainer.train = lambda *given: attached(*given)
    with pytest.raises(ConfigError, match="train of this Trainer was replaced after"):
        undo(plugin, trainer)
    assert watch_of(trainer.model) is not None, "nothing is undone by half"
    trainer.train = attached
    plugin.detach(trainer)


@pytest.mark.parametrize("undo", [distca_hf.DistCAPlugin.detach, distca_hf.DistCAPlugin.attach])
def test_undoing_in_a_training_is_refused(
    undo: Callable[[distca_hf.DistCAPlugin, Trainer], None], make: Callable[..., Trainer]
) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=64)

    class Undo(TrainerCallback):
        def on_step_end(self, *given: Any, **others: Any) -> None:
            undo(plugin, trainer)

    trainer = make()
    plugin.attach(trainer)
    trainer.add_callback(Undo())
    with pytest.raises(ConfigError, match="this Trainer is at step 1 of a training"):
        trainer.train()
    plugin.detach(trainer)


@pytest.mark.parametrize("loaded", ["sdpa", "eager", "distca"])
@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_attention_is_that_of_loading_again(loaded: str, adapters: bool, make: Callable[..., Trainer]) -> None:
    model: Any = tiny_model(num_hidden_layers=2, implementation=loaded)
    if adapters:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    trainer, plugin = make(model), distca_hf.DistCAPlugin()
    for _ in range(2):  # attached again, it is first detached
        plugin.attach(trainer)
        assert model.config._attn_implementation == "distca"
    plugin.detach(trainer)

    assert model.config._attn_implementation == loaded


def test_attention_that_was_set_after_attach_stays(make: Callable[..., Trainer]) -> None:
    trainer, plugin = make(tiny_model(num_hidden_layers=2, implementation="sdpa")), distca_hf.DistCAPlugin()
    plugin.attach(trainer)
    trainer.model.set_attn_implementation("eager")
    with pytest.raises(distca_hf.PlanError, match="its config now says attn_implementation='eager'"):
        trainer.train()
    plugin.detach(trainer)

    assert trainer.model.config._attn_implementation == "eager"
