"""Changes to other packages, one file each, which says why no public seam exists and how the change is undone.

The folder is installed as `distca_hf.patches`. Public registries come first; a patch comes only where there is
none.
"""

if __name__ == "patches":
    raise ImportError("this folder is installed as distca_hf.patches; import it by that name")

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One change to an upstream package.

    Attributes:
        name: short name for messages.
        upstream: the symbol that is changed.
        reason: why it must be changed.
        tested: versions it was tested with, oldest and newest.
        apply: makes the change; does nothing when it is made already.
        revert: undoes it.
    """

    name: str
    upstream: str
    reason: str
    tested: tuple[str, ...]
    apply: Callable[[], None]
    revert: Callable[[], None]
