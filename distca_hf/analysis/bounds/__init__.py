"""Bounds: bytes that no plan of a fixed layout can do without."""

from distca_hf.analysis.bounds.fixed import BytesBound as BytesBound
from distca_hf.analysis.bounds.fixed import bytes_bound as bytes_bound
