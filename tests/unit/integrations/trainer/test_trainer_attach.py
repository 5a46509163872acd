"""Attaching to an unmodified Trainer: what is refused, changed and logged, where training ends and resumes."""

import copy
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import distca_hf
from distca_hf.batches.loader import PlacedLoader
from distca_hf.errors import ConfigError
from distca_hf.patches.attention import attention
from support.data import random_dataset
from support.models import tiny_model
from support.versions import trainer_counts_predicted_tokens


BASIC_METRICS = {"distca/imbalance", "distca/tokens_per_second_per_rank"}  # on CPUs
ALL_METRICS = BASIC_METRICS | {
    "distca/imbalance_before",
    "distca/mbytes_sent_max",
    "distca/plan_ms",
    "distca/loader_wait_ms",
    "distca/wait_ms_max",
    "distca/slowest_rank",
    "distca/tokens_per_second",
    "distca/documents_truncated",
}
SMALL = {"num_hidden_layers": 1}


def attach(trainer: Trainer, **settings: Any) -> PlacedLoader:
    plugin = distca_hf.DistCAPlugin(**{"tokens_per_rank": 192} | settings)
    plugin.attach(trainer)
    return trainer.get_train_dataloader()


def losses(trainer: Trainer) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def record_batches(trainer: Trainer) -> list[dict[str, Any]]:
    """Arguments of every forward pass in training, as they reach the model."""
    seen: list[dict[str, Any]] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            seen.append(kwargs)

    trainer.model.register_forward_pre_hook(record, with_kwargs=True)
    return seen


def record_arguments(trainer: Trainer) -> list[tuple[bool, int]]:
    """Whether labels are counted over all ranks, and the batch size, as callbacks see them in training."""
    seen: list[tuple[bool, int]] = []

    class Record(TrainerCallback):
        def on_train_begin(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
            seen.append((args.average_tokens_across_devices, args.per_device_train_batch_size))

    trainer.add_callback(Record())
    return seen


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[MASK]", "[UNK]"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")), pad_token="[PAD]", mask_token="[MASK]"
    )


def model_that_takes_no_count() -> torch.nn.Module:
    """A model that Trainer does not give the number of labels."""
    model = tiny_model(**SMALL)
    model.accepts_loss_kwargs = False
    return model


class OwnLoss(Trainer):
    """Shifts labels itself, as many subclasses do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        logits = model(**inputs).logits[..., :-1, :]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][..., 1:].flatten())


class OwnLossInTheUsualWords(Trainer):
    """The name of a variable is no use of the batch's shift_labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        shift_logits = model(**inputs).logits[..., :-1, :]
        shift_labels = inputs["labels"][..., 1:]
        return torch.nn.functional.cross_entropy(shift_logits.flatten(0, 1), shift_labels.flatten())


