"""distca plan, bad input: one line that says what is wrong, exit status 2, nothing on stdout and no file."""

import gzip
import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from typer.testing import CliRunner

from distca_hf.analysis import lengths as lengths_module
from distca_hf.cli import app
from support.commands import SCRIPTS
from support.made_answers import made_simulation
from support.versions import states_travel


WORLD = {"--gpus": "2", "--tokens-per-rank": "1000"}
WORLD_OPTIONS = [part for pair in WORLD.items() for part in pair]


def refusal(lengths: Path, *flags: str, **options: str | Path) -> str:
    """Returns the one line on stderr of a command that must be refused."""
    given = WORLD | {f"--{name.replace('_', '-')}": str(value) for name, value in options.items()}
    before = sorted(lengths.parent.rglob("*"))
    options_given = [part for pair in given.items() for part in pair]
    result = CliRunner().invoke(app, ["plan", str(lengths), *options_given, *flags])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert sorted(lengths.parent.rglob("*")) == before
    assert result.stderr.startswith("distca: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def table(**columns: object) -> Callable[[Path], object]:
    return lambda path: pq.write_table(pa.table(columns), path)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


BAD_FILES = {
    "zero.json": (text("[5, 0, 7, 0]"), "document 1 has 0 tokens (and 1 more like it)"),
    "negative.json": (text("[5, -3]"), "document 1 has -3 tokens; a document has 1"),
    "fraction.json": (text("[5, 2.0]"), "entry 1 is 2.0, not a whole number"),
    "truth.json": (text("[5, true]"), "entry 1 is true"),
    "words.json": (text('[5, "six"]'), "entry 1 is a text of 3 characters"),
    "nothing.json": (text("[5, null]"), "entry 1 is null"),
    "nan.json": (text("[5, NaN]"), "entry 1 is NaN"),
    "long.json": (text(f"[5, {2**31}]"), "document 1 has 2147483648 tokens"),
    "absurd.json": (text(f"[5, {10**40}]"), "entry 1 is 10000000000000000000..., far more"),
    "object.json": (text('{"length": [5]}'), "column length: row 0 is a list, not a whole number"),
    "number.json": (text("5"), "must hold a flat list of whole numbers, not 5"),
    "none.json": (text("[]"), "has no documents"),
    "empty.json": (text(""), "is not JSON: Expecting value"),
    "broken.json": (text("[5, 6"), "is not JSON"),
    "deep.json": (text("[" * 100_000), "cannot be read"),
    "binary.json": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "cannot be read"),
    "plain.json.gz": (text("[5]"), "cannot be read"),
    "short.json.gz": (lambda path: path.write_bytes(gzip.compress(b"[5]" * 99)[:-9]), "cannot be read"),
    "words.txt": (text("5 6"), 'number 0 is "5 6", not a whole number'),
    "late.txt": (text("5\n\n6\nseven\n"), 'number 2 is "seven"'),
    "absurd.txt": (text("9" * 100_000), "number 0 is 10000000000000000000..., far more"),
    "empty.txt": (text("\n"), "has no documents"),
    "binary.txt": (lambda path: path.write_bytes(bytes(range(256))), "cannot be read"),
    "zero.csv": (text("length\n5\n0\n"), "document 1 has 0 tokens"),
    "words.csv": (text("id,length\na,5\nb,six\n"), 'column length: row 1 is "six", not a whole number'),
    "short.csv": (text("id,length\na,5\nb\n"), 'row 1 is ""'),
    "unnamed.csv": (text("id,size\na,5\n"), "its columns: id, size"),
    "two.csv": (text("length,num_tokens\n5,6\n"), "in row 0 length is 5 and num_tokens 6; keep one"),
    "twice.csv": (text("length,length\n5,6\n"), "has 2 columns length; keep one of them"),
    "tokens.csv": (text('id,input_ids\na,"[1, 2]"\n'), "no column of lengths"),
    "empty.csv": (text(""), "has no documents"),
    "zeros.csv": (lambda path: path.write_bytes(bytes(100)), "zeros.csv"),
    "words.docx": (text("5 6"), "must end in .json, .jsonl, .csv, .tsv, .txt, .parquet, .arrow, .npy, or be a folder"),
    "broken.jsonl": (text('{"length": 5}\n{"length": '), "line 2 is not JSON"),
    "list.jsonl": (text("[5, 6]"), "line 1 must be an object"),
    "missing.jsonl": (text('{"length": 5}\n{"size": 6}'), "column length: row 1 is null"),
    "unnamed.jsonl": (text('{"size": 5}'), "(length, lengths, num_tokens, token_count, n_tokens, input_ids); its"),
    "two.jsonl": (text('{"length": 5, "input_ids": [1]}'), "in row 0 length is 5 and input_ids 1; keep one"),
    "tokens.jsonl": (text('{"input_ids": 5}'), "row 0 is 5, not a list of tokens"),
    "empty.jsonl": (text("\n\n"), "has no documents"),
    "unnamed.parquet": (table(size=[5]), "no column of lengths"),
    "floats.npy": (lambda path: np.save(path, [5.0]), "not an array of float64"),
    "square.npy": (lambda path: np.save(path, [[5]]), "with shape (1, 1)"),
    "objects.npy": (lambda path: np.save(path, np.array([[5], None], dtype=object)), "cannot be read"),
    "fraction.parquet": (table(length=[5.0]), "column length has double, not whole numbers"),
    "missing.parquet": (table(length=[5, None]), "column length: row 1 is empty"),
    "lists.parquet": (table(length=[[5]]), "has lists, not whole numbers"),
    "numbers.parquet": (table(input_ids=[5]), "has int64, not lists of tokens"),
    "zero.parquet": (table(input_ids=[[5], []]), "document 1 has 0 tokens"),
    "none.parquet": (table(length=pa.array([], pa.int32())), "has no documents"),
    "broken.parquet": (text("PAR1"), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_no_lengths(name: str, tmp_path: Path) -> None:
    write, words = BAD_FILES[name]
    write(tmp_path / name)
    said = refusal(tmp_path / name, "--json")
    assert words in said
    assert name in said


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("bomb.json.gz", "[" + " " * 200, "holds more than 100 characters; give the lengths as .txt or .parquet"),
        ("bomb.txt.gz", "5\n" + "0" * 200, "has a line of more than 100 characters"),
        ("bomb.jsonl.gz", " " * 200, "has a line of more than 100 characters"),
        ("bomb.csv.gz", "length\n" + "1" * 200, "has a line of more than 100 characters"),
    ],
)
def test_small_files_that_unpack_to_large_ones(
    name: str, content: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MOST_CHARACTERS", "MOST_LINE_CHARACTERS"):
        monkeypatch.setattr(lengths_module, limit, 100)
    (tmp_path / name).write_bytes(gzip.compress(content.encode()))
    assert f"{name} {words}" in refusal(tmp_path / name)


def test_an_error_without_words_has_its_name(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> None:
        raise MemoryError

    monkeypatch.setitem(lengths_module.READERS, "json", read)
    assert "lengths.json cannot be read: MemoryError" in refusal(good)


ESCAPES = "\x1b]0;title\x07\x1b[31m\x9b2J\u202e[link=http://far]red[/link]"


def test_names_in_files_reach_no_terminal_as_escapes(good: Path) -> None:
    """Nor is markup of theirs followed."""
    folder = good.parent
    (folder / "columns.jsonl").write_text(json.dumps({ESCAPES: 5}) + "\n")
    lengths = folder / f"{ESCAPES.replace('/', '')}.json"
    lengths.write_text("[700, 800, 300]")
    (folder / "plan.json").write_text(
        json.dumps({"kind": "distca_hf simulation", **made_simulation(), "model": ESCAPES})
    )
    (folder / "named.json").write_text(json.dumps(SHAPE | {"model_type": ESCAPES}))
    told = [
        CliRunner().invoke(app, [*map(str, command)], env={"FORCE_COLOR": "1", "TERM": "xterm-256color"}, color=True)
        for command in (
            ["plan", folder / "columns.jsonl", *WORLD_OPTIONS],
            ["plan", lengths, *WORLD_OPTIONS],
            ["plan", good, *WORLD_OPTIONS, "--model", folder / "named.json"],
            ["report", folder / "plan.json", "-o", folder / "page.html"],
        )
    ]
    assert [one.exit_code for one in told] == [2, 0, 0, 0], [one.output for one in told]
    for one in told:
        assert "[31m\N{REPLACEMENT CHARACTER}2J\N{REPLACEMENT CHARACTER}[link=http:" in one.output.replace("\n", "")
        assert not [part for part in ("\x1b]", "\x1b[31m", "\x07", "\x9b", "\u202e") if part in one.output]


def test_a_path_without_lengths(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "cannot be read" in refusal(tmp_path / "folder")
    assert "cannot be read" in refusal(tmp_path / "lengths.json")


def test_a_folder_of_several_datasets(tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_dict({"length": [5]})}).save_to_disk(tmp_path / "saved")
    assert "holds several datasets: train" in refusal(tmp_path / "saved")


@pytest.mark.parametrize(
    ("name", "make"),
    {
        "texts.jsonl": text('{"text": "two words"}\n'),
        "texts.json": text('[{"text": "two words"}]'),
        "strings.json": text('["two words"]'),
        "texts.csv": text("id,text\n1,two words\n"),
        "texts.txt": text("two words\n"),
        "texts.parquet": table(text=["two words"]),
        "chats.jsonl": text('{"messages": []}\n'),
        "saved": lambda path: Dataset.from_dict({"text": ["two words"]}).save_to_disk(path),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_texts_are_told_the_way_to_lengths(name: str, make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / name)

    assert 'python "$(distca examples tokenise_texts)" MODEL FILE FOLDER' in refusal(tmp_path / name)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text("[700, 800, 300]")
    return path


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("gpus", "0", "--gpus 0 must be between 1 and 8192"),
        ("gpus", "-4", "--gpus -4 must be"),
        ("gpus", "1000000000000", "--gpus 1000000000000 must be"),
        ("tokens_per_rank", "0", "--tokens-per-rank 0 must be between 1 and 2147483647"),
        ("ranks_per_node", "0", "--ranks-per-node 0 must be"),
        ("micro_steps", "0", "--micro-steps 0 must be"),
        ("micro_steps", "7", "fill 1 of 7 micro-steps"),
        ("seed", "-1", "--seed -1 must be at least 0"),
        ("layout", "placid", "--layout placid must be one of placed, fixed"),
        ("overlong", "ignore", "--overlong ignore must be one of error, split, truncate"),
        ("model", "llama9", "model 'llama9' is not known; give one of llama3-8b"),
        ("model", "missing.json", "model config missing.json cannot be read"),
    ],
)
def test_options_out_of_range(option: str, value: str, words: str, good: Path) -> None:
    assert words in refusal(good, **{option: value})


def test_a_document_that_cannot_fit(good: Path) -> None:
    said = refusal(good, tokens_per_rank="350")
    assert (
        "a document of 800 tokens does not fit on 2 ranks x 350 tokens = 700; 400 tokens per rank or 3 ranks" in said
    )


@states_travel
def test_documents_that_training_refuses(good: Path) -> None:
    """A state that cannot travel keeps documents whole on a rank, and a table of positions ends somewhere."""
    tiny = {"num_hidden_layers": 2, "vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4}
    whole = tiny | {"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"]}
    whole |= {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "intermediate_size": 8}
    table = {"model_type": "gpt2", "n_positions": 256, "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 100}
    table |= {"bos_token_id": 1, "eos_token_id": 2}
    table |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    hybrid = tiny | {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
    hybrid |= {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 8}
    for config, tokens_per_rank, words in (
        (whole, "600", "a document of 800 tokens (and 1 more like it) does not fit on one rank, where documents of"),
        (hybrid, "350", "a document of 800 tokens does not fit on 2 ranks x 350 tokens = 700"),
        (table, "1000", "a document of 800 tokens is longer than the 256 that"),
    ):
        (good.parent / "config.json").write_text(json.dumps(config))
        assert words in refusal(good, tokens_per_rank=tokens_per_rank, model=good.parent / "config.json")


def test_a_batch_that_does_not_fit(good: Path) -> None:
    said = refusal(good, "--lengths-are-batch", tokens_per_rank="899")
    assert "the batch has 1800 tokens, but 2 ranks x 899 tokens hold 1798; 900 tokens per rank would hold it" in said
    long = refusal(good, "--lengths-are-batch", tokens_per_rank="350", micro_steps="3")
    assert "a document of 800 tokens does not fit" in long


@pytest.mark.parametrize("layout", ["placed", "fixed"])
def test_fewer_bytes_than_any_plan_needs(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[1900]")
    said = refusal(path, "--lengths-are-batch", layout=layout, bytes_limit="1000")
    assert "bytes per layer" in said
    assert "1000" in said
    assert "--bytes-limit -1 must be at least 0" in refusal(path, bytes_limit="-1")


def test_a_setting_of_the_environment_that_is_no_value(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCA_PAD_TO_MULTIPLE_OF", "many")
    assert (
        "environment variable DISTCA_PAD_TO_MULTIPLE_OF: pad_to_multiple_of='many' is not a whole number"
        in refusal(good)
    )
    monkeypatch.setenv("DISTCA_PAD_TO_MULTIPLE_OF", "1")
    monkeypatch.setenv("DISTCA_KERNEL_TIMES", "missing.json")
    assert "missing.json is not a table of kernel times" in refusal(good)


SHAPE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": None}, "has no num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be a whole number above zero"),
        ({"num_key_value_heads": 7}, "num_attention_heads=32 is not a multiple of num_key_value_heads=7"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads='8' must be a whole number"),
        ({"head_dim": None}, "has neither head_dim nor hidden_size"),
        ({"kv_lora_rank": 512}, "has no qk_nope_head_dim"),
        ({"text_config": {"num_attention_heads": 0}}, "num_attention_heads=0 must be a whole number above zero"),
        ({"head_dim": None, "hidden_size": 100}, "hidden_size=100 is not a multiple of num_attention_heads=32"),
        ({"dtype": "int4"}, "dtype 'int4' is not one of float64"),
        ({"dtype": ["bfloat16"]}, "dtype ['bfloat16'] is not one of"),
    ],
)
def test_model_configs_with_something_missing(change: dict[str, object], words: str, good: Path) -> None:
    (good.parent / "config.json").write_text(json.dumps(SHAPE | change))
    assert words in refusal(good, model=good.parent / "config.json")


@pytest.mark.parametrize("content", ["[1]", "{", ""])
def test_model_configs_that_are_none(content: str, good: Path) -> None:
    (good.parent / "config.json").write_text(content)
    assert "model config" in refusal(good, model=good.parent / "config.json")


def test_the_real_command(good: Path) -> None:
    command = [SCRIPTS / "distca", "plan", good, "--gpus", "2", "--tokens-per-rank"]
    refused = subprocess.run([*command, "10", "--json"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "does not fit" in refused.stderr
    planned = subprocess.run([*command, "1000", "--json"], capture_output=True, text=True)
    assert (planned.returncode, planned.stderr) == (0, "")
    assert json.loads(planned.stdout)["documents"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "x.json", "--gpus", "two", "--tokens-per-rank", "10"], "--gpus"),
        (["plan", "--gpus", "2"], "LENGTHS"),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], said: str) -> None:
    command = [SCRIPTS / "distca", *arguments]
    refused = subprocess.run(command, capture_output=True, text=True)

    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("distca: ")
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1


KERNEL = "kernels-community/flash-attn2"
BACKBONE = {"model_type": "maskformer", "backbone": "microsoft/resnet-50", "use_pretrained_backbone": True}


@pytest.mark.parametrize(
    ("model_type", "names", "words"),
    [
        ("llama", {"attn_implementation": KERNEL}, None),
        ("llama", {"_attn_implementation": {"": KERNEL}}, None),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "org/code--m.C", "AutoConfig": "org/code--m.D"}}, None),
        (
            "vit",
            {"auto_map": {"AutoModelForImageTextToText": "org/code--m.C"}, "num_attention_heads": 4},
            "is refused",
        ),
        ("llava", {"vision_config": BACKBONE}, "it needs https://huggingface.co/"),
    ],
)
def test_nothing_is_fetched_that_a_model_config_names(
    model_type: str, names: dict[str, object], words: str | None, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither kernels, nor code, for which nobody is asked either, nor backbones; by no command."""
    reached: list[object] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "transformers.modeling_utils.lazy_import_flash_attention", lambda *names, **_: reached.append(names)
    )
    monkeypatch.setattr("builtins.input", lambda *words: reached.append(words) or "n")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: reached.append(address) or [])
    monkeypatch.setattr(socket.socket, "connect", lambda of, address: reached.append(address))
    values = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
    sizes = {"text_config": values | {"dtype": "bfloat16"}} if model_type == "llava" else values
    path = good.parent / "config.json"
    path.write_text(json.dumps({"model_type": model_type, "dtype": "bfloat16", **sizes, **names}))
    for command in (["plan", str(good), *WORLD_OPTIONS, "--model", str(path)], ["check", str(path)]):
        result = CliRunner().invoke(app, command)
        assert reached == []
        assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
        if command[0] == "plan":
            assert (result.exit_code, words is None or words in result.stderr) == (0 if words is None else 2, True)
