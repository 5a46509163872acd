"""Later batches: a placed loader without the first micro-batches of an epoch, for programs that resume by counting."""

from collections.abc import Iterator
from typing import Any

from distca_hf.batches.loader import PlacedLoader


class LaterBatches:
    """What `accelerate.skip_first_batches` makes of a placed loader. All that is not asked for here is the loader's.

    Args:
        loader: or one whose first micro-batches are left out already; goes on with the epoch after it.
        num_batches: micro-batches to leave out of each epoch; they are neither read nor planned.
    """

    def __init__(self, loader: "PlacedLoader | LaterBatches", num_batches: int) -> None:
        self._loader, self._num_batches = loader, num_batches

    def __len__(self) -> int:
        """Returns the micro-batches that are left of an epoch."""
        return max(0, len(self._loader) - self._num_batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the later micro-batches of the loader's next epoch."""
        return iter(self._loader if self._loader.skip(self._num_batches) else ())

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)
