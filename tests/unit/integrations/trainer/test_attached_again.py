"""Attaching to one Trainer again, changing it afterwards, and Trainers whose own data would be left out."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader, SequentialSampler
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

import distca_hf
from distca_hf.errors import ConfigError, PackingError
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.trainer.callback import DistCACallback
from distca_hf.integrations.trainer.resuming import LOADER_STATE
from support.data import random_dataset
from support.models import tiny_model
from support.versions import trainer_counts_predicted_tokens


TOKENS = 192
END = 1  # of every document, and the pad token


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({str(number): number for number in range(128)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=str(END), pad_token=str(END))


def attach(trainer: Trainer, **settings: Any) -> distca_hf.DistCAPlugin:
    plugin = distca_hf.DistCAPlugin(**{"tokens_per_rank": TOKENS} | settings)
    plugin.attach(trainer)
    return plugin


def keep_batches(trainer: Trainer, **settings: Any) -> None:
    distca_hf.DistCAPlugin(**settings).attach(trainer)


def positions(trainer: Trainer) -> list[int]:
    """Micro-batches of the epoch that were taken, as saved after each step."""
    seen: list[int] = []

    class Record(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            seen.append(state.stateful_callbacks[LOADER_STATE]["micro_batch"])

    trainer.add_callback(Record())
    return seen


# --- attaching again


@pytest.mark.parametrize("times", [1, 3])
def test_saved_position_is_that_of_the_batches_that_train(make: Callable[..., Trainer], times: int) -> None:
    trainer = make()
    for _ in range(times):
        attach(trainer)
    seen = positions(trainer)
    trainer.train()

    assert seen == [1, 2, 3, 4]
    assert sum(isinstance(callback, DistCACallback) for callback in trainer.callback_handler.callbacks) == 1


def test_the_last_plugin_counts(make: Callable[..., Trainer]) -> None:
    trainer = make()
    attach(trainer)
    last = attach(trainer, tokens_per_rank=300)

    assert len(trainer.get_train_dataloader()) == len(last.dataloader(random_dataset(40)))
    assert watch_of(trainer.model).context is last
    trainer.train()


@pytest.mark.parametrize("way", ["attach", "callback"])
def test_loader_of_a_training_that_raised_is_as_it_was(make: Callable[..., Trainer], way: str) -> None:
    callbacks = [DistCACallback(distca_hf.DistCAPlugin())] if way == "callback" else []
    trainer = make(given={"callbacks": callbacks})
    loader = trainer.get_train_dataloader()
    inner = getattr(loader, "base_dataloader", loader)
    before, during = inner.collate_fn, list[object]()

    def fail(*arguments: object, **keywords: object) -> None:
        during.append(inner.collate_fn)
        raise ValueError("this step fails")

    trainer.get_train_dataloader = lambda: loader
    trainer.training_step = fail
    if way == "attach":
        keep_batches(trainer)
    with pytest.raises(ValueError, match="this step fails"):
        trainer.train()

    assert during != [before], "batches are read where they are collated"
    assert inner.collate_fn is before


def test_attaching_that_fails_leaves_the_trainer_as_it_was(make: Callable[..., Trainer]) -> None:
    trainer = make(Dataset.from_dict({"input_ids": [[3] * (TOKENS + 1)]}))
    before = dict(vars(trainer)), list(trainer.callback_handler.callbacks)
    with pytest.raises(PackingError, match="has 193 tokens"):
        attach(trainer)

    assert (dict(vars(trainer)), trainer.callback_handler.callbacks) == before


# --- changes after attaching


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda trainer: setattr(trainer, "train_dataset", random_dataset(10)),
            "train_dataset of this Trainer changed",
        ),
        (lambda trainer: setattr(trainer, "data_collator", DataCollatorWithFlattening()), "data_collator of this"),
        (lambda trainer: setattr(trainer, "compute_loss_func", lambda *given: None), "compute_loss_func of this"),
        (lambda trainer: setattr(trainer.args, "gradient_accumulation_steps", 3), r"steps \(from 1 to 3\)"),
        (lambda trainer: setattr(trainer.args, "seed", 9), r"args.seed \(from 42 to 9\)"),
        (lambda trainer: setattr(trainer.args, "label_smoothing_factor", 0.1), "args.label_smoothing_factor"),
    ],
)
def test_trainer_that_changed_since_does_not_train(
    change: Callable[[Trainer], None], named: str, make: Callable[..., Trainer]
) -> None:
    trainer = make()
    attach(trainer)
    change(trainer)
    with pytest.raises(ConfigError, match=f"{named}.*attach.* again"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("implementation", ["sdpa", "distca"])
def test_model_that_changed_since_does_not_train(implementation: str, make: Callable[..., Trainer]) -> None:
    trainer = make()
    attach(trainer)
    trainer.model = tiny_model(implementation=implementation, num_hidden_layers=1)

    with pytest.raises(ConfigError, match=r"LlamaForCausalLM is not enabled.*plugin\.attach\(trainer\) again"):
        trainer.train()


def test_adapters_that_come_after_attaching_train(make: Callable[..., Trainer]) -> None:
    trainer = make()
    attach(trainer)
    trainer.model = get_peft_model(trainer.model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    trainer.train()

    assert watch_of(trainer.model.get_base_model()) is not None
    assert trainer.state.global_step == 4


# --- data of the Trainer's own that would be left out


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, collate_fn=default_data_collator)


class OwnSampler(Trainer):
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


class SuperLoader(Trainer):
    """What a subclass does to Trainer's loader would not be done to ours."""

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (OwnLoader, "OwnLoader.get_train_dataloader replaces"),
        (OwnSampler, "OwnSampler._get_train_sampler replaces"),
        (SuperLoader, "SuperLoader.get_train_dataloader replaces"),
        (Trainer, "Trainer.get_train_dataloader replaces"),
    ],
)
def test_trainer_that_chooses_its_own_data_is_refused(
    kind: type[Trainer], named: str, make: Callable[..., Trainer]
) -> None:
    trainer = make(kind=kind)
    if kind is Trainer:  # the method of the instance counts
        trainer.get_train_dataloader = lambda: DataLoader(trainer.train_dataset)
    with pytest.raises(ConfigError, match=named):
        attach(trainer)


