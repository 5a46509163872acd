"""`python shard_on_cpu.py SCRIPT [ARGUMENTS]`: runs a script whose FSDP or DeepSpeed is real, on CPUs."""

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
    runpy.run_path(sys.argv[0], run_name="__main__")
