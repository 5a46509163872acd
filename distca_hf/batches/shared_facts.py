"""Facts: versions and settings that ranks must share before they plan anything together."""

from functools import cache
from importlib.metadata import version

from distca_hf.config import DistCAConfig
from distca_hf.version import __version__


# Packages whose versions decide what a rank computes, or in which order it makes its collective calls.
PACKAGES = ("torch", "transformers", "accelerate")


def shared_facts(config: DistCAConfig) -> dict[str, object]:
    """Returns versions of packages, and settings, by name."""
    return {**_versions(), **config.shared_settings()}


@cache
def _versions() -> dict[str, str]:
    """Returns versions without the part that names a build ("+cu130"): builds for several GPUs may train together."""
    return {"distca_hf": __version__} | {name: version(name).partition("+")[0] for name in PACKAGES}
