"""Lets programs run on CPU processes: `python -m on_cpus MODULE ARGUMENTS`, in both runs.

    all         keep their process group until the process ends. If a DDP model is dropped after its group, torch may
                wait for ever for a thread of gloo, which waits for the interpreter's lock.
    axolotl     gives every rank a GPU by its number.
    ms-swift    packs only for attention of certain names, which run on GPUs. It imports this file by its option
                `--external_plugins`.

None of it is needed with GPUs.
"""

import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist


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
    dist.destroy_process_group = lambda group=None: None
    del sys.argv[0]
    if sys.argv[0].startswith("axolotl"):
        place_axolotl()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
elif "swift" in sys.modules:
    pack_in_swift()