def first_tokens(trainer: Trainer) -> list[list[int]]:
    """First tokens of the documents of every micro-batch that is trained on, in the order of the rows."""
    seen: list[list[int]] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begins = (kwargs["position_ids"] == 0) & (kwargs["attention_mask"] == 1)
        seen.append(sorted(kwargs["input_ids"][begins].tolist()))

    trainer.model.register_forward_pre_hook(record, with_kwargs=True)
    return seen


@pytest.mark.parametrize("accumulation", [1, 2])
def test_order_of_the_dataset_is_followed_and_resumed(
    accumulation: int, make: Callable[..., Trainer], tmp_path: Path
) -> None:
    """A curriculum: short documents first."""
    rows = Dataset.from_dict({"input_ids": [[3 + row] * (40 + row) for row in range(30)]})
    settings = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": accumulation, "max_steps": -1}
    whole = make(rows, **settings, num_train_epochs=2, save_strategy="steps", save_steps=1)
    attach(whole)
    seen = first_tokens(whole)
    whole.train()
    resumed = make(rows, **settings, num_train_epochs=2)
    attach(resumed)
    rest = first_tokens(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    per_epoch = len(seen) // 2
    steps = [chain.from_iterable(seen[at : at + accumulation]) for at in range(0, per_epoch, accumulation)]

    assert per_epoch > 5
    assert list(chain.from_iterable(map(sorted, steps))) == list(range(3, 33))
    assert seen[per_epoch:] == seen[:per_epoch]
    assert rest == seen[3 * accumulation :]


# --- labels


def documents_that_end(count: int = 12) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    return Dataset.from_dict(
        {"input_ids": [[*torch.randint(3, 128, (5,), generator=generator).tolist(), END] for _ in range(count)]}
    )


def loss_of_everything(
    make: Callable[..., Trainer], collator: Any, distca: bool, dataset: Dataset, **arguments: Any
) -> tuple[float, float]:
    arguments = {"max_steps": 1, "per_device_train_batch_size": len(dataset)} | arguments
    trainer = make(dataset, given={"data_collator": collator}, **arguments)
    if distca:
        attach(trainer, tokens_per_rank=1024)
    else:
        trainer.model.set_attn_implementation("sdpa")
    trainer.train()
    log = trainer.state.log_history[0]
    return log["loss"], float(log["grad_norm"])


COLLATORS = {
    "language modeling": DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    "seq2seq": DataCollatorForSeq2Seq(tokenizer()),
    "default": default_data_collator,
}
MASK = {"completion_mask": [0, 0, 0, 1, 1, 1], "assistant_masks": [1, 1, 0, 0, 0, 1]}
KINDS = [0, 1, 0, 1, 1, 0]
# A collator, columns of every row, and what the log says.
SHOWN: dict[str, tuple[str, dict[str, Any], str]] = {
    "no labels": ("language modeling", {}, ""),
    "a mask": ("language modeling", MASK, "completion_mask and assistant_masks: not followed"),
    "labels": ("seq2seq", {"labels": [-100, 5, 6, 7, -100, 1]}, ""),
    "labels and masks": ("seq2seq", {"labels": [3, 4, 5, -100, 6, 7]} | MASK, "not followed"),
    "columns that no model takes": (
        "default",
        {"labels": [3, 4, 5, -100, 6, 7], "weight": 0.5, "token_type_ids": KINDS, "length": 7, "text": "a"},
        "",
    ),
}


@trainer_counts_predicted_tokens
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "stored") for name in SHOWN),
        *(("a mask", "hidden"), ("columns that no model takes", "hidden")),
        *(("no labels", "made"), ("labels and masks", "made")),
    ],
)
def test_labels_are_those_of_the_trainer_alone(
    name: str, kind: str, make: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    """A pad token that ends documents is not learnt with one collator, and is with others. Nobody knows masks."""
    collator, columns, told = SHOWN[name]
    dataset, arguments = documents_that_end(), {}
    for column, value in columns.items():
        dataset = dataset.add_column(column, [value] * len(dataset))
    if kind == "hidden":
        dataset.set_format("numpy", columns=["input_ids", *columns.keys() & {"labels"}])
        arguments, told = {"remove_unused_columns": False}, told and ""
    if kind == "made":  # a Trainer alone gives a transform the columns that the model takes, and removes no other one
        taken = dataset.select_columns(["input_ids", *columns.keys() & {"labels"}])
        dataset = taken.add_column("length", [6] * len(taken)).with_transform(
            lambda rows: (
                {name: rows[name] for name in ("input_ids", "labels") if name in rows}
                | {name: [value] * len(rows["input_ids"]) for name, value in columns.items() if name in MASK}
            )
        )
        arguments = {"remove_unused_columns": False}
    ours = loss_of_everything(make, COLLATORS[collator], True, dataset, **arguments)

    assert ours == pytest.approx(loss_of_everything(make, COLLATORS[collator], False, dataset, **arguments), abs=1e-5)
    assert told in caplog.text
    assert (", as the Trainer itself does not" in caplog.text) == bool(told)


def test_masks_decide_where_a_trainer_alone_has_no_labels(
    make: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = documents_that_end()
    for column, value in MASK.items():
        dataset = dataset.add_column(column, [value] * len(dataset))
    labels = [[*[-100] * 5, row[5]] for row in dataset["input_ids"]]
    ours = loss_of_everything(make, COLLATORS["seq2seq"], True, dataset)
    dataset = dataset.add_column("labels", labels)

    assert ours == pytest.approx(loss_of_everything(make, COLLATORS["seq2seq"], False, dataset), abs=1e-5)
    assert "completion_mask and assistant_masks: tokens with 0 there are not learnt" in caplog.text


@pytest.mark.parametrize("made", [False, True])
def test_inputs_that_the_model_takes_for_every_token_are_placed(made: bool, make: Callable[..., Trainer]) -> None:
    """GPT-2 adds an embedding of each token's kind."""
    dataset = documents_that_end()
    labels = [[-100, *row[1:]] for row in dataset["input_ids"]]  # Trainer counts first labels of this class, too
    dataset = dataset.add_column("labels", labels).add_column("token_type_ids", [KINDS] * len(dataset))
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 128, "n_positions": 64}
    config = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **sizes)

    def loss(distca: bool, rows: Dataset) -> tuple[float, float]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel._from_config(config, attn_implementation="distca")
        arguments = {"model": model, "remove_unused_columns": not made}
        return loss_of_everything(make, COLLATORS["default"], distca, rows, **arguments)

    shown = dataset
    if made:
        shown = dataset.add_column("length", [6] * len(dataset)).with_transform(
            lambda rows: {name: rows[name] for name in ("input_ids", "labels", "token_type_ids")}
        )
    ours = loss(True, shown)

    assert ours == pytest.approx(loss(False, shown), abs=1e-5)
    assert ours[0] != pytest.approx(loss(False, dataset.remove_columns("token_type_ids"))[0], abs=1e-3)


