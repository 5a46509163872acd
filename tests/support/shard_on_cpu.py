"""`python shard_on_cpu.py SCRIPT [ARGUMENTS]`: runs a script whose FSDP, DeepSpeed or tensor ranks are real, on CPUs.
Instead of a script it takes `-m MODULE`, too."""

import runpy
import sys
from pathlib import Path


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.training import let_accelerate_shard_on_cpu

    let_accelerate_shard_on_cpu()

    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed would compile collectives of its own first
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
