"""From a dataset's documents to micro-batches. Pure: no process groups, no clock, no hidden randomness."""
