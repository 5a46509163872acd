"""distca check, as a user calls it: text at 80 columns, JSON, exit statuses, and one line on bad input."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, Gemma2Config, LlamaConfig
from typer.testing import CliRunner, Result

from distca_hf.analysis.memory import estimate_memory
from distca_hf.analysis.models import preset
from distca_hf.analysis.training_setup import TrainingSetup
from distca_hf.cli import app
from distca_hf.flops import H100_GIB
from support.commands import REPOSITORY
from support.versions import classes_of_today


SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 1 << 20,
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def as_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (1 if found["status"] == "refused" else 0)
    return found


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    return tmp_path


def test_text_is_readable_at_eighty_columns(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # of whatever runs the tests
    result = run(llama, "--gpus", 4, "--tokens-per-rank", 65536, "--numerics")
    text = result.stdout

    assert result.exit_code == 0, result.output
    assert max(len(line.rstrip()) for line in text.splitlines() if str(llama) not in line) <= 80
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0].startswith("LlamaForCausalLM")
    for line in (
        "works on h200",
        "documents: may be cut between ranks (placed)",
        "0-3 full, 8/4 heads of 32",
        "4 layers: full, heads of 32",
        "flash4, flash3, flash2, torch_varlen",
        "FSDP2 ZeRO-3",
        "fits in 126.4 yes yes",
        "relative differences",
    ):
        assert line in lines, text
    for difference in ("logits", "loss", "gradients"):
        (found,) = [line for line in lines if re.fullmatch(rf"{difference} \d\.\de-\d+", line)]
        assert 0 <= float(found.split()[1]) < 1e-5


def test_json_has_all_and_agrees_with_the_estimates() -> None:
    found = as_json("llama3-8b", "--gpus", 8, "--tokens-per-rank", 65536, "--gpu", "h100", "--liger")
    shape = preset("llama3-8b")
    assert shape.size is not None
    expected = estimate_memory(shape.size.decoder(shape.heads), TrainingSetup(8, liger=True), 65536)

    assert (found["class"], found["model_type"], found["status"]) == ("LlamaForCausalLM", "llama", "works")
    assert found["layers"][0]["layers"] == list(range(32))
    assert found["layers"][0]["heads"]["key_value"] == 8
    assert found["kernels"][0]["able"] == ["flash4", "flash3", "flash2", "torch_varlen"]
    memory = found["memory_bytes"]["fsdp2"]
    assert memory["gradients"] == 0, "of one micro-step"
    assert memory["total"] - memory["received"] == pytest.approx(expected.total, rel=0.01)
    assert found["fits"] == {"fsdp2": True, "zero3": True}
    largest = found["largest_tokens_per_rank"]["fsdp2"]
    assert 65536 <= largest < 131_072
    assert found["largest_tokens_per_rank_with_liger"] == found["largest_tokens_per_rank"]
    assert found["numerics"]["agree"] is True
    assert found["room_bytes"] == round(0.9 * H100_GIB * 2**30)


def test_accumulation_is_counted_as_trainer_has_it() -> None:
    options = ("llama3-8b", "--tokens-per-rank", 16_384, "--liger")
    four = as_json(*options, "--micro-steps", 4)["memory_bytes"]
    text = run(*options, "--micro-steps", 4).stdout

    assert list(four) == ["fsdp2", "fsdp2_synced", "zero3"]
    assert four["fsdp2"]["gradients"] == 4 * four["fsdp2_synced"]["gradients"] == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert "FSDP2 FSDP2 synced ZeRO-3" in " ".join(text.split())
    assert "each GPU keeps all of them, 15.0 GiB in bf16. Synced (sync_each_batch=True in" in " ".join(text.split())
    refusal("llama3-8b", "--micro-steps", 0, words="--micro-steps 0 must be between 1 and 1024")


ONE_VERDICT = ("stablelm", "heads of 1024", "mamba")


@classes_of_today
@pytest.mark.parametrize("name", ONE_VERDICT)
def test_what_check_refuses_no_other_command_plans(name: str, tmp_path: Path) -> None:
    """Also models that are refused in the trial of a tiny version, that no kernel of an H200 computes, or that have no
    heads."""
    (tmp_path / "lengths.json").write_text("[100, 200, 300]")
    if name == "heads of 1024":
        name = str(tmp_path / "wide")
        LlamaConfig(**SIZES | {"head_dim": 1024}).save_pretrained(name)
    reasons = as_json(name)["reasons"]
    assert reasons
    expected = f"is refused: {'; '.join(reasons)}. `distca check` shows it"
    for words in (["plan", "--gpus", "2", "--tokens-per-rank", "1000"], ["simulate", "--gpus", "2"]):
        given = [words[0], str(tmp_path / "lengths.json"), *words[1:], "--model", name]
        result = CliRunner().invoke(app, given)
        assert (result.exit_code, result.stdout) == (2, "")
        # In a trial either rank may be the first that fails, each at a position of its own.
        told, wanted = (re.sub(r"\d+", "*", words) for words in (" ".join(result.stderr.split()), expected))
        assert wanted in told


def test_models_that_training_does_not_divide_have_no_pipeline(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[100, 200, 300]")
    for words in (
        ["plan", "--gpus", "2", "--tokens-per-rank", "1000", "--micro-steps", "4"],
        ["simulate", "--gpus", "4"],
    ):
        given = [words[0], str(tmp_path / "lengths.json"), *words[1:], "--pipeline", "2", "--model", "cohere2"]
        result = CliRunner().invoke(app, given)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--pipeline 2: Cohere2ForCausalLM cannot be divided into stages: its forward" in result.stderr


def test_limits_and_configurations_without_a_dtype_are_the_same_for_all_commands(tmp_path: Path) -> None:
    """As published: GPT-OSS has no dtype, and its weights are quantised."""
    config = {**SIZES, "model_type": "gpt_oss", "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "lengths.json").write_text("[100, 200, 300]")
    (limit,) = as_json(tmp_path)["limits"]
    for words in (["plan", "--gpus", "2", "--tokens-per-rank", "300"], ["simulate", "--gpus", "2"]):
        given = [words[0], str(tmp_path / "lengths.json"), *words[1:], "--model", str(tmp_path)]
        result = CliRunner().invoke(app, given + ["--tokens-per-rank", "300"] * (words[0] == "simulate"))
        assert result.exit_code == 0, result.output
        assert limit in " ".join(result.stdout.split())


def test_a_refused_model_ends_with_one(tmp_path: Path) -> None:
    Gemma2Config(**SIZES, head_dim=32, attention_dropout=0.1).save_pretrained(tmp_path)
    result = run(tmp_path)

    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "refused on h200" in text
    assert "refused: attention dropout 0.1 is not computed; set it to 0" in text
    assert "GiB per GPU" not in text


def test_on_a_cpu_no_memory_is_estimated(llama: Path) -> None:
    found = as_json(llama, "--gpu", "cpu")

    assert (found["status"], found["fits"], found["room_bytes"]) == ("works", {}, None)


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no such model": (("lama",), "Did you mean 'llama'?"),
    "no such file": (("nowhere/config.json",), "cannot be read"),
    "no such module": (("support.nowhere.Model",), "cannot be imported"),
    "no such class": (("support.strange_models.Nothing",), "support.strange_models has no Nothing"),
    "no model class": (("os.path",), "is not a model class"),
    "no such GPU": (("llama", "--gpu", "h2000"), "Did you mean 'h200'?"),
    "no GPUs": (("llama", "--gpus", "0"), "--gpus 0 must be between 1 and 8192"),
    "no tokens": (("llama", "--tokens-per-rank", "0"), "--tokens-per-rank 0 must be"),
    "too many tokens": (("llama", "--gpus", "8192", "--tokens-per-rank", "2000000"), "--tokens-per-rank 2000000 must"),
    "checkpointing": (("llama", "--checkpointing", "some"), "must be one of saved, offloaded, recomputed, none"),
    "defaults that do not build": (("nemotron",), "default sizes need not go together: give a config.json"),
}


def test_brackets_in_a_path_are_printed_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "a[red]" / "b[" / "c]"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    result = run(folder)

    assert result.exit_code == 0, result.output
    assert "a[red]/b[/c]" in "".join(line.strip() for line in result.stdout.splitlines())


def test_words_of_a_model_are_not_in_the_json() -> None:
    result = run("support.strange_models.Talking", "--json")

    assert json.loads(result.stdout)["class"] == "Talking"
    assert "built" in result.stderr


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "rms_norm_eps": float("nan")}))
    found = as_json(tmp_path)

    assert found["status"] == "refused"
    assert found["numerics"]["loss"] is None


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str) -> None:
    arguments, words = BAD[case]
    refusal(*arguments, words=words)


FILES = {
    "binary.json": (b"\xff\xfe\x00", "cannot be read"),
    "list.json": (b"[1, 2]", "must be a JSON object"),
    "foreign.json": (b'{"hidden_size": 5}', "has no model_type"),
    "unknown.json": (b'{"model_type": "llamma"}', "has no model type 'llamma'. Did you mean 'llama'?"),
    "later.json": (
        b'{"model_type": "qwen9_moe"}',
        "has no model type 'qwen9_moe'. It has qwen2_moe, qwen3_moe",
    ),
    "code.json": (
        b'{"model_type": "mine", "auto_map": {"AutoConfig": "a.B", "AutoModelForCausalLM": "c.D"}}',
        "model type 'mine' needs a.py and c.py, which its auto_map names and",
    ),
    "hub.json": (b'{"model_type": "mine", "auto_map": {"AutoConfig": "some/one--a.B"}}', "give --trust-remote-code"),
    "quantised.json": (
        b'{"model_type": "llama", "quantization_config": "fp8"}',
        "quantization_config must be an object",
    ),
    "wrong.json": (
        b'{"model_type": "llama", "hidden_size": "many"}',
        "is not one of llama: Validation error for field 'hidden_size': TypeError",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_configuration_is_one_line(name: str, tmp_path: Path) -> None:
    content, words = FILES[name]
    (tmp_path / name).write_bytes(content)
    refusal(tmp_path / name, words=words)


@pytest.mark.parametrize("command", [["check"], ["plan", "pretrain", "--gpus=8", "--tokens-per-rank=4096", "--model"]])
def test_a_folder_of_another_format_is_named_with_the_page(command: list[str], tmp_path: Path) -> None:
    """By all commands that take a model."""
    folders = {
        "empty": ({}, "the folder has no config.json (docs/models.md)"),
        "adapter": ({"adapter_config.json": '{"base_model_name_or_path": "a/b"}'}, "give its base model a/b (docs/mo"),
        "meta": ({"params.json": "{}"}, "it is in the format of Meta or Mistral (params.json), give a version"),
        "code": (
            {"config.json": '{"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}'},
            "needs a.py, which its auto_map names" if command == ["check"] else "has no num_attention_heads",
        ),
    }
    for name, (files, words) in folders.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
        refused(*command, tmp_path / name, words=words)
    (tmp_path / "model.gguf").write_text("")
    refused(*command, tmp_path / "model.gguf", words="give its folder, or its config.json; .gguf is not read")


def test_a_configuration_whose_code_fails_is_named_as_such(tmp_path: Path) -> None:
    """There is a folder with a config.json: its Python file is to blame."""
    (tmp_path / "a.py").write_text("from .missing import nothing\n")
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}')

    refusal(tmp_path, "--trust-remote-code", words=f"model {tmp_path}: its config.json cannot be loaded: ")


def test_another_version_of_a_model_type_is_no_misspelling() -> None:
    refusal("minimax_m9", words="It has minimax_m2")


def refusal(*arguments: object, words: str) -> None:
    """Asserts that `distca check` is refused with one line, these words in it."""
    refused("check", *arguments, words=words)


def refused(*arguments: object, words: str) -> None:
    """The same of any command."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("distca: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_code_of_a_folder_runs_only_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):  # Transformers registers classes of a folder
        monkeypatch.setattr(known, "_extra_content", {**known._extra_content})
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    own = {"model_type": "own_llama", "architectures": ["OwnForCausalLM"]}
    own["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **own}))

    refusal(tmp_path, words="--trust-remote-code")
    found = as_json(tmp_path, "--trust-remote-code")
    assert (found["class"], found["status"]) == ("OwnForCausalLM", "works")


def test_the_page_shows_what_is_printed() -> None:
    """The example of docs/models.md, up to the place where it is cut off."""
    page = (REPOSITORY / "docs" / "models.md").read_text()
    _, _, rest = page.partition("$ distca check gemma2 --gpu a100\n")
    shown = rest.partition("\n...\n")[0].splitlines()
    printed = [line.rstrip() for line in run("gemma2", "--gpu", "a100").stdout.splitlines()]

    assert len(shown) > 15
    assert printed[: len(shown)] == shown
