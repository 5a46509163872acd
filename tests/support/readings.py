"""A reading of the meter, as a training of eight ranks would give it."""

from distca_hf.batches.meter import MeterReading
from distca_hf.planning.kinds import PlanTotals


READING = MeterReading(
    num_ranks=8,
    seconds=2.0,
    plan_seconds=0.02,
    loader_wait_seconds=0.004,
    waited_seconds=0.04,
    totals=PlanTotals(micro_batches=4, tokens=8 * 2 * 17_625, pairs=1e9, imbalance_before=9.2, imbalance=4.008),
    sent_bytes=8_000_000,
    slowest_rank=5,
    utilisation=0.4213,
    memory_bytes=131 * 2**30,
)
