"""Transformers, Accelerate and datasets: everything that depends on them."""
