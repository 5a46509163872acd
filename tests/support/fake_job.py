"""One process that passes for a rank of a job: torch's fake process group, whose collectives do nothing.

Transformers divides models over it as in a real job, without starting the other ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_job(world_size: int, rank: int = 0) -> Iterator[None]:
    """Makes this process a rank of a job, until the end of the block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
