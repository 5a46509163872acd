"""Trainer of Transformers: attached loaders, checkpoints, metrics, evaluation."""
