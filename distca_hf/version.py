"""Version of the package; part of what ranks agree on."""

__version__ = "0.1.0"
