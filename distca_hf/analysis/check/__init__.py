"""`distca check`: whether a model runs on distca, layer by layer, with which kernels, and whether it fits."""
