"""What newcomers get wrong: each mistake is answered in at most four lines of a terminal, with what is wrong, where,
and what to do. Mistakes that take two ranks are in `faults/test_mistakes_on_ranks.py`."""

import dataclasses
import logging
import math
import signal
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DataCollatorWithFlattening,
    FalconConfig,
    MambaConfig,
    MistralConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import distca_hf
from distca_hf.errors import DistCAError
from distca_hf.integrations.trainer.callback import DistCACallback
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.kernels.registry import KERNELS, Operands, choose_kernel
from support.commands import REPOSITORY
from support.data import random_dataset
from support.models import tiny_config, tiny_model
from support.training import quiet_arguments
from support.versions import classes_of_today


Make = Callable[..., Trainer]

TOKENS = 192
COLUMNS, LINES = 80, 4
HOPPER = Operands("cuda", 9, torch.bfloat16, 8, 8, 128, 128)
SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a Trainer of a tiny model: its dataset, its model, what else it is given, and its arguments."""

    def make(dataset: Any = None, model: Any = None, given: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
        args = quiet_arguments(tmp_path / "run", **{"max_steps": 2, "use_cpu": True} | arguments)
        return Trainer(
            model=tiny_model(num_hidden_layers=1) if model is None else model,
            args=TrainingArguments(**args),
            train_dataset=random_dataset(40) if dataset is None else dataset,
            **given or {},
        )

    return make


def attach(trainer: Trainer, **settings: Any) -> Trainer:
    distca_hf.DistCAPlugin(**{"tokens_per_rank": TOKENS} | settings).attach(trainer)
    return trainer


def rows(*lengths: int, **columns: Any) -> Dataset:
    """Documents of these lengths."""
    return Dataset.from_dict({"input_ids": [[3] * length for length in lengths], **columns})


def model_of(config: Any) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(config, attn_implementation="distca")


# --- mistakes, each made as a newcomer makes it


def loop_without_enable(make: Make) -> None:
    loader = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS).dataloader(random_dataset(40))
    tiny_model()(**next(iter(loader)))


def stream(make: Make) -> None:
    class Unsaved(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            yield {"input_ids": [1, 2]}

    attach(make(Unsaved()))


def texts(make: Make) -> None:
    attach(make(Dataset.from_dict({"text": ["a"]})))


def columns(make: Make, **columns: Any) -> None:
    attach(make(rows(3, 4, **columns), remove_unused_columns=False)).train()


def positions_of_several_documents(make: Make) -> None:
    dataset = Dataset.from_dict({"length": [4, 4], "positions": [[0, 1, 2, 3], [0, 1, 0, 1]]}).with_transform(
        lambda batch: {"input_ids": [[3] * 4], "position_ids": batch["positions"]}
    )
    attach(make(dataset)).train()


def other_draws(make: Make) -> None:
    generator = torch.Generator()
    dataset = Dataset.from_dict({"length": [40, 40]}).with_transform(
        lambda batch: {"input_ids": [torch.randint(3, 9, (40,), generator=generator)]}
    )
    attach(make(dataset)).train()


def padding_without_a_mask(make: Make) -> None:
    padded = [[*range(3, 9 - row), *[0] * (7 + row)] for row in range(3)]
    attach(make(Dataset.from_dict({"input_ids": padded}))).train()


def refused_model(config: Any, make: Make) -> None:
    attach(make(model=model_of(config)))


def rope_of_batches(make: Make) -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    refused_model(tiny_config("llama", rope_parameters=parameters), make)


def callback_and_attach(make: Make) -> None:
    plugin = distca_hf.DistCAPlugin()
    plugin.attach(make(given={"callbacks": [DistCACallback(plugin)]}))


def several_gpus_in_one_process(make: Make) -> None:
    trainer = make()
    trainer.args._n_gpu = 2
    attach(trainer)


def resume_from_another_training(make: Make) -> None:
    plain = make(rows(5, 9, labels=[[3] * 5, [3] * 9]), save_strategy="steps", save_steps=1, max_steps=1)
    plain.train()
    attach(make()).train(resume_from_checkpoint=True)


def evaluation_that_does_not_pad(make: Make) -> None:
    dataset = rows(41, 57, labels=[[3] * 41, [3] * 57])
    attach(make(given={"eval_dataset": dataset}, eval_strategy="steps", per_device_eval_batch_size=8))


def evaluation_on_texts(make: Make) -> None:
    texts = Dataset.from_dict({"text": ["a text"]})
    attach(make(given={"eval_dataset": {"held out": texts}}, eval_strategy="steps"), evaluate="distca")


class Interrupt(TrainerCallback):
    """Ctrl-C in the first step."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGINT)


