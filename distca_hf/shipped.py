"""Shipped: files that come with the package and have names: recipes, Slurm scripts, examples, samples of lengths.

In a checkout their folders are beside the package; an installation puts them inside (`setup.cfg`).
"""

from dataclasses import dataclass
from pathlib import Path

from distca_hf.errors import ConfigError, did_you_mean


PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Shipped:
    """One kind of shipped files.

    Attributes:
        kind: name of one of them in messages.
        place: their folder, in the package or beside it.
        endings: endings of the files; a file is found by its name without the ending.
    """

    kind: str
    place: str
    endings: tuple[str, ...]

    def folder(self) -> Path:
        """Returns the folder of the files: inside the installed package, or beside it in a checkout.

        Raises:
            ConfigError: there is no such folder.
        """
        for folder in (PACKAGE / self.place, PACKAGE.parent / self.place):
            if folder.is_dir():
                return folder
        raise ConfigError(f"no folder {PACKAGE / self.place}; install distca_hf again")

    def files(self) -> dict[str, Path]:
        """Returns all files by name, such as `train/quickstart`."""
        folder = self.folder()
        return {
            path.relative_to(folder).as_posix().removesuffix(ending): path
            for ending in self.endings
            for path in sorted(folder.rglob(f"*{ending}"))
        }

    def find(self, name: str) -> Path:
        """Returns the file at the path `name`, or the shipped file of that name, with or without its folder.

        Raises:
            ConfigError: there is no such file, or there are several shipped files of that name.
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
