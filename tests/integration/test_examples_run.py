"""Every example runs on two CPU processes as its docstring says; real launchers are in test_entry_points.py."""

import math
import re
from pathlib import Path

from datasets import Dataset
from peft import PeftConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from distca_hf.cli import app
from support.commands import REPOSITORY
from support.scripts import run_script
from support.texts import END, save_word_model, write_documents
from support.versions import states_travel


EXAMPLES = REPOSITORY / "examples"
SHARD_ON_CPU = "tests/support/shard_on_cpu.py"
OF_MODELS = {"gemma3_long", "gpt_oss_lora", "qwen3_5"}
RUN_HERE = {"sft_packing", "lora", "deepspeed_zero3", "tokenise_texts", "dpo", "pipeline"} | OF_MODELS
RUN_ELSEWHERE = {"train", "accelerate_loop", "train_causal_lm", "quickstart"}
MODULES = {"ms_swift_plugin", "python_sources", "quickstart_report"}


def check_launch_line(name: str) -> None:
    """The first launch line of an example's docstring is for two CPU processes and for this example."""
    (line, *_) = re.findall(r"^    (accelerate launch .*)$", (EXAMPLES / f"{name}.py").read_text(), re.MULTILINE)

    assert line == f'accelerate launch --config_file "$(distca recipes cpu_2proc)" "$(distca examples {name})"'


def run_example(name: str, folder: Path, *before: str) -> str:
    """What an example prints on two ranks; it runs in another folder, so that what it writes is thrown away.

    Args:
        before: a script that runs the example.
    """
    check_launch_line(name)
    return run_script(2, folder, [*before, f"examples/{name}.py"], DISTCA_METRICS="all")


def losses_of(printed: str) -> list[float]:
    """Losses of the steps, as Trainer prints them."""
    return [float(loss) for loss in re.findall(r"'loss': '([^']+)'", printed)]


def metric_of(printed: str, name: str) -> list[float]:
    """One of distca's metrics in all steps, as Trainer prints them."""
    return [float(value) for value in re.findall(rf"'distca/{name}': '([^']+)'", printed)]


def check_training(printed: str, most: float = 1.05) -> None:
    """Four steps were trained, balanced to within `most` times the mean work.

    Args:
        most: layers with windows are about even, and others exactly.
    """
    losses = losses_of(printed)

    assert len(losses) == 4, printed
    assert all(math.isfinite(loss) and 3 < loss < 7 for loss in losses)
    before, after = metric_of(printed, "imbalance_before"), metric_of(printed, "imbalance")
    assert len(before) == len(after) == 4
    assert max(after) < most < sum(before) / 4


def test_every_example_is_run_somewhere() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == RUN_HERE | RUN_ELSEWHERE | MODULES


def test_sft_packing_keeps_the_packs(tmp_path: Path) -> None:
    printed = run_example("sft_packing", tmp_path)

    check_training(printed)
    before, after, sent = (metric_of(printed, name) for name in ("imbalance_before", "imbalance", "mbytes_sent_max"))
    assert [mbytes > 0 for mbytes in sent] == [left > right for left, right in zip(before, after, strict=True)]
    assert sum(mbytes > 0 for mbytes in sent) >= 3, "a step whose packs are equal by chance need not send anything"


def check_adapter(folder: Path) -> None:
    """The folder holds a LoRA adapter that was trained, and nothing else of the model."""
    weights = load_file(folder / "adapter_model.safetensors")

    assert PeftConfig.from_pretrained(folder).peft_type == "LORA"
    assert all("lora_" in name for name in weights)
    assert any(weight.any() for name, weight in weights.items() if "lora_B" in name), "B begins at zero"


def test_lora_saves_an_adapter(tmp_path: Path) -> None:
    check_training(run_example("lora", tmp_path))

    check_adapter(tmp_path / "lora_output")


def test_gemma3_cuts_documents_longer_than_its_windows(tmp_path: Path) -> None:
    printed = run_example("gemma3_long", tmp_path)

    check_training(printed, most=1.15)
    assert all(mbytes > 0 for mbytes in metric_of(printed, "mbytes_sent_max"))


def test_gpt_oss_saves_an_adapter(tmp_path: Path) -> None:
    check_training(run_example("gpt_oss_lora", tmp_path))

    check_adapter(tmp_path / "gpt_oss_lora_output")


