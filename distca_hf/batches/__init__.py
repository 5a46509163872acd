"""Batches with a plan: documents are placed and planned while the model trains, or packs are planned as they come.
Nothing here imports Transformers."""
