"""Plan register: finds live plans by number, as long as somebody may still ask for them."""

import itertools
import threading
import weakref
from collections import OrderedDict
from typing import Generic, TypeVar

from distca_hf.errors import PlanError


Plan = TypeVar("Plan")


class PlanRegister(Generic[Plan]):
    """Finds live plans by number. The newest are kept alive here; older ones live as long as a batch or a graph holds
    them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._all: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
        self._newest: OrderedDict[int, Plan] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, plan: Plan, keep: int) -> int:
        """Registers a plan and lets go of all but the `keep` newest."""
        with self._lock:
            number = next(self._numbers)
            self._all[number] = plan
            self._newest[number] = plan
        self.keep(keep)
        return number

    def keep(self, count: int) -> None:
        """Lets go of all plans but the newest. Their tensors go with them, which takes a tenth of a millisecond."""
        with self._lock:
            while len(self._newest) > count:
                self._newest.popitem(last=False)

    def find(self, number: int) -> Plan:
        """Returns the plan with this number.

        Raises:
            PlanError: no batch and no graph holds it any more.
        """
        plan = self._newest.get(number) or self._all.get(number)  # the second one is slower, and rarely asked
        if plan is None:
            raise PlanError(
                f"plan {number} is gone: its batch was dropped and more than plans_in_flight newer ones were taken "
                "before its forward or backward ran; raise plans_in_flight"
            )
        return plan
