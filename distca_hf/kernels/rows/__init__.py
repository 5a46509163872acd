"""Kernels on rows: copied by an index, added by an index, merged by log-sum-exps; in Triton on GPUs."""
