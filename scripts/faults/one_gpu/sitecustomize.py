"""Lets an attention server share the first GPU with trainers, to try losses over NCCL on a machine with one GPU.

Python imports this file in every process whose PYTHONPATH holds its folder. NCCL refuses two ranks on a GPU, unless it
is of version 2.30 or later and `NCCL_MULTI_RANK_GPU_ENABLE=1` is set.
"""

import os
import sys


if "distca_hf.servers.server" in sys.orig_argv:
    os.environ["LOCAL_RANK"] = "0"

    from distca_hf.servers import memberships

    place_of = memberships.place_of
    memberships.place_of = lambda device: {**place_of(device), "gpu": "shared"}