class OfAKnownOne(DataCollatorForLanguageModeling):
    """Makes something of labels that nobody knows."""


@pytest.mark.parametrize(
    ("collator", "columns", "named"),
    [
        (lambda: DataCollatorForTokenClassification(tokenizer()), {}, "would not be called"),
        (lambda: lambda rows: default_data_collator(rows), {}, "<lambda> would not be called"),
        (lambda: OfAKnownOne(tokenizer(), mlm=False), {}, "OfAKnownOne would not be called"),
        (
            lambda: DataCollatorForLanguageModeling(tokenizer(), mlm=False),
            {"labels": [[3, 4]] * 4},
            "column 'labels' is ignored by its data collator DataCollatorForLanguageModeling",
        ),
        (lambda: default_data_collator, {"label_ids": [[3, 4]] * 4}, "column 'label_ids' would be its labels"),
    ],
)
def test_collator_that_makes_other_labels_is_refused(
    collator: Callable[[], Any], columns: dict[str, Any], named: str, make: Callable[..., Trainer]
) -> None:
    dataset = Dataset.from_dict({"input_ids": [[3, 4]] * 4, **columns})
    with pytest.raises(ConfigError, match=named):
        attach(make(dataset, given={"data_collator": collator()}))


def test_settings_of_placed_batches_are_told_once_where_batches_are_kept(
    make: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    keep_batches(make())
    assert "no effect" not in caplog.text
    keep_batches(make(), regroup_steps=False, prefetch=3)
    keep_batches(make(), skip_bad_rows=True, stream_buffer_tokens=9)
    make(given={"callbacks": [DistCACallback(distca_hf.DistCAPlugin(overlong="split"))]})
    told = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]

    assert told == [
        f"{settings}: no effect without tokens_per_rank, because the Trainer makes its own batches. Leave it out, or "
        "give tokens_per_rank for placed batches"
        for settings in (
            "regroup_steps=False, prefetch=3",
            "stream_buffer_tokens=9, skip_bad_rows=True",
            "overlong='split'",
        )
    ]


