"""Models of Transformers: which are accepted, and how their forward passes are watched."""
