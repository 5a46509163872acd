"""Core attention at work: keys and values out, kernels, gradients home. One operator, driven by a plan."""
