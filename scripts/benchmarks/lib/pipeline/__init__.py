"""Stages of a pipeline, and the times of their parts."""
