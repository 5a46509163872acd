"""Varlen attention on one device: a table of kernels, their limits, and adapters that give them one shape."""
