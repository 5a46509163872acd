"""Lets programs run on CPU processes that their frameworks would refuse; imported by them, in both runs.

    axolotl     gives every rank a GPU by its number. Run as `python -m on_cpus CONFIGURATION`.
    ms-swift    packs only for attention of certain names, which run on GPUs. Named in `--external_plugins`.

Nothing of it is needed with GPUs.
"""

import runpy
import sys
from typing import Any

import torch


def place_axolotl() -> None:
    """Lets Transformers place a model of axolotl, and asks for no link between GPUs."""
    from axolotl.loaders.model import ModelLoader

    place = ModelLoader._set_device_map_config

    def on_cpu(loader: Any) -> None:
        place(loader)
        loader.model_kwargs["device_map"] = None

    ModelLoader._set_device_map_config = on_cpu
    torch.cuda.can_device_access_peer = lambda *devices: False
    torch._C._get_accelerator = lambda *check: torch.device("cpu")


def pack_in_swift() -> None:
    """Lets ms-swift pack for sdpa, for which Transformers keeps documents apart by their positions."""
    from swift.arguments.sft_args import SftArguments

    def without_names(arguments: Any) -> None:
        arguments.padding_free = arguments.padding_free or arguments.packing

    SftArguments._check_padding_free = without_names


if __name__ == "__main__":
    place_axolotl()
    runpy.run_module("axolotl.cli.train", run_name="__main__", alter_sys=True)
elif "swift" in sys.modules:
    pack_in_swift()
