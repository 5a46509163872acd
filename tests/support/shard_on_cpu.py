"""`python shard_on_cpu.py SCRIPT [ARGUMENTS]`: runs a script whose FSDP, DeepSpeed or tensor ranks are real, on CPUs.
Instead of a script it takes `-m MODULE`, too."""

import os
import runpy
import sys
from typing import Any


def let_accelerate_shard_on_cpu() -> None:
    """Accelerate runs plain DDP when FSDP or DeepSpeed is asked for on a CPU; this takes its accelerator path over
    gloo instead."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.pop("ACCELERATE_USE_CPU", None)
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def prepare_backend(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = prepare_backend


if __name__ == "__main__":
    let_accelerate_shard_on_cpu()

    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed would compile collectives of its own first
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
