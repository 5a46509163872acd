"""Shipped profiles, and the profile that a name or a path stands for."""

import math
from dataclasses import replace
from importlib import resources
from pathlib import Path

from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.errors import ConfigError, did_you_mean
from distca_hf.flops import H100_GIB, gpu_of_device, peak_flops


FOLDER = "distca_hf.analysis.profiles"
# Profile that is taken where none is named, and file that one is written to.
DEFAULT_PROFILE, DEFAULT_FILE = "h200", Path("cluster.json")


def shipped_profiles() -> dict[str, Path]:
    """Returns the files of all profiles that come with the package, by name."""
    files = (Path(str(file)) for file in resources.files(FOLDER).iterdir() if file.name.endswith(".json"))
    return {file.stem: file for file in sorted(files)}


def find_profile(name: str) -> ClusterProfile:
    """Returns the profile of a file, or the shipped one of a name.

    Raises:
        ConfigError: there is neither; of a GPU without a profile it names the nearest one that has one.
    """
    shipped = shipped_profiles()
    if name.lower() in shipped:
        return replace(ClusterProfile.load(shipped[name.lower()]), source=name.lower())
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        return ClusterProfile.load(path)
    known = f"{', '.join(shipped)}, or a file that `distca profile` wrote"
    peak = _peak(name)
    if peak is None:
        raise ConfigError(f"--cluster {name}: choose one of {known}.{did_you_mean(name, shipped)}")

    def apart(other: str) -> float:
        return abs(math.log((_peak(other) or 1.0) / peak))

    nearest = min(shipped, key=apart)
    raise ConfigError(
        f"--cluster {name}: there is no measured profile of this GPU. The nearest is {nearest}, whose peak is "
        f"{(_peak(nearest) or 0) / peak:.2f} times as high: give --cluster {nearest}, the "
        "memory of yours by --gpu-gib, and take only ratios, or measure one with `distca profile`"
    )


def profile_of_device(device: str) -> ClusterProfile | None:
    """Returns the shipped profile of a GPU, by the name that torch has for it; None if there is none."""
    gpu = gpu_of_device(device)
    profiles = map(find_profile, shipped_profiles() if gpu else ())
    return next((profile for profile in profiles if gpu_of_device(profile.made.device) == gpu), None)


def gpu_gib_of(profile: ClusterProfile) -> float:
    """Returns the memory of the GPU of a profile, in GiB; of an unknown one that of an H100."""
    return known_gib(profile) or H100_GIB


def known_gib(profile: ClusterProfile) -> float | None:
    """Returns the memory of the GPU of a profile, in GiB; None of an unknown one."""
    gpu = gpu_of_device(profile.made.device)
    return None if gpu is None else gpu.gib


def _peak(name: str) -> float | None:
    """Returns the peak of a GPU that is named in short, such as h100 or a100."""
    return peak_flops(name.replace("_", " "))
