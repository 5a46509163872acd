"""Files that come with the package and are found by name: recipes, Slurm scripts, examples, samples of lengths.

They are folders of the checkout that an installation puts inside the package (`setup.cfg`).
"""

from dataclasses import dataclass
from pathlib import Path

from distca_hf.errors import ConfigError, did_you_mean


PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Shipped:
    """One kind of files.

    Attributes:
        kind: what one of them is called in messages.
        place: their folder, in the package or beside it.
        endings: of their names; what is left without them is the name they are found by.
    """

    kind: str
    place: str
    endings: tuple[str, ...]

    def folder(self) -> Path:
        """Returns where they are: inside the installed package, or beside it in a checkout.

        Raises:
            ConfigError: nowhere.
        """
        for folder in (PACKAGE / self.place, PACKAGE.parent / self.place):
            if folder.is_dir():
                return folder
        raise ConfigError(f"no folder {PACKAGE / self.place}; install distca_hf again")

    def files(self) -> dict[str, Path]:
        """Returns all of them by name, such as `train/quickstart`."""
        folder = self.folder()
        return {
            path.relative_to(folder).as_posix().removesuffix(ending): path
            for ending in self.endings
            for path in sorted(folder.rglob(f"*{ending}"))
        }

    def find(self, name: str) -> Path:
        """Returns the file at the path `name`, or the shipped one of that name; its folder may be left out.

        Raises:
            ConfigError: there is neither, or there are several of that name.
        """
        if Path(name).exists() and not Path(name).is_dir():
            return Path(name)
        files = self.files()
        matches = [known for known in files if name in (known, known.split("/")[-1])]
        if len(matches) > 1:
            raise ConfigError(f"{name!r} may be {' or '.join(matches)}; write the folder, too")
        if not matches:
            hint = did_you_mean(name, [*files, *(known.split("/")[-1] for known in files)])
            raise ConfigError(f"{name!r} is no file and no shipped {self.kind}.{hint} Shipped are {', '.join(files)}")
        return files[matches[0]]


RECIPES = Shipped("recipe", "recipes", (".yaml", ".sbatch"))
EXAMPLES = Shipped("example", "examples", (".py",))
LENGTHS = Shipped("sample of lengths", "examples/lengths", (".json.gz",))
