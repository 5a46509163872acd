"""From a dataset's documents to what each rank holds. Pure: no process groups, no clock, no hidden randomness."""
