"""Same grid: ranks find out whether they all divide the job in one way, before groups of some of them are opened.

Ranks with several grids would wait for each other in other groups, until a deadline. Every rank compares its grid with
that of the first one, and leaves a word for all if they differ. It does so before the group of all ranks is opened, so
that behind it all can see the word. That takes a few words with the job's store, and no collective.
"""

import hashlib
import json
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distca_hf.comm.grid import Grid, Scope
from distca_hf.errors import ConfigError


class SameGrid:
    """A comparison of grids among all ranks of the job; each time groups are opened another one.

    Args:
        store: of the job.
    """

    def __init__(self, store: Store, grid: Grid) -> None:
        self._store, self._grid = PrefixStore("distca_hf/grids", store), grid
        turn = self._store.add(f"turns/{grid.rank}", 1)
        self._of_first, self._of_another = f"{turn}/first", f"{turn}/another"

    def show(self, patience: timedelta) -> None:
        """Compares this rank's grid with that of the first rank; called before the group of all ranks is opened.

        Raises:
            RuntimeError: the first rank did not come in time.
        """
        grid = self._grid
        digest = hashlib.blake2b(json.dumps([grid.shape, grid.ranks]).encode(), digest_size=8).hexdigest()
        mine, first = f"{digest} {self._in_words()}", min(grid.ranks)
        if grid.rank == first:
            self._store.set(self._of_first, mine)
            return
        self._store.wait([self._of_first], patience)
        of_first = self._store.get(self._of_first).decode()
        if of_first != mine:
            _, _, words = of_first.partition(" ")
            self._store.set(
                self._of_another,
                f"rank {first} of the job works on {words}, and rank {grid.rank} on {self._in_words()}",
            )

    def check(self) -> None:
        """Checks that no rank has found another grid; called behind the opening of the group of all ranks.

        Raises:
            ConfigError: one has; names both.
        """
        if self._store.check([self._of_another]):
            words = self._store.get(self._of_another).decode()
            raise ConfigError(
                f"{self._grid.name}: ranks divide the job in several ways: {words}. Call plugin.use_mesh with the "
                "same mesh and names on all ranks, and give plugin.dataloader the model on all of them, or on none"
            )

    def _in_words(self) -> str:
        sets = [", ".join(map(str, ranks[:8])) for ranks in self._grid.sets_of(Scope.ROWS)[:2]]
        return (
            f"{self._grid.in_words()} (documents shared by {' and by '.join(sets)}{', ...' if len(sets) > 1 else ''})"
        )
