"""Pipelines: shapes optimizer steps for the stages of a pipeline, and divides a model between them. Training without
pipelines never imports this."""
