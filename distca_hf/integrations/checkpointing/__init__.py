"""Activation checkpointing that does not attend twice."""
