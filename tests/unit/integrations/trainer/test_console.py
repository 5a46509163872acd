"""How a Trainer prints our metrics: one short entry, where history and trackers have numbers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from distca_hf.integrations.trainer.callback import in_short, print_in_short
from support.readings import READING


LONGEST_LINE = 160
# The longest values that Trainer's own entries have in four digits.
LOG = {"loss": 0.0012345, "grad_norm": 0.0012345, "learning_rate": 4.9974e-05, "epoch": 0.00055187}


def test_basic_metrics_are_those_that_everybody_watches() -> None:
    assert READING.basic() == {
        "distca/imbalance": pytest.approx(1.002),
        "distca/tokens_per_second_per_rank": 17_625,
        "distca/utilisation": 0.4213,
        "distca/memory_gib": 131,
    }


def test_all_metrics_are_per_micro_batch_and_hold_the_basic_ones() -> None:
    metrics = READING.all(documents_truncated=3)

    assert READING.basic().items() <= metrics.items()
    assert {name.removeprefix("distca/"): metrics[name] for name in metrics.keys() - READING.basic().keys()} == {
        "imbalance_before": pytest.approx(2.3),
        "mbytes_sent_max": 2.0,
        "plan_ms": 5.0,
        "loader_wait_ms": 1.0,
        "wait_ms_max": 10.0,
        "slowest_rank": 5.0,
        "tokens_per_second": 8 * 17_625,
        "documents_truncated": 3.0,
    }


def test_printed_entry_is_short() -> None:
    assert in_short(LOG | READING.basic()) == LOG | {"distca": "imbalance 1.00, 17625 tok/s/GPU, 42% MFU, 131 GiB"}


def test_work_of_a_step_is_shown_where_it_is_counted() -> None:
    totals = replace(READING.totals, step_imbalance_before=8.0, step_imbalance=4.4, token_imbalance=4.0)
    given = replace(READING, totals=totals)
    others = given.all(0).keys() - READING.all(0).keys()

    assert given.basic()["distca/step_imbalance"] == pytest.approx(1.1)
    assert {"distca/token_imbalance", "distca/token_imbalance_before"} < others
    assert given.all(0)["distca/step_imbalance_before"] == 2.0
    assert in_short(given.basic())["distca"] == "imbalance 1.10, 17625 tok/s/GPU, 42% MFU, 131 GiB"


def test_entry_without_gpu_names_ranks_and_leaves_out_what_is_not_known() -> None:
    known = {name: READING.basic()[name] for name in ("distca/imbalance", "distca/tokens_per_second_per_rank")}

    assert in_short(known) == {"distca": "imbalance 1.00, 17625 tok/s/rank"}


def test_other_logs_are_printed_as_they_are() -> None:
    log = {"train_runtime": 3.2, "epoch": 1.0}

    assert in_short(log) is log


class Recorder(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen = logs


@pytest.mark.parametrize("printer", [PrinterCallback(), ProgressCallback()], ids=["printer", "progress bar"])
def test_line_of_a_log_is_at_most_160_characters(
    printer: TrainerCallback, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recorder, logs = Recorder(), LOG | READING.basic() | {"distca/step_imbalance": 1.1}
    state = SimpleNamespace(is_local_process_zero=True, is_world_process_zero=True, max_steps=3)
    print_in_short([recorder, printer], setattr)
    printer.on_train_begin(None, state, None)
    for callback in (recorder, printer):
        callback.on_log(None, state, None, logs=logs)

    (line,) = (line for line in "".join(capsys.readouterr()).splitlines() if "loss" in line)
    assert "42% MFU" in line
    assert len(line.strip()) <= LONGEST_LINE, line
    assert recorder.seen is logs
    assert logs["distca/imbalance"] == pytest.approx(1.002)


@pytest.mark.parametrize("log", [{"distca/mine": 1.0}, READING.basic() | {"distca/mine": 1.0, "imbalance": 2.0}])
def test_metrics_of_the_users_own_stay(log: dict[str, Any]) -> None:
    assert {name: in_short(log)[name] for name in log if name not in READING.basic()} == {
        name: value for name, value in log.items() if name not in READING.basic()
    }
