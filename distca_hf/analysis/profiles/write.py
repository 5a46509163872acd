"""Writes a profile, with the table of the setting `kernel_times` beside it."""

import json
from pathlib import Path

from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.analysis.profiles.kernel_times import kernel_times_of
from distca_hf.analysis.profiles.shipped import DEFAULT_FILE
from distca_hf.errors import ConfigError
from distca_hf.whole_file import replaced


def write(profile: ClusterProfile, path: Path) -> None:
    """Writes a profile; the file can also be given to the setting `kernel_times`.

    Raises:
        ConfigError: the file cannot be written.
    """
    content = profile.as_json() | {"kernel_times": kernel_times_of(profile.attention[0])}
    try:
        with replaced(path, named=path != DEFAULT_FILE) as unfinished:
            unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
