"""Batches with a plan: documents are placed and planned beside training, or a pack is planned as it comes. Knows no
Transformers."""
