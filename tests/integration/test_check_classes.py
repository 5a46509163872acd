"""`distca check` beside the sweep: of classes that the page of models lists, the command says what training showed."""

import importlib
import re
from types import ModuleType

import pytest
import transformers

from distca_hf.analysis.check.find import Candidate
from distca_hf.analysis.check.tiny_config import LONGEST_TOKENS, tiny_config
from distca_hf.analysis.check.verdict import judge
from distca_hf.flops import find_gpu


# Model types: full layers, windows, softcap, sinks, MLA, mixers whose states travel or cannot, tokens of no attention,
# shared keys, a table of positions; refused by their type of layers, by the lack of attention, by Transformers, by
# their loss, by what they ask for or leave out in a forward pass; and one that cannot be built.
SAMPLE = (
    *("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1", "nemotron_h", "gemma3n_text", "gpt2"),
    *("gemma4_text", "phimoe", "llama4_text", "deepseek_v32", "mamba", "bloom", "falcon", "nemotron", "stablelm"),
    *("gemma4_unified", "zaya", "xlnet", "musicgen", "minimax", "recurrent_gemma"),
)
ROW = re.compile(r"^\| (works|refused|not built) \| .* \| (.*) \|$", re.MULTILINE)


def outcomes_of_page(sweep: ModuleType, kind: object) -> dict[str, str]:
    """Outcomes of a section, by model type; the section has to be of the Transformers that is installed."""
    introductions = importlib.import_module("page_sections").INTRODUCTIONS
    heading = introductions[kind.name].partition("\n")[0]
    section = sweep.PAGE.read_text().split(heading)[1].split("\n## ")[0]
    if f"Transformers {transformers.__version__}," not in section[:300]:
        pytest.skip(f"the page was made with another Transformers than {transformers.__version__}")
    return {model_type: row[1] for row in ROW.finditer(section) for model_type in row[2].split(", ")}


def test_verdicts_are_the_outcomes_of_training(sweep: ModuleType) -> None:
    kind = sweep.TEXT
    outcomes, found = outcomes_of_page(sweep, kind), {}
    for config_class in kind.config_classes(SAMPLE):
        name, model_type = kind.mapping[config_class].__name__, config_class.model_type
        try:
            candidate = Candidate(model_type, tiny_config(config_class), kind.auto_class.from_config, name)
            verdict, _ = judge(candidate, find_gpu("cpu"), LONGEST_TOKENS)
        except Exception:  # of a configuration or a class that does not go with small sizes
            found[model_type] = sweep.NOT_BUILT
        else:
            found[model_type] = sweep.REFUSED if verdict.status == "refused" else sweep.WORKS

    assert found == {model_type: outcomes[model_type] for model_type in SAMPLE}
    assert {*found.values()} == {sweep.WORKS, sweep.REFUSED, sweep.NOT_BUILT}
