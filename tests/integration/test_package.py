"""The wheel: top-level folders are installed inside the package, and everything is found from there. The source
distribution: it holds the whole project, and makes the same wheel. Every installation works in every folder."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from distca_hf.recipe import RECIPES
from distca_hf.version import __version__
from support.commands import REPOSITORY, run_command


# Folders of the checkout, by the place they are installed to; a folder inside of another is not part of that one.
INSTALLED = {
    "distca_hf": "distca_hf",
    "distca_hf/examples": "examples",
    "distca_hf/patches": "patches",
    "distca_hf/recipes": "recipes",
    "distca_startup": "patches/startup",
}
STARTUP = "distca_startup.pth"
ENDINGS = (".py", ".yaml", ".json", ".typed", ".sbatch", ".gz", ".md", ".html", ".css", ".js")
# Folders of data inside of a package.
DATA_FOLDERS = {Path("distca_hf/analysis/report/page")}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def shipped_files() -> dict[str, Path]:
    """Files that must be in the wheel, by their place in it."""
    files = {}
    for place, folder in INSTALLED.items():
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in ENDINGS and "__pycache__" not in path.parts and "output" not in str(path):
                files[path] = f"{place}/{path.relative_to(REPOSITORY / folder).as_posix()}"
    return {name: path for path, name in files.items()}


def project_files() -> list[str]:
    """Files of the checkout that git holds, or would."""
    listed = run_command(["git", "ls-files", "--cached", "--others", "--exclude-standard"]).splitlines()
    return [name for name in listed if (REPOSITORY / name).is_file()]


def copy_project(folder: Path) -> Path:
    """Copies the project: building writes into the folder it builds from."""
    for name in project_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


def build_wheel(source: Path, wheels: Path) -> Path:
    """The wheel of a folder or of a source distribution, built without a network."""
    run_command([*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", wheels, source])
    (built,) = wheels.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(copy_project(tmp_path_factory.mktemp("checkout")), tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution."""
    folder = tmp_path_factory.mktemp("sdists")
    program = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run_command([sys.executable, "-c", program, folder], cwd=copy_project(tmp_path_factory.mktemp("checkout")))
    (built,) = folder.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """For every way to install a fresh clone: the Python of an environment of its own, and the clone. The environment
    sees the other packages of the one that runs the tests, and not its distca_hf."""
    found = {}
    for way in ("pip install .", "pip install -e .", "wheel", "sdist"):
        folder = tmp_path_factory.mktemp("installed")
        clone = copy_project(folder / "clone")
        venv.create(folder / "venv")
        python = folder / "venv" / "bin" / "python"
        (packages,) = folder.glob("venv/lib/python*/site-packages")
        (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
        source = {"wheel": [wheel], "sdist": [sdist], "pip install .": ["."], "pip install -e .": ["-e", "."]}[way]
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
        run_command([python, *PIP[1:], "install", *options, *source], cwd=clone)
        found[way] = python, clone
    return found


@pytest.fixture(scope="module")
def site(installed: dict[str, tuple[Path, Path]]) -> Path:
    """The folder of packages into which the wheel was installed."""
    python, _ = installed["wheel"]
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    return packages


def run_installed(site: Path, folder: Path, program: str, *arguments: str) -> str:
    """What a program prints that sees the installed wheel, in a folder."""
    return run_command([site.parents[2] / "bin" / "python", "-c", program, *arguments], cwd=folder)


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    contents = {name for name in names if ".dist-info/" not in name}

    assert contents == {*shipped_files(), STARTUP}
    assert {
        "distca_hf/py.typed",
        "distca_hf/patches/attention.py",
        "distca_hf/recipes/train/quickstart.yaml",
        "distca_hf/recipes/slurm/two_nodes.sbatch",
        "distca_hf/examples/train_causal_lm.py",
        "distca_hf/examples/lengths/pretrain.json.gz",
        "distca_hf/analysis/report/page/report.html",
    } <= contents
    assert {name.split("/")[0] for name in names} == {
        "distca_hf",
        "distca_startup",
        STARTUP,
        wheel.name.rsplit("-py3", 1)[0] + ".dist-info",
    }


def test_files_in_the_wheel_are_those_of_the_checkout(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)

    assert [name for name, path in shipped_files().items() if archive.read(name) != path.read_bytes()] == []


def test_wheel_says_what_the_project_says(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata, entry_points = (
        next(archive.read(name).decode() for name in archive.namelist() if name.endswith(f".dist-info/{file}"))
        for file in ("METADATA", "entry_points.txt")
    )
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

    assert "distca = distca_hf.cli:main" in entry_points
    assert wheel.name.endswith("-py3-none-any.whl")
    assert (REPOSITORY / project["readme"]).read_text() in metadata
    assert all(f"Provides-Extra: {extra}" in metadata for extra in project["optional-dependencies"])
    assert metadata.count("Requires-Dist: ") == sum(
        len(names) for names in (project["dependencies"], *project["optional-dependencies"].values())
    )
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())


def test_source_distribution_holds_the_whole_project(sdist: Path) -> None:
    """Not in it: what only the repository needs, in files whose names begin with a dot."""
    with tarfile.open(sdist) as archive:  # in the archive's order: going back means to unpack it again from the start
        files = [member for member in archive if member.isfile() and ".egg-info/" not in member.name]
        contents = {file.name.partition("/")[2]: archive.extractfile(file).read() for file in files}  # type: ignore[union-attr]
    held = contents.keys() - {"PKG-INFO"}
    other = [  # setuptools adds a section to setup.cfg
        name for name in held - {"setup.cfg"} if contents[name] != (REPOSITORY / name).read_bytes()
    ]

    assert held == {name for name in project_files() if not name.startswith(".")}
    assert {"CHANGELOG.md", "CITATION.cff", "docs/trainer.md", "examples/lora.py", "tests/conftest.py"} <= held
    assert other == []


def test_source_distribution_makes_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    ours, theirs = zipfile.ZipFile(wheel), zipfile.ZipFile(build_wheel(sdist, tmp_path))

    assert sorted(theirs.namelist()) == sorted(ours.namelist())
    assert [name for name in ours.namelist() if theirs.read(name) != ours.read(name)] == []


def test_citation_says_what_the_project_says() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

    assert citation["version"] == __version__
    assert citation["license"] == project["license"]
    assert citation["authors"] == project["authors"]
    assert [reference["url"] for reference in citation["references"]] == [project["urls"]["Paper"]]


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml")), ids=lambda p: p.name
)
def test_issue_form_asks_each_question_once(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    questions = [question["id"] for question in form["body"]]

    assert {"name", "description", "body"} <= set(form)
    assert len(set(questions)) == len(questions) > 0
    assert all(question["type"] == "textarea" and question["attributes"]["label"] for question in form["body"])


def test_list_of_packages_is_that_of_the_tree() -> None:
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    listed = config["options"]["packages"].split()
    folders = {folder for name in shipped_files() for folder in Path(name).parents[:-1]} - DATA_FOLDERS

    assert listed == sorted(folder.as_posix().replace("/", ".") for folder in folders)


def test_patches_are_no_top_level_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import patches"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "ImportError: this folder is installed as distca_hf.patches" in done.stderr


SCRIPT = """
import sys
import distca_hf
from importlib.resources import files
from distca_hf.patches.attention import attention
found = files("distca_hf.examples").joinpath("train.py").is_file()
print(attention.name, found, "distca_startup" in sys.modules, distca_hf.__file__)
"""


@pytest.mark.parametrize("way", ["pip install .", "pip install -e .", "wheel", "sdist"])
@pytest.mark.parametrize("place", ["root of the clone", "another folder"])
def test_every_installation_works_in_every_folder(
    way: str, place: str, installed: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """In the root of the clone its own package is imported, whatever is installed."""
    python, clone = installed[way]
    folder = clone if place == "root of the clone" else tmp_path
    (folder / "mine.py").write_text(SCRIPT)
    name, found, started, package = run_command([python, "mine.py"], cwd=folder, DISTCA_ATTACH="1").split()
    recipe = Path(run_command([python, "-m", "distca_hf", "recipes", "cpu_2proc"], cwd=folder).strip())

    assert (name, found, started) == ("attention", "True", "True")
    assert Path(package).is_relative_to(clone) == (folder == clone or way == "pip install -e .")
    assert recipe.is_relative_to(clone) == Path(package).is_relative_to(clone)


def test_clone_uses_its_own_folders_where_another_clone_is_installed(
    installed: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """The finder of an editable installation knows those of its own clone."""
    (_, clone), (python, other) = installed["wheel"], installed["pip install -e ."]
    where = "import distca_hf.patches.attention as patch; print(patch.__file__)"

    assert run_command([python, "-c", where], cwd=clone).strip() == str(clone / "patches" / "attention.py")
    assert run_command([python, "-c", where], cwd=tmp_path).strip() == str(other / "patches" / "attention.py")


def test_package_without_its_folders_says_so(tmp_path: Path) -> None:
    """Where Transformers would name one of its own classes."""
    shutil.copytree(REPOSITORY / "distca_hf", tmp_path / "distca_hf", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", "import distca_hf.patches"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert re.search(
        r"ImportError: .*/distca_hf was copied without the folder patches/, .*copy that as well", done.stderr
    )


def test_installed_package_finds_its_recipes(site: Path, tmp_path: Path) -> None:
    program = """
import distca_hf
from distca_hf.recipe import Recipe
from distca_hf.recipe import EXAMPLES, LENGTHS, RECIPES
print(distca_hf.__file__)
print(RECIPES.folder())
print(*RECIPES.files())
print(Recipe.read(RECIPES.find("quickstart")).plugin["tokens_per_rank"])
print(EXAMPLES.find("lora"))
print(LENGTHS.find("pretrain"))
"""
    where, recipes, names, tokens_per_rank, lora, lengths = run_installed(site, tmp_path, program).splitlines()

    assert where == str(site / "distca_hf" / "__init__.py")
    assert recipes == str(site / "distca_hf" / "recipes")
    assert names.split() == list(RECIPES.files())
    assert tokens_per_rank == "4096"
    assert lora == str(site / "distca_hf" / "examples" / "lora.py")
    assert lengths == str(site / "distca_hf" / "examples" / "lengths" / "pretrain.json.gz")


def test_installed_package_is_a_plugin_of_axolotl(site: Path, tmp_path: Path) -> None:
    program = """
from importlib.metadata import entry_points
from importlib.util import find_spec
(point,) = [point for point in entry_points(group="axolotl.plugins") if point.name == "distca"]
print(point.value, find_spec(point.module).origin)
"""
    value, file = run_installed(site, tmp_path, program).split()

    assert value == "distca_hf.axolotl:BalancedTraining"
    assert file == str(site / "distca_hf" / "axolotl.py")


def test_installed_command_prints_the_path_of_a_recipe(site: Path, tmp_path: Path) -> None:
    printed = run_installed(site, tmp_path, "from distca_hf.cli import main; main()", "recipes", "cpu_2proc")

    assert printed.strip() == str(site / "distca_hf" / "recipes" / "accelerate" / "cpu_2proc.yaml")


def test_installed_command_trains_plans_and_reports_without_a_checkout(site: Path, tmp_path: Path) -> None:
    """Every file on the line is one that was installed; the first recipe has its own script and configuration."""
    line = run_installed(
        site, tmp_path, "from distca_hf.cli import main; main()", "train", "quickstart", "--steps", "3", "--dry-run"
    )
    planned = run_installed(
        site,
        tmp_path,
        "from distca_hf.cli import main; main()",
        *("plan", "prolong", "--gpus", "4", "--tokens-per-rank", "65536", "--overlong", "truncate", "--json"),
    )
    (tmp_path / "plan.json").write_text(planned)
    run_installed(site, tmp_path, "from distca_hf.cli import main; main()", "report", "plan.json")
    files = [Path(word) for word in shlex.split(line) if "/" in word]

    assert [file.name for file in files] == ["cpu_2proc.yaml", "quickstart.yaml", "quickstart.py"]
    assert all(file.is_relative_to(site) and file.is_file() for file in files)
    assert line.split()[-2:] == ["--steps", "3"]
    assert "fingerprint" in planned
    assert "One layer, from within" in (tmp_path / "report.html").read_text(), "templates are installed"


def test_script_in_the_root_of_the_clone_registers_with_the_patches_there(
    installed: dict[str, tuple[Path, Path]],
) -> None:
    """As README has it after `pip install .`: the clone is not needed, and hides what was installed."""
    program = """
import distca_hf, transformers
print("distca" in transformers.AttentionInterface(), distca_hf.DistCAPlugin().tokens_per_rank)
import distca_hf.patches.attention as patch
print(patch.__file__)
"""
    python, clone = installed["pip install ."]
    registered, patch = run_command([python, "-c", program], cwd=clone).splitlines()

    assert registered == "True 0"
    assert patch == str(clone / "patches" / "attention.py")
