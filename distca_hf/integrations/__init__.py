"""Where distca_hf meets Transformers, Accelerate and datasets."""
