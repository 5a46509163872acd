"""TRL's own scripts on two ranks under `distca_hf.run --attach`: what they learn with sdpa, and even work."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.commands import REPOSITORY, SCRIPTS, run_command
from support.models import VOCABULARY, tiny_model
from support.scripts import run_script
from support.thorough import is_thorough


STEPS = 3
FLAG = ["-m", "distca_hf.run", "--attach", "-m"]
COMMON: dict[str, Any] = {
    **{"max_steps": STEPS, "logging_steps": 1, "save_steps": STEPS, "report_to": "none", "disable_tqdm": True},
    **{"use_cpu": True, "bf16": False, "dtype": "float32", "per_device_train_batch_size": 4, "learning_rate": 1e-3},
    "gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and texts of skewed lengths: plain ones, and pairs of answers."""
    folder, rng = tmp_path_factory.mktemp("trl"), random.Random(0)
    tiny_model(implementation="sdpa", num_hidden_layers=2).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    tokenizer.save_pretrained(folder / "model")

    def text(*lengths: int) -> str:
        return " ".join(str(rng.randrange(3, VOCABULARY)) for _ in range(rng.choice(lengths)))

    rows: dict[str, list[dict[str, str]]] = {
        "texts": [{"text": text(10, 20, 60, 300)} for _ in range(48)],
        "pairs": [{"prompt": text(5, 100), "chosen": text(10, 90), "rejected": text(10, 90)} for _ in range(24)],
    }
    for name, of_file in rows.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, of_file)))
    return folder


def train(folder: Path, words: list[str], script: str, arguments: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """What a script prints in a folder of its own, and its log of every step."""
    folder.mkdir(parents=True)
    line = [*words, f"trl.scripts.{script}", *options(arguments)]
    printed = run_script(2, folder, line, HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")
    return printed, logged(folder)


def options(arguments: dict[str, Any]) -> list[str]:
    given = COMMON | arguments | {"output_dir": "out"}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def logged(folder: Path) -> list[dict[str, Any]]:
    state = json.loads((folder / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [log for log in state["log_history"] if "loss" in log]


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft, packing": ("sft", {"dataset_name": "texts", "packing": True, "max_length": 400})
}
if is_thorough():
    RUNS["dpo, adapters"] = ("dpo", {"dataset_name": "pairs", "use_peft": True, "lora_r": 4, "lora_dropout": 0.0})


@pytest.mark.parametrize(("script", "arguments"), RUNS.values(), ids=RUNS)
def test_losses_are_those_of_sdpa_and_work_is_even(
    script: str, arguments: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    arguments = arguments | {"model_name_or_path": data / "model", "dataset_name": data / arguments["dataset_name"]}
    _, expected = train(tmp_path / "sdpa", ["-m"], script, arguments)
    printed, steps = train(tmp_path / "flag", FLAG, script, arguments)

    assert len(expected) == STEPS
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in expected], abs=1e-5)
    assert max(step["distca/imbalance"] for step in steps) <= 1.05
    assert printed.count("attends with distca, no longer with sdpa") == 1
    assert "your own batches" in printed


def test_variable_attaches_in_processes_that_a_command_starts(data: Path, tmp_path: Path) -> None:
    """Nothing in them imports distca_hf."""
    processes = ["--accelerate_config", REPOSITORY / "recipes/accelerate/cpu_2proc.yaml", "--main_process_port", "0"]
    given = options({"dataset_name": data / "texts", "model_name_or_path": data / "model"})
    run_command([SCRIPTS / "trl", "sft", *processes, *given], tmp_path, DISTCA_ATTACH="1", HF_HUB_OFFLINE="1")

    steps = logged(tmp_path)
    assert len(steps) == STEPS
    assert max(step["distca/imbalance"] for step in steps) <= 1.05
