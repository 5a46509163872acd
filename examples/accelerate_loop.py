"""A plain Accelerate loop on placed micro-batches, with gradient accumulation.

    accelerate launch --config_file recipes/accelerate/cpu_2proc.yaml examples/accelerate_loop.py

Self-contained: random documents, a tiny Llama, ten steps. The loss that is printed is exact over all ranks and the whole
accumulation window: every label counts once.
"""

from itertools import batched, islice
