"""Lets `accelerate.skip_first_batches` take placed loaders, and loaders whose batches are read ahead.

Upstream: `accelerate.data_loader.skip_first_batches` makes a `DataLoader` of the same dataset, with a sampler that
leaves out the first batches. A placed loader has no sampler: it places whole micro-batches for all ranks. There is no
registry, and it calls no method of its argument, so a loader cannot report either that it is read ahead.

Modules that have already imported the function by name get the new one as well.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distca_hf.patches import Patch


if TYPE_CHECKING:
    from distca_hf.batches.loader import PlacedLoader

NAME = "skip_first_batches"
# Attribute of a loader: reads another loader ahead as well.
READ_AHEAD = "distca_read_ahead"


class LaterBatches:
    """A placed loader without the first micro-batches of its next epoch, for programs that resume by counting. All
    other attributes are the loader's.

    Args:
        loader: a placed loader, or one that already skips some micro-batches; it continues with the next epoch.
        num_batches: micro-batches to leave out, which are neither read nor planned.
    """

    def __init__(self, loader: "PlacedLoader | LaterBatches", num_batches: int) -> None:
        self._loader, self._num_batches = loader, num_batches

    def __len__(self) -> int:
        """Returns the number of micro-batches left in an epoch."""
        return max(0, len(self._loader) - self._num_batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the remaining micro-batches of the loader's next epoch."""
        return iter(self._loader if self._loader.skip(self._num_batches) else ())

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)


def _apply() -> None:
    from accelerate import data_loader

    original: Callable[..., Any] = getattr(data_loader, NAME)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        from distca_hf.batches.loader import PlacedLoader
        from distca_hf.batches.stream_loader import StreamLoader
        from distca_hf.errors import ConfigError

        if isinstance(dataloader, StreamLoader):
            raise ConfigError(
                f"skip_first_batches(loader, {num_batches}): a loader of a stream goes on by its saved position, not "
                "by a number of batches; save loader.state_dict(), and call loader.load_state_dict(state)"
            )
        if isinstance(dataloader, PlacedLoader | LaterBatches):
            return LaterBatches(dataloader, num_batches)
        skipped = original(dataloader, num_batches)
        if (read_ahead := getattr(dataloader, READ_AHEAD, None)) is not None:
            read_ahead(skipped)
        return skipped

    _replace(original, skip_first_batches)


def _revert() -> None:
    from accelerate import data_loader

    patched = getattr(data_loader, NAME)
    _replace(patched, getattr(patched, "__wrapped__", patched))


def _replace(before: object, after: object) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(NAME) is before:
            setattr(module, NAME, after)


skip_batches = Patch(
    name="skip_batches",
    upstream="accelerate.data_loader.skip_first_batches",
    reason="a placed loader is skipped as a DataLoader is",
    tested=("1.11", "1.15"),
    apply=_apply,
    revert=_revert,
)
