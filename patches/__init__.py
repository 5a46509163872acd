"""Changes to other packages, one file each, which says why there is no public way and how the change is undone.

The folder is installed as `distca_hf.patches`. Public registries come first; a patch is used only if there is none.
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
        upstream: the changed symbol.
        reason: why it must be changed.
        tested: oldest and newest version it was tested with.
        apply: makes the change; does nothing if it is already made.
        revert: undoes it.
    """

    name: str
    upstream: str
    reason: str
    tested: tuple[str, ...]
    apply: Callable[[], None]
    revert: Callable[[], None]
