"""Core attention at work: dispatch, kernels, combine. One operator, driven by a plan."""
