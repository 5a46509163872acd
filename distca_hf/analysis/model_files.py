"""Model files: configurations on disk, read without Transformers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distca_hf.errors import ConfigError
from distca_hf.whole_file import read_at_most


CONFIG_FILE, MOST_CONFIG_BYTES = "config.json", 2**26


def read_config(path: Path) -> dict[str, object]:
    """Reads a config.json.

    Raises:
        ConfigError: the file cannot be read, or holds no object.
    """
    try:
        with path.open("rb") as file:
            config = json.loads(read_at_most(file, MOST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model config {path} must be a JSON object, as Transformers' config.json is")
    return config


def content_of(path: Path) -> str:
    """Returns what a path is that holds no configuration of Transformers, and what to give instead."""
    if not path.is_dir():
        return f"give its folder, or its {CONFIG_FILE}; {path.suffix or 'such a file'} is not read"
    if (path / "adapter_config.json").is_file():
        base = read_config(path / "adapter_config.json").get("base_model_name_or_path")
        return f"it holds an adapter of PEFT, give its base model {base}"
    if (path / "params.json").is_file():
        return "it is in the format of Meta or Mistral (params.json), give a version that was converted"
    return f"the folder has no {CONFIG_FILE}"


@contextmanager
def without_hub() -> Iterator[None]:
    """Keeps Transformers off the network, except for what is in its cache. The configuration in a file may name
    kernels, code and backbones on the Hub, and planning needs none of them.

    Raises:
        ConfigError: it cannot do without one of them.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    except OfflineModeIsEnabled as error:
        address = str(error).removeprefix("Cannot reach ").partition(": ")[0]
        raise ConfigError(f"it needs {address}, and nothing is fetched that a configuration names") from error
    finally:
        constants.HF_HUB_OFFLINE = before
