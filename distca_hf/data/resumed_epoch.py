"""Resumed epoch: the optimizer steps left where training goes on in an epoch that was begun before, and where it ends.

Trainer finds its place by the number of steps it has made. That is another place in the data once micro-batches or
steps have changed their size. Here all counts follow from what is left of the epoch.
"""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class ResumedEpoch:
    """An epoch in which training goes on, counted in micro-batches and optimizer steps of the present size.

    With the sizes of the run before, every count is the one that Trainer itself makes in an uninterrupted run.

    Attributes:
        number: number of the epoch, from 0.
        steps_done: steps that the trained part of the epoch amounts to, rounded down. Rounded up, a run of half an
            epoch could end before its share was trained.
        micro_batches_left: micro-batches to train in this epoch; at least one.
        micro_batches_per_epoch: micro-batches of every later epoch.
        accumulation_steps: micro-batches of an optimizer step; the last step of an epoch may have fewer.
    """

    number: int
    steps_done: int
    micro_batches_left: int
    micro_batches_per_epoch: int
    accumulation_steps: int

    @property
    def steps_left(self) -> int:
        """Optimizer steps to make in this epoch."""
        return -(-self.micro_batches_left // self.accumulation_steps)

    def epochs_after(self, steps: int) -> float:
        """Returns the epochs of the data that are trained after so many steps in this epoch."""
        done = self.steps_done * self.accumulation_steps
        trained = min(steps * self.accumulation_steps, self.micro_batches_left)
        return self.number + (done + trained) / (done + self.micro_batches_left)

    def max_steps(self, step: int, num_train_epochs: float) -> int:
        """Returns the step that training ends with.

        Args:
            step: steps made before, in all epochs and sizes.
            num_train_epochs: epochs to train; of a fraction of an epoch as many steps as Trainer makes of it.
        """
        last = ceil(num_train_epochs) - 1
        if self.number > last:
            return step
        if self.number < last:
            per_epoch = -(-self.micro_batches_per_epoch // self.accumulation_steps)
            later = ceil(num_train_epochs * per_epoch) - (self.number + 1) * per_epoch
            return step + self.steps_left + later
        in_this_epoch = self.steps_done + self.steps_left
        wanted = ceil(num_train_epochs * in_this_epoch) - last * in_this_epoch
        return step + max(0, wanted - self.steps_done)

    def num_train_epochs(self, step: int, max_steps: int) -> int:
        """Returns the epochs that a run of `max_steps` begins, this one and those before it included; without this one
        if no step is left."""
        steps = max_steps - step
        if steps <= 0:
            return self.number
        per_epoch = -(-self.micro_batches_per_epoch // self.accumulation_steps)
        return self.number + 1 + -(-max(0, steps - self.steps_left) // per_epoch)
