"""Version of the package, and the lowest versions of the packages that it builds on.

`import distca_hf` refuses older packages. Otherwise they would fail later, at the first name that they lack. Newer
packages than the tested ones are accepted.
"""

import importlib.metadata
import re

from distca_hf.errors import VersionError


__version__ = "0.1.0"

# Lowest versions of the packages whose internals this package uses; the same as `dependencies` in pyproject.toml.
LOWEST = {"torch": "2.11", "transformers": "5.6", "accelerate": "1.11"}


def check_versions() -> None:
    """Compares installed versions with the lowest supported ones, without importing a package.

    A missing package is not an error here, because planning needs no torch: the first import that needs it will fail.

    Raises:
        VersionError: packages are too old; names each with both versions, and the command that updates them.
    """
    found = installed_versions(*LOWEST)
    old = {name: version for name, version in found.items() if older_than(name, LOWEST[name])}
    if old:
        needs = ", ".join(f"{name} {LOWEST[name]} or newer (found {version})" for name, version in old.items())
        wanted = " ".join(f'"{name}>={LOWEST[name]}"' for name in old)
        raise VersionError(f"distca_hf {__version__} needs {needs}: pip install --upgrade {wanted}")


def older_than(name: str, lowest: str) -> bool:
    """Returns whether the installed version of a package is before `lowest`, comparing two numbers."""
    version = _installed(name)
    return version is not None and _numbers(version) < _numbers(lowest)


def installed_versions(*names: str) -> dict[str, str]:
    """Returns the versions of packages, by name, without missing ones."""
    found = {name: _installed(name) for name in names}
    return {name: version for name, version in found.items() if version is not None}


def _installed(name: str) -> str | None:
    """Returns the version in the package's metadata; None if the package is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version: pre-releases and builds (2.11.0a0+git) count as their release."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