def keyboard_interrupt(make: Make) -> None:
    trainer = attach(make())
    trainer.callback_handler.callbacks.insert(0, Interrupt())
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in background ignore it
    try:
        with pytest.raises(SystemExit):
            trainer.train()
    finally:
        signal.signal(signal.SIGINT, earlier)


# What is wrong, where, what to do; numbers are those of the study of newcomers.
TOLD: dict[str, tuple[Callable[[Make], None], str, str, str]] = {
    "04 enable is forgotten": (
        loop_without_enable,
        "a model that was not enabled, or in a layer that is new since then: its loss would be wrong",
        "a batch with a plan",
        "Call distca_hf.enable(model, plugin) before",
    ),
    "06 a collator of one's own": (
        lambda make: attach(make(given={"data_collator": lambda documents: documents})),
        "would not be called",
        "its data collator",
        "Leave that out, which keeps the collator",
    ),
    "07 a batch size": (
        lambda make: attach(make(per_device_train_batch_size=4)),
        "has no effect",
        "per_device_train_batch_size=4",
        "tokens_per_rank=192",
    ),
    "08 a stream": (
        stream,
        "a stream whose position cannot be saved",
        "Unsaved",
        "Give a datasets.IterableDataset",
    ),
    "09 a list": (
        lambda make: attach(make([{"input_ids": [1, 2]}])),
        "expected a tokenised datasets.Dataset",
        "not list",
        "datasets.Dataset.from_list",
    ),
    "09 a dataset of torch": (
        lambda make: attach(make(torch.utils.data.TensorDataset(torch.ones(3)))),
        "expected a tokenised datasets.Dataset",
        "not TensorDataset",
        "from_generator make one",
    ),
    "10 texts": (texts, "no column 'input_ids', only ['text']", "the dataset", "distca examples tokenise_texts"),
    "36 classes of texts": (
        partial(columns, label=[0, 1]),
        "holds one label per row, as for classifying texts",
        "the dataset's column 'label'",
        "Leave tokens_per_rank out",
    ),
    "36 numbers of classes": (
        partial(columns, labels=[0, 1]),
        "holds one label per row, as for classifying texts",
        "column 'labels'",
        "Leave tokens_per_rank out",
    ),
    "37 a weight for each row": (
        partial(columns, weight=[0.5, 1.0]),
        "holds numbers that a loss may need",
        "column 'weight'",
        "dataset.remove_columns(['weight'])",
    ),
    "38 another tokenizer": (
        partial(columns, labels=[[3, 1 << 40, 3], [3] * 4]),
        "1099511627776 at token 1",
        "row 0: labels",
        "Tokenise with the tokenizer of the model",
    ),
    "39 rows that hold several documents": (
        positions_of_several_documents,
        "position_ids is 0 at token 2",
        "row 1",
        "give their lengths in a column 'seq_lengths'",
    ),
    "40 a generator of one's own": (
        other_draws,
        "gives other 'input_ids' when it makes the row again",
        "row 1: the dataset's transform",
        "draw from random, numpy.random or torch",
    ),
    "41 padding that no mask names": (
        padding_without_a_mask,
        "documents that were looked at end in a run of token 0",
        "(row 2: 9 of them)",
        "tokenise without padding",
    ),
    "42 an empty dataset": (
        lambda make: attach(make(Dataset.from_dict({"input_ids": []}))),
        "is empty",
        "the dataset",
        "Look at what filtered it",
    ),
    "43 packs and tokens_per_rank": (
        lambda make: attach(make(given={"data_collator": DataCollatorWithFlattening()})),
        "DataCollatorWithFlattening packs its batches",
        f"tokens_per_rank={TOKENS} asks for placed batches",
        "Leave tokens_per_rank out",
    ),
    "11 nothing to learn": (
        lambda make: attach(make(rows(3, 3, labels=[[-100] * 3] * 2))).train(),
        "no label to learn",
        "micro-batch 0",
        "look at the dataset's labels and masks",
    ),
    "12 labels of other tokens": (
        lambda make: attach(make(rows(41, labels=[[3] * 40]))),
        "has 40 values for 41 tokens of input_ids",
        "row 0: column 'labels'",
        "make it of the same tokens, or remove it",
    ),
    "13 padded rows": (
        lambda make: attach(make(rows(5, 5, attention_mask=[[1] * 5, [1, 1, 1, 0, 0]]))).train(),
        "the dataset is padded",
        "row 1: attention_mask is 0 at token 3",
        "Tokenise it without padding",
    ),
    "14 an empty window": (
        partial(refused_model, MistralConfig(**SMALL, sliding_window=0)),
        "sliding window 0",
        "MistralForCausalLM: sliding window 0 (model.layers.0.self_attn) holds no token",
        "1 is the shortest",
    ),
    "14 Mamba": (
        partial(refused_model, MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=9)),
        "none of its layers looks attention up by name",
        "MambaForCausalLM",
        "Else train it without distca_hf",
    ),
    "14 Bloom": (
        partial(refused_model, BloomConfig(vocab_size=128, hidden_size=32, n_layer=1, n_head=2)),
        "it would ignore attn_implementation",
        "BloomForCausalLM",
        "Else train it without distca_hf",
    ),
    "14 dynamic RoPE": (
        rope_of_batches,
        "its rotary frequencies (rope_type 'dynamic') change",
        "LlamaForCausalLM",
        "use 'yarn' or 'default'",
    ),
    "15 a document that is too long": (
        lambda make: attach(make(rows(5, 500, 300))),
        "has 500 tokens, all data ranks together hold 192 (and 1 more like it)",
        "document 1 (row 1)",
        "Raise ranks x tokens_per_rank to 500",
    ),
    "16 callback and attach": (
        callback_and_attach,
        "attach brings one",
        "DistCACallback",
        "leave it out of callbacks",
    ),
    "20 several GPUs in one process": (
        several_gpus_in_one_process,
        "DataParallel over 2 GPUs in one process",
        "this Trainer",
        "launch one process per GPU: torchrun --nproc-per-node 2",
    ),
    "21 workers of a loader": (
        lambda make: attach(make(dataloader_num_workers=4)),
        "no effect",
        "dataloader_num_workers",
        "setting prefetch",
    ),
    "23 nothing to resume from": (
        lambda make: attach(make()).train(resume_from_checkpoint=True),
        "found no checkpoint to resume from",
        "run",
        "leave resume_from_checkpoint out",
    ),
    "23 a checkpoint without a position": (
        resume_from_another_training,
        "holds no position in placed batches",
        "the checkpoint of step 1",
        "ignore_data_skip=True begins the data anew",
    ),
    "24 a misspelt setting": (
        lambda make: distca_hf.DistCAPlugin(token_per_rank=65536),
        "unknown setting 'token_per_rank'",
        "DistCAPlugin",
        "Did you mean 'tokens_per_rank'?",
    ),
    "26 a missing package": (
        lambda make: choose_kernel("flash2", HOPPER, AttentionSpec(1.0)),
        "flash2 is not installed",
        "kernel='flash2'",
        "pip install flash-attn --no-build-isolation",
    ),
    "27 a number as a text": (
        lambda make: distca_hf.DistCAPlugin(tokens_per_rank="65536"),  # type: ignore[arg-type]
        "not str",
        "tokens_per_rank='65536'",
        "must be of type int",
    ),
    "28 a kernel's name in Transformers": (
        lambda make: distca_hf.DistCAPlugin(kernel="flash_attention_2"),  # type: ignore[arg-type]
        "must be one of auto, flash4",
        "kernel='flash_attention_2'",
        "flash_attention_2 is 'flash2' here",
    ),
    "29 evaluation that does not pad": (
        evaluation_that_does_not_pad,
        "cannot put rows of 41 and 57 tokens into one batch",
        "the evaluation dataset",
        "Set evaluate='distca' or per_device_eval_batch_size=1, or give Trainer a collator that pads",
    ),
    "30 evaluation without labels": (
        lambda make: attach(
            make(given={"eval_dataset": rows(41)}, eval_strategy="steps", per_device_eval_batch_size=1)
        ),
        "makes no 'labels'",
        "the evaluation dataset",
        "add a column 'labels', or set evaluate='distca'",
    ),
    "30 evaluation on texts": (
        evaluation_on_texts,
        "has no column 'input_ids', only ['text']",
        "the evaluation dataset 'held out'",
        "tokenise it first",
    ),
    "31 a setting without a name": (
        lambda make: distca_hf.DistCAPlugin(65536),  # type: ignore[misc]
        "65536 has no name",
        "DistCAPlugin",
        "for example tokens_per_rank=65536",
    ),
    "31 attach to a model": (
        lambda make: distca_hf.DistCAPlugin().attach(tiny_model()),  # type: ignore[arg-type]
        "takes a Trainer",
        "not LlamaForCausalLM",
        "call distca_hf.enable(model, plugin)",
    ),
    "31 a plugin as callback": (
        lambda make: make(given={"callbacks": [distca_hf.DistCAPlugin()]}),
        "is not a callback",
        "a DistCAPlugin",
        "call plugin.attach(trainer)",
    ),
    "33 longer than the model knows": (
        lambda make: attach(make(rows(150), model=tiny_model(max_position_embeddings=100))),
        "has 150 tokens, and the model was made for 100 (max_position_embeddings)",
        "the training dataset",
        "Scale them (rope_parameters, 'yarn'), or split documents",
    ),
    "35 Ctrl-C": (
        keyboard_interrupt,
        "SIGINT on rank 0; saving a checkpoint and leaving",
        "step 1",
        "Ctrl-C again leaves without it",
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[classes_of_today] if name in ("14 Mamba", "14 Bloom") else []) for name in TOLD],
)
def test_mistake_is_answered_with_what_where_and_what_to_do(
    name: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    mistake, what, where, do = TOLD[name]
    caplog.set_level(logging.WARNING, "distca_hf")
    try:
        mistake(make)
        (message,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if what in text]
    except DistCAError as error:
        message = str(error)

    assert [part for part in (what, where, do) if part not in message] == [], message
    assert len(textwrap.wrap(message, COLUMNS)) <= LINES, message


# --- those that other packages answer: the page of errors quotes them


def not_imported(make: Make) -> None:
    """Transformers says the same whatever name it does not know."""
    tiny_model(implementation="distka")


@pytest.mark.parametrize(
    ("mistake", "do"),
    [
        (not_imported, "import it first"),
        (lambda make: make().train(), "DataCollatorForLanguageModeling"),
        (
            lambda make: model_of(
                FalconConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
            ),
            "flash_attention_2",
        ),
    ],
    ids=["01 import is forgotten", "02 a batch without labels", "14b Falcon"],
)
def test_error_of_another_package_is_on_the_page_of_messages(
    mistake: Callable[[Make], None], do: str, make: Make
) -> None:
    page = (
        (REPOSITORY / "docs" / "troubleshooting.md")
        .read_text()
        .partition("## Before distca_hf")[2]
        .partition("\n## ")[0]
    )
    quoted = {
        parts[0].strip(" `"): parts[2] for row in page.splitlines() if len(parts := row.strip("|").split("|")) > 2
    }
    with pytest.raises(Exception) as caught:  # noqa: PT011  whatever the other package raises
        mistake(make)
    said = f"{type(caught.value).__name__}: {caught.value}".replace("distka", "distca").replace("`", "")

    (advice,) = [advice for begin, advice in quoted.items() if begin.rstrip("… ") in said]
    assert do in advice


# --- what only looks like a mistake


def test_packages_that_are_missing_are_named_with_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """26: the kernel of torch computes where no other is installed, and says so."""
    monkeypatch.setattr("distca_hf.kernels.registry.try_out", lambda *arguments: None)
    choose_kernel("auto", dataclasses.replace(HOPPER, num_heads=3, num_kv_heads=3), AttentionSpec(1.0))
    (message,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "faster one" in text]

    assert "attention kernel torch_varlen, not a faster one" in message
    assert all(KERNELS[name].install in message for name in ("flash4", "flash3", "flash2"))
    assert len(textwrap.wrap(message, COLUMNS)) <= LINES


def test_half_precision_on_a_cpu_trains(make: Make) -> None:
    """19."""
    trainer = attach(make(fp16=True))
    trainer.train()

    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(losses) == 2
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