def test_settings_of_streams_are_told_where_the_dataset_is_none(
    make: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    attach(make())
    assert "not a stream" not in caplog.text
    attach(make(), skip_bad_rows=True)
    assert "skip_bad_rows=True: no effect, because train_dataset is not a stream. Leave it out" in caplog.text


# --- evaluation


@pytest.mark.parametrize("ids", [[], [[3] * 7]], ids=["no rows", "no labels"])
def test_evaluation_that_is_not_due_is_refused_as_well_and_so_is_a_dataset_that_comes_later(
    ids: list[list[int]], make: Callable[..., Trainer]
) -> None:
    good = Dataset.from_dict({"input_ids": [[3] * 7], "labels": [[3] * 7]})
    wrong = Dataset.from_dict({"input_ids": ids})
    reason = "makes no 'labels'" if ids else "has no rows"
    with pytest.raises(ConfigError, match=f"the evaluation dataset 'short' cannot be evaluated: .*{reason}"):
        attach(make(given={"eval_dataset": {"short": wrong}}))
    trainer = make(given={"eval_dataset": good})
    attach(trainer)
    with pytest.raises(ConfigError, match=f"the evaluation dataset cannot be evaluated: .*{reason}"):
        trainer.evaluate(wrong)
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("how", ["collator", "one by one", "distca"])
def test_evaluation_that_works_is_accepted(how: str, make: Callable[..., Trainer]) -> None:
    rows = Dataset.from_dict({"input_ids": [[3] * 41, [3] * 7], "labels": [[3] * 41, [3] * 7]})
    trainer = make(
        given={"eval_dataset": rows}
        | ({"data_collator": DataCollatorForSeq2Seq(tokenizer())} if how == "collator" else {}),
        dataset=rows,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=1,
        per_device_eval_batch_size=1 if how == "one by one" else 2,
    )
    attach(trainer, **({"evaluate": "distca"} if how == "distca" else {}))
    trainer.train()

    assert any("eval_loss" in log for log in trainer.state.log_history)


# --- forgetting, and settings without effect


def test_callback_that_comes_late_is_refused(make: Callable[..., Trainer]) -> None:
    trainer = make()
    trainer.add_callback(DistCACallback(distca_hf.DistCAPlugin()))
    with pytest.raises(ConfigError, match="came too late to enable the model"):
        trainer.train()


def test_model_that_follows_another_plugin_is_refused(make: Callable[..., Trainer]) -> None:
    trainer = make()
    keep_batches(trainer)
    distca_hf.enable(trainer.model, distca_hf.DistCAPlugin())
    with pytest.raises(ConfigError, match="was enabled with another plugin"):
        trainer.train()


class Tracker(TrainerCallback):
    """Stands for callbacks that report logs."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs or {}))


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> list[Tracker]:
    """What Trainer puts before the callbacks of the user."""
    made: list[Tracker] = []

    def integrations(report_to: Any) -> list[Any]:
        made.append(Tracker())
        return [made[-1]]

    monkeypatch.setattr("transformers.trainer.get_reporting_integration_callbacks", integrations)
    return made


def test_callback_alone_comes_before_trackers_and_leaves_last(
    make: Callable[..., Trainer], trackers: list[Tracker]
) -> None:
    trainer = make(given={"callbacks": [DistCACallback(distca_hf.DistCAPlugin())]})
    names = [type(each).__name__ for each in trainer.callback_handler.callbacks]

    assert (names[0], names[-1]) == ("DistCACallback", "LeaveOnSignal")
    assert names.count("DistCACallback") == names.count("LeaveOnSignal") == 1
    assert trackers[0] in trainer.callback_handler.callbacks
