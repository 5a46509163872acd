"""`distca check` beside the sweep: of classes that the page of models lists, the command says what training showed.

Here of some of each kind; `scripts/models/sweep.py --verdicts` compares all.
"""

import importlib
from types import ModuleType

import pytest
import transformers

from support.commands import REPOSITORY


# Model types: full layers, windows, softcap, sinks, MLA, mixers whose states travel or cannot, tokens of no attention,
# shared keys, a table of positions; refused by their type of layers, by the lack of attention, by Transformers, by
# their loss, by what they ask for or leave out in a forward pass; and one that cannot be built.
SAMPLE = (
    *("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1", "nemotron_h", "gemma3n_text", "gpt2"),
    *("gemma4_text", "phimoe", "llama4_text", "deepseek_v32", "mamba", "bloom", "falcon", "nemotron", "stablelm"),
    *("gemma4_unified", "zaya", "xlnet", "musicgen", "minimax", "recurrent_gemma"),
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "models")
    return importlib.import_module("sweep")


def test_verdicts_are_the_outcomes_of_training(script: ModuleType) -> None:
    made_with = (REPOSITORY / "scripts" / "models" / "classes.md").read_text().partition("## All classes")[2]
    if f"Transformers {transformers.__version__}," not in made_with.partition("\n\n")[2][:300]:
        pytest.skip(f"the page was made with another Transformers than {transformers.__version__}")
    found = script.compare_verdicts(script.TEXT, SAMPLE)

    assert {each.model_type for each in found} == set(SAMPLE)
    assert {each.on_page for each in found} == {"works", "refused", "not built"}
    assert [each for each in found if each.verdict != each.on_page] == []


def test_all_classes_of_the_page_are_compared(script: ModuleType) -> None:
    assert len(script.outcomes_of_page(script.TEXT)) == 195
    assert len(script.outcomes_of_page(script.IMAGES)) == 100


@pytest.mark.parametrize(
    ("on_page", "verdict", "agrees"),
    [
        ("works", "works", True),
        ("refused", "works", False),
        ("works", "refused", False),
        ("not built", "works", True),
    ],
)
def test_a_false_verdict_is_noticed(on_page: str, verdict: str, agrees: bool, script: ModuleType) -> None:
    assert script.Compared("A", "a", on_page, verdict, "").agrees == agrees
