"""The script that runs Transformers' own tests with distca: a tiny tree of tests with known outcomes, in its real
processes, and what the script makes of them."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, testing_utils

import distca_hf  # noqa: F401 (makes "distca" known)
from distca_hf.integrations.models.forward_watch import watch_of
from support.commands import REPOSITORY, run_command
from support.models import tiny_config


SCRIPT = REPOSITORY / "scripts" / "models" / "upstream_tests.py"
VERSION = '__version__ = "5.1.2"\n'
FORMER_NAME = "from transformers.dependency_versions_table import FORMER as SDPA\n"
TESTS_OF_A_MODEL = """
import pytest
from transformers.dependency_versions_table import gone_without_a_trace

from distca_hf.errors import UnsupportedAttentionError
from tests.shared import SDPA


@pytest.fixture
def distca(request):
    return request.config.getoption("attention") != SDPA


class TestFake:
    def test_passes(self, distca):
        pass

    def test_fails_with_distca(self, distca):
        assert not distca

    def test_refused(self, distca):
        if distca:
            raise UnsupportedAttentionError("FakeAttention of layer 3: sinks of shape (2, 7) are not computed")

    def test_sdpa_can_dispatch_non_composite_models(self, distca):
        if distca:
            raise AssertionError("False is not true")

    def test_fails_with_both(self):
        gone_without_a_trace()

    def test_skipped(self):
        pytest.skip("needs a GPU")

    def test_skipped_with_distca(self, distca):
        if distca:
            pytest.skip("not for distca")

    def test_eager_matches_sdpa_inference_00_fp16_pad(self, distca):
        pass
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "models")


@pytest.fixture
def outcomes(scripts: None) -> ModuleType:
    return importlib.import_module("upstream.outcomes")


@pytest.fixture
def plugin(scripts: None) -> ModuleType:
    return importlib.import_module("upstream.plugin")


def make_tree(tree: Path, **files: str) -> Path:
    """A source tree with these files in its folder of tests; two underscores part folders."""
    for name, text in files.items():
        path = tree / "tests" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tree


def run_script(*arguments: str | Path) -> str:
    return run_command([sys.executable, SCRIPT, "--families", "fake", *arguments], PYTHONPATH="")


def test_every_outcome_is_named_and_faults_make_the_command_fail(tmp_path: Path) -> None:
    fake = make_tree(tmp_path / "first", models__fake__test_modeling_fake=TESTS_OF_A_MODEL)
    rest = make_tree(tmp_path / "second", models__fake__test_modeling_fake="1 / 0", shared=FORMER_NAME)
    sources = rest / "src" / "transformers"
    sources.mkdir(parents=True)
    (sources / "__init__.py").write_text(VERSION)
    (sources / "dependency_versions_table.py").write_text(
        'from .dependency_versions_table import deps\n\nFORMER = "sdpa"\n'
    )
    page = tmp_path / "page.md"
    page.write_text("# Models\n\nA table.\n\n## Transformers' own tests\n\nOld.\n\n## More\n\nKept.\n")

    trees = ["--transformers", fake, "--transformers", rest]
    with pytest.raises(AssertionError, match="ended with 1") as failed:
        run_script(*trees, "--page", page)

    told = str(failed.value)
    installed = f"transformers {transformers.__version__} is installed"
    assert f"tests: tests/models/fake/test_modeling_fake.py of an unknown version; {installed}\n" in told
    assert f"tests: tests/shared.py of 5.1.2; {installed}\n" in told
    faults = {"test_fails_with_distca: AssertionError: assert not True", "test_skipped_with_distca: skipped"}
    for fault in faults:
        assert f"FAILS WITH DISTCA ALONE fake, models: TestFake::{fault}" in told
    assert told.count("FAILS WITH DISTCA ALONE") == len(faults)
    assert "fake, models, sdpa: {" in told
    assert "fake, attention, distca: {'passed': 1}" in told
    assert "fake, attention, sdpa: {" not in told
    text = page.read_text()
    assert text.startswith("# Models\n\nA table.\n\n## Transformers' own tests\n\n")
    assert "| models | 1 | 1 | 1 | 2 | 1 |" in text
    assert "| 1 | 1 | UnsupportedAttentionError: sinks of shape (2, 7) are not computed | `test_refused` |" in text
    assert "Old." not in text
    assert text.endswith("\n\n## More\n\nKept.\n")


