"""Core attention disaggregation for Hugging Face: train on packed documents of any length as if every GPU had the same
work.

Importing the package registers the attention implementation "distca" with Transformers.
"""

from distca_hf.errors import (
    ConfigError,
    DistCAError,
    PackingError,
    PeerLostError,
    PlanError,
    PlanMismatchError,
    StepTimeoutError,
    UnsupportedAttentionError,
)
from distca_hf.integrations.loader import PlacedLoader
from distca_hf.integrations.model import enable
from distca_hf.integrations.plugin import DistCAPlugin
from distca_hf.patches.attention import attention
from distca_hf.version import __version__


attention.apply()

__all__ = [
    "ConfigError",
    "DistCAError",
    "DistCAPlugin",
    "PackingError",
    "PeerLostError",
    "PlacedLoader",
    "PlanError",
    "PlanMismatchError",
    "StepTimeoutError",
    "UnsupportedAttentionError",
    "__version__",
    "enable",
]
