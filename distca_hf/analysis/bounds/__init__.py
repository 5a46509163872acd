"""Bounds: bytes that every plan as balanced as a given one has to move."""

from distca_hf.analysis.bounds.fixed import BytesBound as BytesBound
from distca_hf.analysis.bounds.fixed import bytes_bound as bytes_bound