def test_tests_that_pass_make_the_command_succeed(
    scripts: None, outcomes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them runs with sdpa."""
    command, ran = importlib.import_module("upstream_tests"), list[str]()

    def run_suite(project: object, folder: Path, family: str, suite: str, attention: str, tests: object) -> Any:
        ran.append(f"{suite}, {attention}")
        return {"test_passes": outcomes.Outcome("passed")}

    monkeypatch.setattr(command, "run_suite", run_suite)
    tree = make_tree(tmp_path, models__fake__test_modeling_fake="")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--families", "fake", "--transformers", str(tree)])
    with pytest.raises(SystemExit) as ended:
        command.main()

    assert ended.value.code == 0
    assert ran == ["models, distca", "attention, distca"]


def test_process_that_dies_is_no_result(tmp_path: Path) -> None:
    tests = "import os\n\ndef test_passes(): pass\n\ndef test_dies(): os._exit(0)\n"
    tree = make_tree(tmp_path, models__fake__test_modeling_fake=tests)

    with pytest.raises(AssertionError, match="fake, models, distca: pytest ended with 0 in test_dies"):
        run_script("--transformers", tree)


def test_section_is_made_replaced_or_added(scripts: None, tmp_path: Path) -> None:
    sections = importlib.import_module("page_sections")
    page = tmp_path / "page.md"
    for section in ("# A\n\nold\n", "## B\n\nfirst\n\n### Part\n", "## C\n", "## B\n\nsecond\n", "# A\n\nnew\n"):
        sections.write_section(page, section)

    assert page.read_text() == "# A\n\nnew\n\n## B\n\nsecond\n\n## C\n"
    page.write_text("## B\n\n## B\n")
    with pytest.raises(ValueError, match="2 sections with the heading '## B'"):
        sections.write_section(page, "## B\n")


def test_assertion_about_the_default_is_known_by_its_test_and_its_words(outcomes: ModuleType) -> None:
    known = "FakeTest::test_sdpa_can_dispatch_non_composite_models"
    asserts = outcomes.Outcome("failed", "AssertionError: False is not true")
    wrong = outcomes.Outcome("failed", "AssertionError: Tensor-likes are not close!")
    passed = outcomes.Outcome("passed")

    assert outcomes.meaning(known, asserts, passed) == "asserts sdpa"
    assert outcomes.meaning(known, wrong, passed) == "other"
    assert outcomes.meaning(f"{known}_again", asserts, passed) == "other"


def test_wrong_numbers_in_a_subtest_are_not_hidden_by_a_refusal(plugin: ModuleType, outcomes: ModuleType) -> None:
    refused = outcomes.Outcome("failed", "UnsupportedAttentionError: no", True)
    wrong = outcomes.Outcome("failed", "AssertionError: 1 is not 2")
    skipped, passed = outcomes.Outcome("skipped"), outcomes.Outcome("passed")

    assert plugin.worst([refused, wrong, passed]) == wrong
    assert plugin.worst([passed, refused]) == refused
    assert plugin.worst([skipped, passed]) == passed


@pytest.mark.parametrize(
    ("suite", "chosen"),
    [
        ("models", {None: "distca", "sdpa": "sdpa", "eager": "eager"}),
        ("attention", {None: "distca", "sdpa": "distca", "flash_attention_2": "distca", "eager": "eager"}),
    ],
)
def test_models_get_distca_where_another_attention_is_replaced(
    suite: str, chosen: dict[str | None, str], plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "_check_and_adjust_attn_implementation"
    monkeypatch.setattr(PreTrainedModel, method, getattr(PreTrainedModel, method))  # is put back behind the test
    plugin.replace_attention(PreTrainedModel, plugin.REPLACED[suite], "distca")

    models = {
        asked: AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=asked) for asked in chosen
    }
    assert {asked: model.config._attn_implementation for asked, model in models.items()} == chosen


def test_models_are_enabled_as_they_train(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedModel, "train", PreTrainedModel.train)  # is put back after the test
    plugin.enable_all()
    usual, ours = (
        AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=name) for name in ("sdpa", "distca")
    )

    assert watch_of(ours.eval()) is None
    assert watch_of(usual.train()) is None
    assert watch_of(ours.train()) is not None
    assert watch_of(ours.model) is None


def test_attention_tests_run_without_a_gpu(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in plugin.LIFTED_REQUIREMENTS:
        monkeypatch.setattr(testing_utils, name, getattr(testing_utils, name))  # is put back behind the test
    plugin.lift_requirements()

    def test() -> None: ...

    assert testing_utils.require_flash_attn(testing_utils.slow(test)) is test
    assert testing_utils.require_torch_accelerator(test) is test
