"""Trainings with Trainer: documents, batches of every mode, and the table."""
