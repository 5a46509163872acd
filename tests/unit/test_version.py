"""Other packages that are too old: named by `import distca_hf`, with both versions."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from distca_hf import errors
from distca_hf.version import LOWEST, __version__, check_versions, older_than


PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def pretend(installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if (found := installed.get(name, LOWEST[name])) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_lowest_versions_are_those_of_pyproject() -> None:
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]

    assert {f"{name}>={version}" for name, version in LOWEST.items()} <= set(dependencies)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("transformers", "5.5.4"),
        ("transformers", "4.57.1"),
        ("torch", "2.9.1+cu128"),
        ("accelerate", "1.9.0"),  # not compared as text: "1.9" > "1.11"
        ("accelerate", "0.34.2"),
    ],
)
def test_an_old_package_is_named_with_both_versions(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend({name: version}, monkeypatch)
    with pytest.raises(ImportError) as refused:
        check_versions()

    assert type(refused.value) is errors.VersionError
    assert str(refused.value) == (
        f"distca_hf {__version__} needs {name} {LOWEST[name]} or newer (found {version}): "
        f'pip install --upgrade "{name}>={LOWEST[name]}"'
    )


def test_all_old_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend({"torch": "2.5.0", "transformers": "4.40.0"}, monkeypatch)
    with pytest.raises(ImportError) as refused:
        check_versions()

    assert re.findall(r"found ([\d.]+)", str(refused.value)) == ["2.5.0", "4.40.0"]
    assert '"torch>=2.11" "transformers>=5.6"' in str(refused.value)


@pytest.mark.parametrize(
    "installed",
    [
        dict(LOWEST),
        {"torch": "2.11.0a0+4c8b2f1.nv26.03", "transformers": "5.6.0.dev0", "accelerate": "1.11.0rc1"},
        {"torch": "3.0.0", "transformers": "6.1.0", "accelerate": "2.0"},
        dict.fromkeys(LOWEST),
    ],
    ids=["lowest", "pre-releases", "newer than tested", "not installed"],
)
def test_other_packages_are_taken(installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(installed, monkeypatch)
    check_versions()


def test_import_refuses_an_old_package_before_it_is_imported(tmp_path: Path) -> None:
    """In a fresh interpreter that finds the metadata of an old Transformers first."""
    metadata = tmp_path / "transformers-4.57.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.1\n")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
try:
    import distca_hf
except ImportError as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "needs transformers 5.6 or newer (found 4.57.1)" in done.stdout
    assert done.stdout.strip().endswith("False")


def test_an_older_package_is_told_from_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend({"transformers": "5.9.1", "torch": None}, monkeypatch)

    assert older_than("transformers", "5.15")
    assert not older_than("transformers", "5.9")
    assert not older_than("torch", "2.11"), "it is not installed"