@states_travel
def test_qwen3_5_cuts_documents_longer_than_a_rank_holds(tmp_path: Path) -> None:
    printed = run_example("qwen3_5", tmp_path)

    assert "which travels with cut documents" in printed
    assert "longest 900 of 1,024 possible" in printed
    assert all(after < 1.1 for after in metric_of(printed, "imbalance"))
    assert all(mbytes > 0 for mbytes in metric_of(printed, "mbytes_sent_max"))


def test_dpo_places_rows_of_padded_batches(tmp_path: Path) -> None:
    printed = run_example("dpo", tmp_path)

    before, after = metric_of(printed, "imbalance_before"), metric_of(printed, "imbalance")
    assert len(before) == 3
    assert sum(after) < sum(before)


def test_pipeline_reads_and_writes_ordinary_checkpoints(tmp_path: Path) -> None:
    example = (EXAMPLES / "pipeline.py").read_text()
    (line, *_) = re.findall(r"^    (torchrun .*?)  +", example, re.MULTILINE)
    interleaved = ["--chunks", "2", "--recompute", "--steps", "3"]
    first = run_script(4, tmp_path / "first", ["examples/pipeline.py", *interleaved, "--save-every", "2"])
    of_resumed = [*interleaved, "--resume", "--output", tmp_path / "first" / "pipeline_output"]
    resumed = run_script(4, tmp_path / "resumed", ["examples/pipeline.py", *of_resumed])
    of_first = ["--shard", "--steps", "1", "--model", tmp_path / "first" / "pipeline_output"]
    second = run_script(4, tmp_path / "second", ["examples/pipeline.py", *of_first])
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "pipeline_output")

    assert line == 'torchrun --nproc-per-node 4 "$(distca examples pipeline)"'
    losses = [[float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed)] for printed in (first, second)]
    assert [len(of_run) for of_run in losses] == [3, 1]
    assert losses[1][0] < losses[0][0], "the second begins with the weights of the first"
    steps = [re.findall(r"step \d: .*", printed) for printed in (first, resumed)]
    assert steps[1] == steps[0][2:], "the last step, as it was without a stop"
    assert max(float(work) for work in re.findall(r"1\.\d{3}", first)) < 1.05
    assert trained.config.num_hidden_layers == 4


def test_deepspeed_says_that_it_runs_ddp_on_cpus(tmp_path: Path) -> None:
    printed = run_example("deepspeed_zero3", tmp_path)

    assert "distributed type: MULTI_CPU" in printed
    check_training(printed)


def test_deepspeed_shards_where_accelerate_lets_it(tmp_path: Path) -> None:
    printed = run_example("deepspeed_zero3", tmp_path, SHARD_ON_CPU)

    assert "distributed type: DEEPSPEED" in printed
    check_training(printed)


def test_texts_are_tokenised_then_planned_trained_and_evaluated(tmp_path: Path) -> None:
    model = save_word_model(tmp_path / "model")
    texts = write_documents(tmp_path / "documents.jsonl", [*range(3, 62), 2500])
    said = run_script(1, tmp_path, ["examples/tokenise_texts.py", model, texts, "tokenised"])
    planned = CliRunner().invoke(app, ["plan", f"{tmp_path}/tokenised", "--gpus=2", "--tokens-per-rank=2048"])
    recipe = ["-m", "distca_hf.run", "--recipe", "llama3_8b_128k", "--model", model, "--dataset", texts]
    options = ["--max_steps", "2", "--test_size", "0.1", "--use_cpu", "true", "--report_to", "none"]
    printed = run_script(2, tmp_path, [*recipe, *options, "--output_dir", "out"])
    tokenised = Dataset.load_from_disk(str(tmp_path / "tokenised"))["input_ids"]

    assert f"60 documents, {sum(range(4, 63)) + 2501:,} tokens, the longest has 2,501" in said
    assert [row[-1] for row in tokenised] == [0] * 60
    assert tokenised[0] == [2, 5, 8, 0], "the words 0, 3 and 6"
    assert planned.exit_code == 0, planned.output
    assert len(losses_of(printed)) == 2
    assert len(re.findall(r"eval_loss += +([\d.]+)", printed)) == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == END
