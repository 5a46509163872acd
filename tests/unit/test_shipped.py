"""Files that ship with the package: found by path, by name and by short name; listed by the `distca` command."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from distca_hf import recipe
from distca_hf.cli import app
from distca_hf.errors import ConfigError
from distca_hf.recipe import EXAMPLES, LENGTHS, RECIPES, Shipped


KINDS = pytest.mark.parametrize("kind", [RECIPES, EXAMPLES, LENGTHS], ids=lambda kind: kind.place)


@KINDS
def test_each_is_found_by_path_by_name_and_by_short_name(
    kind: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("")
    monkeypatch.chdir(tmp_path)

    assert kind.find("mine") == Path("mine")
    assert kind.find(str(tmp_path / "mine")) == tmp_path / "mine"
    assert len(kind.files()) > 1
    for name, path in kind.files().items():
        assert kind.find(name) == kind.find(name.split("/")[-1]) == path
        assert path.is_file()


def test_all_kinds_of_files_are_there() -> None:
    assert {"accelerate/cpu_2proc", "slurm/two_nodes", "train/quickstart"} <= set(RECIPES.files())
    assert {"train_causal_lm", "quickstart"} <= set(EXAMPLES.files())
    assert set(LENGTHS.files()) == {"pretrain", "prolong"}


def test_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"'quickstar' is neither a file nor a shipped recipe\. Did you mean 'quickstart'"
    ):
        RECIPES.find("quickstar")
    with pytest.raises(ConfigError) as caught:
        RECIPES.find("x")

    assert all(name in str(caught.value) for name in RECIPES.files())


def test_short_name_of_two_files_is_refused_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("accelerate/small", "train/small", "train/large"):
        (tmp_path / "recipes" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "recipes" / f"{name}.yaml").write_text("{}")
    monkeypatch.setattr(recipe, "PACKAGE", tmp_path)

    assert RECIPES.find("large") == tmp_path / "recipes" / "train" / "large.yaml"
    assert RECIPES.find("train/small") == tmp_path / "recipes" / "train" / "small.yaml"
    with pytest.raises(ConfigError, match=r"^'small' may be accelerate/small or train/small; write the folder, too$"):
        RECIPES.find("small")


def test_package_without_its_files_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "PACKAGE", tmp_path / "nothing")

    with pytest.raises(ConfigError, match=r"no folder .*nothing/recipes; install distca_hf again"):
        RECIPES.files()


@pytest.mark.parametrize(("command", "kind"), [("recipes", RECIPES), ("examples", EXAMPLES)])
def test_command_lists_names_and_prints_paths(command: str, kind: Shipped) -> None:
    listed = CliRunner().invoke(app, [command])
    name = next(iter(kind.files()))
    one = CliRunner().invoke(app, [command, name])
    unknown = CliRunner().invoke(app, [command, "nothing"])

    assert (listed.exit_code, listed.output.split()) == (0, sorted(kind.files()))
    assert (one.exit_code, Path(one.output.strip())) == (0, kind.find(name))
    assert unknown.exit_code == 2
    assert f"distca: 'nothing' is neither a file nor a shipped {kind.kind}" in unknown.output
    assert isinstance(unknown.exception, SystemExit)
