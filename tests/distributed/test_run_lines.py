"""The lines about a training on two ranks: once, on rank 0, with the figures of what is trained, however it is run."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import distca_hf
from support.data import random_dataset
from support.log_lines import KeptLines
from support.models import tiny_model
from support.ranks import run_ranks
from support.resuming import LOADS_ON_CPU_RANKS, resumes_on_cpu_ranks
from support.training import quiet_arguments


ACCUMULATION = 2
WAYS = ("attach", *(["resume"] if LOADS_ON_CPU_RANKS else []), "callback", "evaluating", "loop")
BALANCE = re.compile(r"work of the busiest rank (?:in a step )?([\d.]+) -> ([\d.]+) times the mean")


def _train_in_every_way(folder: Path) -> dict[str, tuple[list[str], list[dict[str, float]]]]:
    """Lines, and logs of the Trainer, of every way to train."""
    told = {}
    for way in WAYS:
        handler = KeptLines()
        logging.getLogger("distca_hf").addHandler(handler)
        told[way] = (handler.lines, _train(way, folder))
        logging.getLogger("distca_hf").removeHandler(handler)
    return told


def _train(way: str, folder: Path) -> list[dict[str, float]]:
    is_kept = way in ("callback", "evaluating")
    plugin = distca_hf.DistCAPlugin(
        tokens_per_rank=0 if is_kept else 512, metrics="all", evaluate="distca" if way == "evaluating" else "local"
    )
    dataset = random_dataset(200)
    model = tiny_model(num_hidden_layers=1).train()
    if way == "loop":
        distca_hf.enable(model, plugin)
        for batch in plugin.dataloader(dataset, seed=42, model=model):
            model(**batch).loss.backward()
        return []
    arguments = quiet_arguments(
        folder,
        use_cpu=True,
        num_train_epochs=2,
        gradient_accumulation_steps=ACCUMULATION,
        save_strategy="epoch",
        seed=42,
    )
    kept: dict[str, Any] = {"data_collator": DataCollatorWithFlattening()} if is_kept else {}
    if is_kept:
        kept["callbacks"] = [distca_hf.DistCACallback(plugin)]
    if is_kept:
        arguments |= {"per_device_train_batch_size": 8, "save_strategy": "no"}
    if way == "evaluating":
        arguments |= {"per_device_eval_batch_size": 8, "eval_strategy": "epoch"}
        kept["eval_dataset"] = dataset.add_column("labels", dataset["input_ids"])
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=dataset,
        **kept,
    )
    if not is_kept:
        plugin.attach(trainer)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if way == "resume" else None)
    return [log for log in trainer.state.log_history if "loss" in log]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], list[dict[str, float]]]]:
    folder = tmp_path_factory.mktemp("lines")
    first, second = run_ranks(2, _train_in_every_way, folder / "ranks", folder / "output")
    assert {way: lines for way, (lines, _) in second.items()} == {way: [] for way in WAYS}, "rank 0 speaks for all"
    for way, (lines, _) in first.items():
        assert lines.pop(0).startswith("LlamaForCausalLM works. layers 0: full, 4/2 heads of 16."), way
    return first


def balance(line: str) -> list[float]:
    found = BALANCE.search(line)
    assert found, line
    return [float(number) for number in found.groups()]


def of_steps(logs: list[dict[str, float]], name: str = "imbalance") -> list[float]:
    """Imbalance before and after, over all steps."""
    return [sum(log[f"distca/{each}"] for log in logs) / len(logs) for each in (f"{name}_before", name)]


TOKENS = sum(len(row["input_ids"]) for row in random_dataset(200))


@pytest.mark.parametrize(("way", "steps"), [("attach", 8), pytest.param("resume", 4, marks=resumes_on_cpu_ranks)])
def test_placed_training_begins_with_its_data_and_ends_with_what_was_done(
    told: dict[str, tuple[list[str], list[dict[str, float]]]], way: str, steps: int
) -> None:
    *_, first, second, last = told[way][0]
    logs = told[way][1][-steps:]
    before = f"{distca_hf.__version__}: 2 ranks x 512 tokens on 1 node, kernel cpu; 200 documents, {TOKENS:,} tokens"

    assert first == f"{before}, longest 150 of 1,024 possible; 4 steps per epoch"
    assert second.endswith("packed in order (means over 8 micro-batches)")
    # All micro-batches of the epoch are looked at, and both epochs are trained; the steps of a log have two each.
    assert balance(second) == pytest.approx(of_steps(logs[:4]), abs=0.02)
    assert last.startswith(f"trained {steps} steps: {TOKENS * steps // 4:,} tokens in ")
    assert balance(last) == pytest.approx(of_steps(logs), abs=0.006)


@resumes_on_cpu_ranks
def test_resuming_says_where_it_goes_on(told: dict[str, tuple[list[str], list[dict[str, float]]]]) -> None:
    assert told["resume"][0][0].startswith("step 4 is epoch 1.00 of the data; 4 steps are left in this epoch")
    assert len(told["attach"][0]) == 3
    assert len(told["resume"][0]) == 4


def test_kept_batches_say_what_is_known_of_them(told: dict[str, tuple[list[str], list[dict[str, float]]]]) -> None:
    (way_of_loss, first, second, last), logs = told["callback"]

    assert way_of_loss.startswith("hidden states return to the ranks of their batches, for head and loss: ")
    assert re.fullmatch(
        rf"{distca_hf.__version__}: 2 ranks on 1 node, kernel cpu; your own batches: inside the model their rows "
        r"move to ranks with less work; first micro-batch: 16 documents, \d+ tokens, longest \d+; 7 steps per epoch",
        first,
    )
    assert re.match(
        r"work of the busiest rank in a step 1\.\d\d -> 1\.\d\d times the mean \(its tokens 1\.\d\d -> 1\.00, attent",
        second,
    )
    assert second.endswith("times as fast as without (in the first micro-batch)")
    assert balance(second)[0] > balance(second)[1]
    assert last.startswith("trained 14 steps: ")
    assert balance(last) == pytest.approx(of_steps(logs, "step_imbalance"), abs=0.05), (
        "an epoch's last step is smaller"
    )
    before, after = of_steps(logs, "token_imbalance")
    assert before > after == pytest.approx(1.0, abs=0.01)


def test_evaluation_is_not_counted(told: dict[str, tuple[list[str], list[dict[str, float]]]]) -> None:
    (*_, usual), logs = told["callback"]
    (*_, evaluating), logs_evaluating = told["evaluating"]
    names = ("distca/imbalance", "distca/mbytes_sent_max")

    assert evaluating.partition(" tokens in ")[0] == usual.partition(" tokens in ")[0]
    assert balance(evaluating) == balance(usual)
    assert [[log[name] for name in names] for log in logs_evaluating] == [
        [log[name] for name in names] for log in logs
    ]


def test_loop_of_ones_own_says_the_same(told: dict[str, tuple[list[str], list[dict[str, float]]]]) -> None:
    first, second, last = told["loop"][0]

    assert first.endswith("longest 150 of 1,024 possible; 8 micro-batches per epoch")
    assert last.startswith(f"epoch 0: {TOKENS:,} tokens in ")
    assert balance(second) == pytest.approx(balance(last), abs=0.02)