class OwnStep(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = OwnLoss.compute_loss(self, model, inputs)
        loss.backward()
        return loss.detach()


class MoreLoss(Trainer):
    """Adds to Trainer's loss and keeps count of its calls."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().compute_loss(model, inputs, *args, **kwargs)


class MoreOfOwnLoss(OwnLoss):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class LossOfShiftedLabels(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        targets = inputs["shift_labels"].flatten()
        return torch.nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), targets)


def loss_of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits[..., :-1, :].flatten(0, 1), labels[..., 1:].flatten())


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "label smoothing": (lambda: {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
    "own loss": (
        lambda: {"given": {"compute_loss_func": loss_of_logits}},
        "compute_loss_func",
    ),
    "batch size search": (lambda: {"auto_find_batch_size": True}, "auto_find_batch_size"),
    "grouping by length": (
        lambda: {"train_sampling_strategy": "group_by_length"},
        "train_sampling_strategy='group_by_length'",
    ),
    "masking collator": (
        lambda: {"given": {"data_collator": DataCollatorForLanguageModeling(tokenizer(), mlm=True)}},
        r"masks tokens \(mlm\)",
    ),
    "no dataset": (lambda: {"dataset": None}, "no train_dataset"),
    "model that takes no count": (
        lambda: {"model": model_that_takes_no_count()},
        "LlamaForCausalLM takes no num_items_in_batch",
    ),
    "loss of a subclass": (lambda: {"kind": OwnLoss}, r"OwnLoss\.compute_loss replaces Trainer's: .*shift_labels"),
    "loss of a subclass with a variable shift_labels": (
        lambda: {"kind": OwnLossInTheUsualWords},
        "compute_loss replaces Trainer's",
    ),
    "loss of a subclass that another one calls": (lambda: {"kind": MoreOfOwnLoss}, "compute_loss replaces Trainer's"),
    "step of a subclass": (lambda: {"kind": OwnStep}, r"OwnStep\.training_step replaces Trainer's: .*shift_labels"),
    "model made in train()": (
        lambda: {"given": {"model_init": lambda: tiny_model(**SMALL)}},
        "model_init makes another model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_setting_that_would_make_the_loss_wrong_is_refused_by_name(name: str, make: Callable[..., Trainer]) -> None:
    arguments, told = REFUSED[name]
    trainer = make(**arguments())
    with pytest.raises(ConfigError, match=f"distca_hf cannot be attached to this Trainer: .*{told}"):
        attach(trainer)

    assert "get_train_dataloader" not in vars(trainer), "a refused Trainer must be left as it was"
    assert not trainer.model._forward_pre_hooks


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


@functools.cache
def labelled() -> Dataset:
    rows = random_dataset(40)
    return rows.add_column("labels", rows["input_ids"])


# Arguments that keep batches or losses of the user's own, beside those that are refused where batches are placed.
KEPT: dict[str, Callable[[], dict[str, Any]]] = {
    "stream": lambda: {"dataset": labelled().to_iterable_dataset()},
    "list of rows": lambda: {"dataset": list(labelled())},
    "images": lambda: {"dataset": labelled().add_column("image", [None] * 40).cast_column("image", Image())},
    "packs": lambda: {"given": {"data_collator": DataCollatorWithFlattening(return_position_ids=True)}},
    "loader": lambda: {"kind": OwnLoader},
    "collator": lambda: {"given": {"data_collator": lambda rows: default_data_collator(rows)}},
    "evaluation without rows": lambda: {"given": {"eval_dataset": labelled().select([])}},
    **{
        name: REFUSED[name][0]
        for name in REFUSED
        if name in ("label smoothing", "own loss", "model that takes no count", "step of a subclass")
    },
}


@pytest.mark.parametrize("name", KEPT)
def test_batches_and_losses_of_the_user_s_own_are_kept(name: str, make: Callable[..., Trainer]) -> None:
    trained = []
    for implementation in ("sdpa", "distca"):
        arguments = {"dataset": labelled(), "max_steps": 2, "per_device_train_batch_size": 1} | KEPT[name]()
        trainer = make(**arguments)
        trainer.model.set_attn_implementation(implementation)
        if implementation == "distca":
            kept = {part: vars(trainer)[part] for part in ("train_dataset", "data_collator", "args")}
            distca_hf.DistCAPlugin().attach(trainer)
            assert all(vars(trainer)[part] is value for part, value in kept.items())
        trainer.train()
        trained.append(trainer)
    theirs, ours = trained

    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)
    for (parameter, left), right in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(left, right, atol=1e-4), parameter


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda trainer: setattr(trainer.args, "_n_gpu", 2), "DataParallel over 2 GPUs in one process"),
        (lambda trainer: setattr(trainer, "get_cp_size", lambda: 2), "cp_size=2"),
        (lambda trainer: setattr(trainer, "get_sp_size", lambda: 2), "sp_size=2"),
        (lambda trainer: setattr(trainer, "get_tp_size", lambda: 2), "tp_size=2"),
        (
            lambda trainer: setattr(trainer, "compute_loss", OwnLoss.compute_loss.__get__(trainer)),
            r"Trainer\.compute_loss replaces Trainer's",
        ),
    ],
    ids=["data parallelism in one process", "context ranks", "sequence ranks", "tensor ranks", "loss put onto it"],
)
def test_trainer_that_was_set_up_otherwise_is_refused(
    change: Callable[[Trainer], None], told: str, make: Callable[..., Trainer]
) -> None:
    change(trainer := make())
    with pytest.raises(ConfigError, match=told):
        attach(trainer)


def test_subclass_that_calls_trainers_own_loss_is_accepted_and_called(make: Callable[..., Trainer]) -> None:
    plain, more = make(), make(kind=MoreLoss)
    for trainer in (plain, more):
        attach(trainer)
        trainer.train()

    assert more.calls == 4
    assert losses(more) == losses(plain)


def test_subclass_that_uses_shifted_labels_is_accepted(make: Callable[..., Trainer]) -> None:
    plain, own = make(max_steps=1), make(max_steps=1, kind=LossOfShiftedLabels)
    for trainer in (plain, own):
        attach(trainer)
        trainer.train()

    assert losses(own) == pytest.approx(losses(plain), rel=1e-6)


def test_labels_of_a_rank_are_not_counted_under_tensor_parallelism(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers 5.24 divides them by `tp_size`, and losses are so many times as large."""
    monkeypatch.setattr("distca_hf.integrations.trainer.check.tensor_ranks", lambda model: 2)
    with pytest.raises(ConfigError, match=r"average_tokens_across_devices=False with tp_size=2: .* 2 times as large"):
        distca_hf.DistCAPlugin().attach(make(average_tokens_across_devices=False))
    distca_hf.DistCAPlugin().attach(make())
    attach(make(average_tokens_across_devices=False))  # for placed batches it is switched on


def test_models_that_a_trainer_would_wrap_once_more(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer before Transformers 5.19 puts DDP around weights that FSDP2 divides, which fails in torch."""
    check = "distca_hf.integrations.trainer.check"
    monkeypatch.setattr(f"{check}.model_mesh", lambda model: "a mesh")
    monkeypatch.setattr(f"{check}.has_data_and_tensor_mesh", lambda model: False)
    trainer = make()
    attach(trainer)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(
        ConfigError, match=r"was loaded \(DistributedConfig\), and would wrap it in DDP; from 5\.19 on"
    ):
        attach(trainer)


def test_callback_cannot_place_batches(make: Callable[..., Trainer]) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=192)
    with pytest.raises(ConfigError, match=r"tokens_per_rank=192 .* call plugin\.attach\(trainer\) instead"):
        make(given={"callbacks": [distca_hf.DistCACallback(plugin)]})


def test_callback_refuses_a_trainer_that_makes_another_model(make: Callable[..., Trainer]) -> None:
    model = tiny_model(implementation="sdpa", **SMALL)
    with pytest.raises(ConfigError, match="model_init makes another model"):
        make(given={"callbacks": [distca_hf.DistCACallback(distca_hf.DistCAPlugin())], "model_init": lambda: model})
    assert model.config._attn_implementation == "sdpa"


def test_callback_within_another_one_is_refused(make: Callable[..., Trainer]) -> None:
    """Nothing would plan ahead for a Trainer that it does not find, or show its metrics to trackers."""
    ours, model = distca_hf.DistCACallback(distca_hf.DistCAPlugin()), tiny_model(implementation="sdpa", **SMALL)

    class Wrapped(TrainerCallback):
        def on_init_end(self, *event: Any, **kwargs: Any) -> None:
            ours.on_init_end(*event, **kwargs)

    with pytest.raises(ConfigError, match=r"did not find its Trainer; call plugin\.attach\(trainer\) instead"):
        make(model=model, given={"callbacks": [Wrapped()]})
    assert model.config._attn_implementation == "sdpa"


def test_all_refused_settings_are_told_at_once(make: Callable[..., Trainer]) -> None:
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.5.*auto_find_batch_size"):
        attach(make(label_smoothing_factor=0.5, auto_find_batch_size=True))


def test_padding_collators_that_trainer_itself_chooses_are_accepted(make: Callable[..., Trainer]) -> None:
    collators = [
        default_data_collator,
        DataCollatorWithPadding(tokenizer()),
        DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    ]
    for collator in collators:
        attach(make(given={"data_collator": collator}))


def test_counting_labels_over_all_ranks_is_switched_on_with_a_warning(
    make: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(average_tokens_across_devices=False, max_steps=1)
    attach(trainer)
    during = record_arguments(trainer)
    trainer.train()

    assert during == [(True, 1)]
    assert not trainer.args.average_tokens_across_devices
    assert "average_tokens_across_devices is switched on" in caplog.text


def test_predictions_are_not_left_out_without_a_word(
    make: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(given={"eval_dataset": random_dataset(4)})
    attach(trainer, evaluate="distca")
    trainer.evaluate()
    assert "no predictions" not in caplog.text

    assert trainer.predict(random_dataset(4)).predictions is None
    assert "predict returns the loss and no predictions" in caplog.text


@pytest.mark.parametrize(
    ("config", "given", "used", "told"),
    [(True, None, False, 1), (True, True, True, 0), (True, False, False, 0), (False, None, False, 0)],
)
def test_cache_is_not_used_unless_asked_for_and_that_is_told_once(
    config: bool, given: bool | None, used: bool, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "distca_hf")
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=192)
    model = distca_hf.enable(tiny_model(use_cache=config, **SMALL), plugin)
    for _, batch in zip(range(2), plugin.dataloader(random_dataset(10)), strict=False):
        output = model(**batch, **({} if given is None else {"use_cache": given}))
        assert (output.past_key_values is not None) == used
    without_plan = model(input_ids=torch.arange(3, 9)[None]).past_key_values
    assert (without_plan is not None) == config, "without a plan it is used as ever"

    assert caplog.text.count("config.use_cache=True is not followed for batches with a plan") == told


def test_loader_is_the_trainers_and_goes_through_accelerate_untouched(make: Callable[..., Trainer]) -> None:
    trainer = make(seed=11, data_seed=5)
    loader = attach(trainer)

    assert isinstance(loader, PlacedLoader)
    assert trainer.get_train_dataloader() is loader
    assert trainer.accelerator.prepare(loader) is loader
    assert Accelerator(cpu=True).prepare(loader) is loader
    assert loader.state_dict()["seed"] == 5
    assert loader.dataset is trainer.train_dataset
    assert Trainer.get_train_dataloader is type(trainer).get_train_dataloader


class WhatReportersSee(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def metrics_of(logs: list[dict[str, float]]) -> list[set[str]]:
    return [{name for name in log if name.startswith("distca")} for log in logs]


@pytest.mark.parametrize(("metrics", "names"), [("basic", BASIC_METRICS), ("all", ALL_METRICS)])
def test_metrics_are_in_the_history_and_reach_the_reporters(
    metrics: str, names: set[str], make: Callable[..., Trainer]
) -> None:
    reporter = WhatReportersSee()
    trainer = make(given={"callbacks": [reporter]}, logging_steps=2)
    loader = attach(trainer, metrics=metrics)
    trainer.train()
    steps = [log for log in trainer.state.log_history if "loss" in log]

    assert [log["step"] for log in steps] == [2, 4]
    assert metrics_of(steps) == [names, names]
    assert metrics_of(reporter.logs) == [names, names, set()]
    if metrics == "all":
        assert all(log["distca/imbalance"] == log["distca/imbalance_before"] == 1.0 for log in steps)
        assert all(log["distca/plan_ms"] > 0 for log in steps)
        assert sum(2 * log["distca/plan_ms"] for log in steps) == pytest.approx(1e3 * loader.times.plan_seconds)


@pytest.mark.parametrize("multiple", [1, 128])
def test_tokens_that_are_not_padding_are_counted(multiple: int, make: Callable[..., Trainer]) -> None:
    """The pad token ends documents, too; rows of three documents have padding only with the larger multiple."""
    rows = Dataset.from_dict({"input_ids": [[*range(3, 22), tokenizer().pad_token_id]] * 3})
    arguments = {"max_steps": 2, "include_num_input_tokens_seen": "non_padding"}
    trainer = make(rows, given={"processing_class": tokenizer()}, **arguments)
    attach(trainer, pad_to_multiple_of=multiple)
    trainer.train()

    assert trainer.state.num_input_tokens_seen == 2 * 60


def test_metrics_report_truncated_documents(make: Callable[..., Trainer]) -> None:
    trainer = make(Dataset.from_dict({"input_ids": [[1] * 300, [2] * 20, [3] * 200]}), max_steps=1)
    attach(trainer, overlong="truncate", metrics="all")
    trainer.train()

    assert trainer.state.log_history[0]["distca/documents_truncated"] == 2.0


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("end", [{"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 2}])
def test_training_ends_where_it_should(make: Callable[..., Trainer], accumulation: int, end: dict[str, int]) -> None:
    trainer = make(gradient_accumulation_steps=accumulation, **end)
    loader, seen = attach(trainer), record_batches(trainer)
    per_epoch = -(-len(loader) // accumulation)
    steps = end["max_steps"] if end["max_steps"] > 0 else 2 * per_epoch
    trainer.train()

    assert len(loader) % 3, "an epoch must end with a short window"
    assert trainer.state.global_step == trainer.state.max_steps == steps == len(losses(trainer))
    epochs, rest = divmod(steps, per_epoch)
    assert len(seen) == epochs * len(loader) + rest * accumulation
    assert trainer.state.epoch == pytest.approx(epochs + rest * accumulation / len(loader))


def test_micro_batches_are_those_of_the_loader_epoch_after_epoch(make: Callable[..., Trainer]) -> None:
    dataset = random_dataset(20)
    trainer = make(dataset, max_steps=-1, num_train_epochs=3, seed=3)
    attach(trainer)
    seen = record_batches(trainer)
    trainer.train()
    loader = distca_hf.DistCAPlugin(tokens_per_rank=192).dataloader(dataset, seed=3)
    expected = [batch["input_ids"] for _ in range(3) for batch in loader]

    assert all(torch.equal(kwargs["input_ids"], ids) for kwargs, ids in zip(seen, expected, strict=True))


def uneven_labels() -> Dataset:
    """Documents of which some are learnt wholly, some in part and some not at all."""
    dataset = random_dataset(60)
    masks = [[int(at % 5 >= row % 6) for at in range(len(ids))] for row, ids in enumerate(dataset["input_ids"])]
    return dataset.add_column("completion_mask", masks)


def test_window_without_any_label_has_loss_zero_and_changes_nothing(make: Callable[..., Trainer]) -> None:
    dataset = random_dataset(40)
    dataset = dataset.add_column("completion_mask", [[0] * len(ids) for ids in dataset["input_ids"]])
    settings = {"gradient_accumulation_steps": 3, "logging_nan_inf_filter": False, "max_steps": 2}
    trainer = make(dataset, weight_decay=0.0, **settings)
    before = copy.deepcopy(trainer.model.state_dict())
    attach(trainer)
    trainer.train()

    assert losses(trainer) == [0.0, 0.0]
    assert [log["grad_norm"] for log in trainer.state.log_history if "loss" in log] == [0.0, 0.0]
    for name, parameter in trainer.model.state_dict().items():
        assert torch.equal(parameter, before[name]), name


def test_loss_of_a_window_is_the_mean_over_its_labels(make: Callable[..., Trainer]) -> None:
    trainer = make(uneven_labels(), gradient_accumulation_steps=3, max_steps=1)
    loader = attach(trainer)
    model = copy.deepcopy(trainer.model).eval()
    model.set_attn_implementation("sdpa")
    total, labels = 0.0, 0
    for at in range(3):
        for document in loader.documents(0, at):
            count = int((document.shift_labels != -100).sum())
            ids, targets = (torch.from_numpy(x)[None] for x in (document.input_ids, document.labels))
            if count:
                total += model(input_ids=ids, labels=targets, num_items_in_batch=1, use_cache=False).loss.item()
            labels += count
    trainer.train()

    assert losses(trainer) == pytest.approx([total / labels], rel=1e-5)


@trainer_counts_predicted_tokens
def test_evaluation_during_training_is_the_trainers_own(make: Callable[..., Trainer]) -> None:
    rows = Dataset.from_dict({"input_ids": [[3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14]]})
    rows = rows.add_column("labels", rows["input_ids"])
    trainer = make(
        given={"eval_dataset": rows}, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2, max_steps=2
    )
    attach(trainer)
    trainer.train()
    (evaluated,) = (log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log)
    plain = tiny_model(implementation="sdpa", **SMALL).eval()
    plain.load_state_dict(trainer.model.state_dict())
    ids = torch.tensor(rows["input_ids"])
    batches = [plain(ids[:2], labels=ids[:2]).loss.item()] * 2 + [plain(ids[2:], labels=ids[2:]).loss.item()]

    assert evaluated == pytest.approx(sum(batches) / 3, rel=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_evaluation_has_the_loss_of_sdpa(make: Callable[..., Trainer], side: str) -> None:
    rows = Dataset.from_dict({"input_ids": [list(range(3, 3 + tokens)) for tokens in (4, 9, 20, 7, 2, 11, 5)]})
    padding = tokenizer()
    padding.padding_side = side
    collator = DataCollatorForLanguageModeling(padding, mlm=False)
    arguments = {"given": {"eval_dataset": rows, "data_collator": collator}, "per_device_eval_batch_size": 3}
    ours = make(**arguments)
    theirs = make(model=tiny_model(implementation="sdpa", **SMALL), **arguments)
    attach(ours)
    ours.train()
    theirs.model.load_state_dict(ours.model.state_dict())

    assert collator(list(rows)[:3])["attention_mask"].sum(1).tolist() == [4, 9, 20]
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)


def test_resuming_with_other_micro_batches_does_not_go_unnoticed(
    make: Callable[..., Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps are not what they were."""
    whole = make(save_strategy="steps", save_steps=1, max_steps=3)
    attach(whole)
    whole.train()
    resumed = make(max_steps=5)
    attach(resumed, tokens_per_rank=400)
    caplog.clear()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))

    assert "micro-batches held 192 tokens when the position was saved and hold 400 now" in caplog.text


def test_saved_model_opens_without_distca(make: Callable[..., Trainer], tmp_path: Path) -> None:
    """Nothing in its configuration names it, and attention is that of Transformers."""
    trainer = make(max_steps=2)
    attach(trainer)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    opened, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval(), torch.arange(3, 40)[None]

    assert opened.config._attn_implementation == "sdpa"
    assert "distca" not in (tmp_path / "model" / "config.json").read_text()
    torch.testing.assert_close(opened(ids).logits, trainer.model.eval()(ids).logits, rtol=0, atol=1e-5)


def test_attention_patch_registers_attention_and_mask_and_can_be_undone() -> None:
    try:
        attention.revert()
        assert "distca" not in AttentionInterface()
        assert "distca" not in AttentionMaskInterface()
        with pytest.raises(ValueError, match="distca"):
            tiny_model()
        attention.revert()
    finally:
        attention.apply()
    assert "distca" in AttentionInterface()
    assert "distca" in AttentionMaskInterface()
