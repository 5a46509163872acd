"""Live plan: binds a micro-batch's plan to the transport and settings of this rank.

The operator gets its plan as an integer, because compiled graphs, checkpointing and autograd all pass on integers
unchanged. `find_plan` looks up the plan by this integer, in the single register of this process, as long as anything
may still need it. The register is bounded shared state, like parts of `runtime.retention` and `batches.known_batch`.

`alike_layers` has what layers look up in a plan.
"""

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from distca_hf.arrays import IntArray
from distca_hf.comm.agreement import Agreement
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.errors import PlanError
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.planning.plan import PlanFacts
from distca_hf.runtime.alike_layers import LayerLookup
from distca_hf.runtime.forward_pass import NO_STATE, AlsoShown, ForwardPass, PassCalls, PassFacts
from distca_hf.runtime.layer_kinds import LayerKinds, Planned, PlannedLater
from distca_hf.runtime.pending_traces import UNTRACED, PassTrace
from distca_hf.runtime.posted import Posted
from distca_hf.runtime.retention import ONE_LAYER, PassLayers, Retention


class PlanRegister:
    """Finds live plans by number. It keeps the newest ones alive; older ones live as long as a batch or a graph holds
    them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._all: weakref.WeakValueDictionary[int, LivePlan] = weakref.WeakValueDictionary()
        self.newest: OrderedDict[int, LivePlan] = OrderedDict()  # the newest ones by their numbers; faster than `find`
        self._lock = threading.Lock()

    def add(self, plan: "LivePlan", keep: int) -> int:
        """Registers a plan and releases all but the `keep` newest."""
        with self._lock:
            number = next(self._numbers)
            self._all[number] = plan
            self.newest[number] = plan
        self.keep(keep)
        return number

    def keep(self, count: int) -> None:
        """Releases all plans except the `count` newest. Freeing their tensors takes a tenth of a millisecond."""
        with self._lock:
            while len(self.newest) > count:
                self.newest.popitem(last=False)

    def find(self, number: int) -> "LivePlan":
        """Returns the plan with this number. Raises PlanError if no batch or graph holds it any more."""
        plan = self.newest.get(number) or self._all.get(number)  # the second is slower, and rarely needed
        if plan is None:
            raise PlanError(
                f"plan {number} is gone: its batch was dropped and more than plans_in_flight newer ones were taken "
                "before its forward or backward ran; raise plans_in_flight"
            )
        return plan


@dataclass
class PlanUse:
    """Whether a model has run with a plan; outlives the plan."""

    begun: bool = False  # a forward pass has begun
    trained: bool = False  # a pass of training has ended


class LivePlan:
    """The plan of a micro-batch on this rank. The batch carries it as `distca_plan`: opaque to users.

    Wrappers look into tuples, mappings and dataclasses of a model's arguments, and copy them. A live plan is none of
    these, so the very same object reaches every layer.
    """

    def __init__(
        self,
        micro_batch: int,
        # The planned micro-batch, or what plans it later. All its routings have one layout, so a rank holds the same
        # rows in every layer.
        planned: Planned | PlannedLater,
        transport: Transport,
        config: DistCAConfig,
        # Facts shown to all ranks when the batch was handed out; None if there is nothing to wait for.
        agreement: Agreement | None = None,
        # Plans the micro-batch again if the ranks that take part change; None if they do not.
        replan: Callable[[], Planned | None] | None = None,
        # `[segments]` tokens of each document, or part of one, that this rank holds, in row order; None on ranks that
        # hold none.
        document_tokens: IntArray | None = None,
        also: AlsoShown | None = None,  # further integers that ranks show each other in a pass; None if there are none
    ) -> None:
        self.micro_batch, self.document_tokens = micro_batch, document_tokens
        self.transport = transport
        self.config = config
        self._replan, self._also = replan, also
        self.checks_finite = config.debug.check_finite
        self.agreement = agreement
        self.numbers: dict[str, list[int]] = {}  # numbers that every data rank gave in the agreement, by name
        self.use = PlanUse()
        self.part = 0  # part of the model that passes run, see `of_part`
        self.longest_document_tokens = planned.longest_document_tokens
        self._begin(planned)

    def _begin(self, planned: Planned | PlannedLater) -> None:
        """Sets the attributes that passes change, for a new plan or one for another part of the model."""
        self._layers = ONE_LAYER
        self._take(planned)
        vars(self).pop("forward_pass", None)
        self._of_parts: dict[int, LivePlan] = {}
        self.handle = _register.add(self, self.config.plans_in_flight)

    def of_part(self, part: int) -> "LivePlan":
        """Returns this plan for one part of a model of which this rank runs several: with the same rows, but other
        passes. Passes of other parts run between forward and backward of one. Part 0 has this plan itself."""
        if part == self.part:
            return self
        if part not in self._of_parts:
            self._of_parts[part] = self._copied()
            self._of_parts[part].part = part
        return self._of_parts[part]

    def for_pass(self) -> "LivePlan":
        """Returns this plan for another forward pass: itself for the first one. Backward of an earlier pass on the
        same batch may still follow, and ranks must run both in one order."""
        if "forward_pass" in vars(self) and self.forward_pass.begun:
            self.plan_anew()
            return self._copied()
        return self

    def _copied(self) -> "LivePlan":
        """Returns another plan for the same rows, with separate passes."""
        self.agree()
        posted, other = self.posted, object.__new__(type(self))
        vars(other).update(vars(self))
        other._begin(self.planned._replace(posted=None if posted is None else posted.again()))
        return other

    def __copy__(self) -> "LivePlan":
        """Returns itself: copied batches carry the very same object, too."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "LivePlan":
        return self

    def __reduce__(self) -> str:
        raise PlanError(
            f"{self.transport.grid.name}, micro-batch {self.micro_batch}: a batch with a plan can neither be stored "
            "nor sent to another process (pickle): its plan is bound to the connections of this one"
        )

    def agree(self) -> None:
        """Waits until all ranks have shown that they run the same plan; once. Raises PlanMismatchError or
        PeerLostError if they do not."""
        if self.agreement is not None:
            self.numbers |= self.agreement.wait(Scope.ROWS)
            self.agreement = None

    @property
    def label_tokens(self) -> int | None:
        """Labels of the global micro-batch, over all ranks; None if not counted."""
        self.agree()
        return sum(self.numbers["label_tokens"]) if "label_tokens" in self.numbers else None

    def begin_forward_pass(
        self,
        num_calls: int | None,
        facts: PassFacts,
        layers: PassLayers = ONE_LAYER,
        before: PassCalls | None = None,
        trace: PassTrace = UNTRACED,
        state: Mapping[str, Mapping[str, object]] = NO_STATE,
    ) -> None:
        """Begins a forward pass of a model with this plan, in which these layers attend; for other arguments see
        `ForwardPass`."""
        self.agree()
        self.plan_anew()
        self.use.begun = True
        self._layers = layers
        if self._has_lookup:  # none yet if the micro-batch is planned later
            self.kinds.begin_forward_pass(self._layers)
        of_pass = facts, num_calls, before, trace, state, self._also, layers.layers_of_calls
        self.forward_pass = ForwardPass(self.transport, self.micro_batch, *of_pass)

    def plan_anew(self) -> None:
        """Plans the micro-batch again if the ranks that take part have changed since."""
        planned = None if self._replan is None else self._replan()
        if planned is not None:
            self._take(planned)

    def _take(self, planned: Planned | PlannedLater) -> None:
        self._planned = planned
        vars(self).pop("lookup", None)

    @cached_property
    def forward_pass(self) -> ForwardPass:
        """The latest pass of a model with this plan; before the first one, a pass that has not begun."""
        return ForwardPass(self.transport, self.micro_batch)

    @property
    def planned(self) -> Planned:
        """The planned micro-batch. If it was to be planned later, all ranks plan it now."""
        if isinstance(self._planned, PlannedLater):
            self._planned = self._planned.plan()
        return self._planned

    @property
    def facts(self) -> PlanFacts:
        """Numbers about the micro-batch, of all layers together."""
        return self.planned.facts

    @property
    def fingerprint(self) -> int:
        return self.planned.fingerprint

    @property
    def posted(self) -> Posted | None:
        """The plan that ranks without tokens have; None if there are none."""
        return self.planned.posted

    @cached_property
    def lookup(self) -> LayerLookup:
        """What layers find in the plan."""
        name = self.transport.grid.name
        kinds = LayerKinds(self.planned, self.config, f"{name}, micro-batch {self.micro_batch}", self._layers)
        return LayerLookup(kinds, self.config.kernel, name, self.posted)

    @property
    def kinds(self) -> LayerKinds:
        return self.lookup.kinds

    def end_forward_pass(self, trains: bool = False) -> None:
        """Ends the forward pass, perhaps one of training. If no backward pass can follow, this rank waits for the
        others here. Raises PlanMismatchError or PeerLostError if no backward pass follows, and ranks ran different
        passes or one is lost."""
        moves = self.planned.moves
        crosses = moves is not None and moves.on_host.crosses
        exchanges = crosses or any(kind.plan.forward.exchanges for kind in self.kinds)
        attends_again = bool(self._layers.regions) and torch.is_grad_enabled()
        self.forward_pass.end(exchanges, attends_again=attends_again)
        self.use.trained |= trains
        _register.keep(max(1, self.config.plans_in_flight - 1))  # now, not when a pass is about to begin

    def retention(self, spec: AttentionSpec) -> Retention:
        """Returns the decisions about rows of layers that attend like this."""
        return self.kinds.of(self.kinds.spec(spec)).retention

    @property
    def attention_dtype(self) -> torch.dtype | None:
        """Dtype that attention computes in; None before the first call."""
        return self.lookup.attention_dtype if self._has_lookup else None

    @property
    def kernel_name(self) -> str:
        """Name of the kernel that attends; "none" before the first call."""
        return self.lookup.kernel_name if self._has_lookup else "none"

    @property
    def _has_lookup(self) -> bool:
        return "lookup" in vars(self)


_register = PlanRegister()

# Plans of the batches in flight, by number. `find_plan` returns any live plan; it raises PlanError if no batch or
# graph holds it any more.
newest_plans: Mapping[int, LivePlan] = _register.newest
find_plan = _register.find
