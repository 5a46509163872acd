"""Forward pass: the attention calls that a model makes with a plan, forward, recomputed and backward.

    first call ──▶ agree ──▶ exchange ... last call ──▶ end
    first recomputed or backward call ──▶ agree ──▶ exchange ...          for each backward pass of autograd

Ranks agree twice. Before the first exchange of a forward pass they show each other dtypes and heads. Before the first
exchange of each backward pass they show which forward pass it follows, and which calls that pass made. Otherwise a
rank with another dtype, other layers, other gradients or another pass would send rows that the others misread.

Several passes may wait for backward at the same time, and a retained graph may be differentiated twice. So the second
agreement belongs to a backward pass of autograd, not to a forward pass. A rank that leaves out a loss, or runs
backward passes in another order, meets the others in a different agreement, and nothing is sent.

Later layers may have other dtypes and heads than the first one. In a model's first pass ranks show them before every
call. From then on each rank knows them, and refuses one of its layers that differs, before exchanging anything.
"""

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from distca_hf.comm.agreement import Agreement, Announced, Occasion, by_value
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import Transport
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.errors import PlanError, PlanMismatchError
from distca_hf.kernels.interface import CallTensors
from distca_hf.runtime.pending_traces import UNTRACED, PassTrace
from distca_hf.torch_private import backward_number
from distca_hf.traces import PassPart


# What a rank without a checksum shows: checksums are not negative.
UNKNOWN = -1
# Kinds of model state that must be equal on all ranks. Most passes show neither.
WEIGHTS, BUFFERS = "weights", "buffers"
# Stands for an attention call among the exchanges of states.
ATTENTION = "keys and values of attention"
NO_STATE: Mapping[str, Mapping[str, object]] = {}


# Facts of a pass that must be the same on all ranks; or what returns them, to be called when the device is busy.
PassFacts = Mapping[str, object] | Callable[[], Mapping[str, object]]


class PassCalls(NamedTuple):
    """Attention calls of a forward pass, and exchanges of layers with a state, without recomputed ones."""

    masks: list[Mask]
    tensors: list[CallTensors]
    # Layer, dtype and shape of each exchange, and attention calls between them. A pass without cut documents keeps the
    # previous pass's.
    states: list[str]


class AlsoShown(Protocol):
    """Further integers that ranks show each other with the facts of a pass, while their devices are busy."""

    def show(self) -> Mapping[str, int]:
        """Returns this rank's integers, under the same names on all ranks."""
        ...

    def seen(self, shown: Mapping[str, list[int]], micro_batch: int) -> None:
        """Takes the integers of all ranks, by name. May make collective calls."""
        ...


class ForwardPass:
    """Counts the attention calls of one forward pass and of its backward pass, and names their places.

    Methods that agree raise PlanMismatchError if ranks differ, and PeerLostError if one is lost.

    Attributes:
        calls, backward_calls: number of calls of the operator so far; `calls` includes recomputed ones.
        layers: numbers of the layers that made the calls, on the host, without recomputed ones.
        made: masks and tensors of the calls so far, without recomputed ones.
        compares_calls: whether ranks show each other every call, because some rank knows no previous pass.
    """

    def __init__(
        self,
        transport: Transport,
        micro_batch: int,
        facts: PassFacts | None = None,  # None if the model is not enabled: then ranks agree on nothing
        num_calls: int | None = None,  # number of attention calls of the pass, if known
        before: PassCalls | None = None,  # calls of the model's previous pass; None if there was none
        trace: PassTrace = UNTRACED,  # notes what the calls spend time on, if the step is reported
        # Checksums of weights and of buffers, by name. Ranks that show any compare them.
        state: Mapping[str, Mapping[str, object]] = NO_STATE,
        # Further integers that ranks show each other with the facts; None if there are none.
        also: AlsoShown | None = None,
        # Number of the layer of each call, if layers make several in tiles of heads.
        layers_of_calls: Sequence[int] = (),
    ) -> None:
        self.num_calls, self.trace = num_calls, trace
        self.calls = self.backward_calls = 0
        self._facts = facts
        self._transport, self._micro_batch = transport, micro_batch
        self._ended = self._agrees_on_backward = False
        if facts is not None:
            transport.traffic.passes += 1
        self._number = transport.traffic.passes
        self.layers: list[torch.Tensor] = []
        self.made = PassCalls([], [], [])
        self.compares_calls = self._compares_states = False
        self._scores: list[Hashable] = []
        self._before, self._state, self._also, self._layers_of_calls = before, state, also, layers_of_calls
        self._known_states = [] if before is None else before.states
        self._expected_tensors: Sequence[CallTensors] = ()
        self._with_gradients: list[int] = []
        self._states_with_gradients: list[int] = []
        self._recomputed = 0
        self._calls_per_region = 1
        # The backward pass that runs: its numbers in autograd (several, because reentrant checkpointing nests passes),
        # and the number of backward calls before it.
        self._in_autograd: set[int] = set()
        self._backward_from = 0

    @property
    def begun(self) -> bool:
        return self._facts is not None

    @property
    def facts(self) -> Mapping[str, object]:
        """Facts that must be the same on all ranks; none if the pass has not begun."""
        if callable(self._facts):
            self._facts = self._facts()
        return self._facts or {}

    def check_open(self) -> None:
        """Checks that the model has begun this pass and not ended it; called by layers of enabled models. Accepts
        layers that backward recomputes. Raises PlanError if only a part of the model was called, so its pass is not
        checked."""
        if self._facts is not None and (not self._ended or backward_number() >= 0):
            return
        raise PlanError(
            f"{self._transport.grid.name}, micro-batch {self._micro_batch}: a layer attends with a plan outside of a "
            "forward pass of its model, so that ranks could not agree on it; call the model that was enabled, as "
            "model(**batch), and neither a module inside of it (model.model) nor model.forward"
        )

    def note_call(self, layer: torch.Tensor | None, needs_gradients: bool) -> None:
        """Notes the layer of the latest call, if known, and whether backward will follow it. Layers are read for all
        calls at once, at the end of the pass."""
        if self._ended:
            return
        if layer is not None:
            self.layers.append(layer)
        if needs_gradients:
            self._with_gradients.append(self.calls)

    def begin_forward(
        self, mask: Mask = CAUSAL_MASK, scores: Hashable = None, tensors: CallTensors | None = None
    ) -> str:
        """Counts a forward call and names its place. Raises PlanError if mask or tensors differ from the previous
        pass.

        Args:
            mask: mask of the layer. Other ranks exchange rows for the mask they expect.
            scores: how the layer computes scores (scale, softcap, sinks); must be the same on all ranks.
            tensors: dtypes and heads of the layer. Other ranks exchange rows with the ones they expect.
        """
        self.calls += 1
        if self.num_calls is None or self.calls <= self.num_calls:
            place = self._place(self.calls - 1, "forward")
            self._check_call(mask, tensors, place)
            if self.made.states:
                self._compare_states(ATTENTION)
                self.made.states.append(ATTENTION)
            self.made.masks.append(mask)
            if tensors is not None:
                self.made.tensors.append(tensors)
            self._scores.append(scores)
            if self.trace is not UNTRACED:
                self.trace.begin(PassPart.FORWARD, self.calls - 1, mask.window_tokens or 0)
            return place
        # Checkpointing repeats calls for backward: the last region first, its calls in order.
        self._recomputed += 1
        self._enter_backward(goes_on=self._recomputed > 1)
        last = self._next_backward_layer(self.num_calls)
        layer = last - self._calls_per_region + self._recomputed
        self.trace.begin(PassPart.RECOMPUTED, min(layer, last), mask.window_tokens or 0)
        if layer <= last:
            return self._place(layer, "forward")
        return self._place(last, f"call {self._recomputed} of its checkpointed region, forward")

    def _check_call(self, mask: Mask, tensors: CallTensors | None, place: str) -> None:
        """Compares a call with the previous pass's: other ranks exchange rows for that mask and those tensors."""
        call, where = self.calls - 1, f"{self._transport.grid.name}, {place}"
        masks: Sequence[Mask] = () if self._before is None else self._before.masks
        if call < len(masks) and masks[call] != mask:
            raise PlanError(
                f"{where}: the layer attends with {mask.in_words}, and with {masks[call].in_words} in the pass "
                "before; other ranks exchange rows for that. Windows of layers cannot change after the first pass: "
                "enable the model again, on all ranks"
            )
        if tensors is None or call >= len(self._expected_tensors) or self._expected_tensors[call] == tensors:
            return
        before = self._expected_tensors[call]
        if tensors.dtypes != before.dtypes:
            how = f"in {tensors.dtypes_in_words}, and in {before.dtypes_in_words}"
        else:
            how = f"with heads {tensors.heads_in_words}, and with {before.heads_in_words}"
        raise PlanError(
            f"{where}: the layer attends {how} in the pass before; other ranks exchange rows for that, and none of "
            "this layer were sent. Dtypes and heads of layers cannot change after the first pass: compute the layer "
            "as before, or enable the model again, on all ranks"
        )

    def begin_backward(self) -> str:
        """Counts a backward call and names its place. The first one waits for the other ranks."""
        if self.num_calls is None:
            self.num_calls = self.calls
        self._enter_backward(goes_on=self._recomputed > 0)
        if self._recomputed:
            self._calls_per_region, self._recomputed = self._recomputed, 0
        layer = self._next_backward_layer(self.num_calls)
        self.backward_calls += 1
        masks = self.made.masks
        if self.trace is not UNTRACED:
            mask = masks[layer] if 0 <= layer < len(masks) else CAUSAL_MASK
            self.trace.begin(PassPart.BACKWARD, layer, mask.window_tokens or 0)
        return self._place(layer, "backward")

    def begin_backward_of_rows(self, goes_on: bool = False) -> None:
        """Begins backward of rows that move between ranks. The first call in a backward pass waits for the other
        ranks; `goes_on` says that it may be nested in one, by reentrant checkpointing."""
        self._enter_backward(goes_on)

    def begin_exchange_of_states(self, exchange: str, needs_gradients: bool, fingerprint: int) -> None:
        """Begins an exchange of a layer with a state, given as its layer, dtype and shape. The first one of a pass
        waits until all ranks have shown the pass's facts and the plan's fingerprint. All exchanges wait if some rank
        knows no previous pass, or one that began differently, for example under another autocast. Raises PlanError if
        it differs from the previous pass's, which other ranks expect."""
        if self._ended:  # recomputed
            self._enter_backward(goes_on=True)
        if self._ended or self._facts is None or len(self._transport.grid.members(Scope.LAYERS)) == 1:
            return
        number = len(self.made.states)
        self._compare_states(exchange)
        if needs_gradients:
            self._states_with_gradients.append(number)
        self.made.states.append(exchange)
        if not number:
            name = "exchanges of states in the pass before"
            with Announced(self._transport, self._micro_batch, Occasion.ATTEND):
                facts = {**self.facts, "fingerprint of the plan": fingerprint, "first exchange of states": exchange}
            known = self._known_states = self._known_states if self._known_states[:1] == [exchange] else []
            shown = self._agree(facts, {name: _checksum(known) if known else UNKNOWN})[name]
            self._compares_states = UNKNOWN in shown or len(set(shown)) > 1
        elif self._compares_states:
            self._agree({f"exchange {number} of states": exchange}, {})

    def _compare_states(self, exchange: str) -> None:
        """Compares an exchange of states, or an attention call that follows one, with the pass before."""
        number, known = len(self.made.states), self._known_states
        if number and not self._compares_states and known[number : number + 1] != [exchange]:
            before = known[number] if number < len(known) else "nothing"
            raise PlanError(
                f"{self._transport.grid.name}, micro-batch {self._micro_batch}: a layer exchanges {exchange}, and "
                f"{before} in the pass before, which other ranks expect; nothing was sent. Layers cannot change after "
                "the first pass: compute them as before, or enable the model again, on all ranks"
            )

    def agree_to_attend(self, fingerprint: int, tensors: CallTensors) -> None:
        """Waits until all ranks have shown the dtypes and heads with which they attend: at the first call together
        with the pass's facts, at later ones while `compares_calls` is true."""
        if self._facts is None or len(self._transport.grid.members(Scope.LAYERS)) == 1:
            return
        self._compare_states(ATTENTION)
        if self.calls:
            of_layer = {
                f"dtypes that {self._layer(self.calls)} attends in": tensors.dtypes_in_words,
                f"heads and their dimensions of {self._layer(self.calls)}": tensors.heads_in_words,
            }
            self._agree(of_layer, {})
            return
        # If the first call differs from before, for example under another autocast, later ones are not known either.
        known = self._before.tensors if self._before is not None and self._before.tensors[:1] == [tensors] else []
        name, checksum = "dtypes and heads of the pass before", _checksum(known) if known else UNKNOWN
        with Announced(self._transport, self._micro_batch, Occasion.ATTEND):
            facts = {
                **self.facts,
                "fingerprint of the plan": fingerprint,
                "dtypes that attention computes in": tensors.dtypes_in_words,
                "heads and their dimensions": tensors.heads_in_words,
            }
            states = {kind: _checksum([*state.items()]) for kind, state in self._state.items()}
            also = {} if self._also is None else self._also.show()
        of_ranks = self._agree(facts, {name: checksum, WEIGHTS: UNKNOWN, BUFFERS: UNKNOWN, **states, **also})
        if self._also is not None:
            self._also.seen(of_ranks, self._micro_batch)
        for kind in (WEIGHTS, BUFFERS):
            if len({*of_ranks[kind]} - {UNKNOWN}) > 1:  # all ranks see this, and show theirs by name
                by_name = {f"{kind[:-1]} {name}": bits for name, bits in self._state.get(kind, {}).items()}
                Agreement.start(self._transport, Occasion.COMPARE, self._micro_batch, by_name, {}).wait()
        shown = of_ranks[name]
        self.compares_calls = UNKNOWN in shown or len(set(shown)) > 1
        self._expected_tensors = () if self.compares_calls else known

    def _agree(self, facts: Mapping[str, object], numbers: Mapping[str, int]) -> dict[str, list[int]]:
        """Waits until all ranks have shown that they attend alike; returns their numbers by name."""
        return Agreement.start(self._transport, Occasion.ATTEND, self._micro_batch, facts, numbers).wait()

    def end(self, exchanges: bool, backward_calls: int | None = None, attends_again: bool = False) -> None:
        """Ends the forward pass: all further calls belong to backward. If none can follow, ranks agree here. Raises
        PlanError if layers made fewer exchanges of states than in the previous pass.

        Args:
            exchanges: whether ranks exchange rows in this pass; otherwise they need not agree.
            backward_calls: number of backward calls; None for one per call that was noted to need gradients.
            attends_again: whether backward recomputes layers. Under reentrant checkpointing no call needed gradients.
        """
        self.num_calls, self._ended, self.compares_calls = self.calls, True, False
        if callable(self._facts):  # ranks agreed on nothing; what returns facts would keep the model alive
            self._facts = {}
        number, known = len(self.made.states), self._known_states
        if 0 < number < len(known) and not self._compares_states:
            raise PlanError(
                f"{self._transport.grid.name}, micro-batch {self._micro_batch}: layers made {number} exchanges of "
                f"states, and {len(known)} in the pass before; other ranks wait for {known[number]}, and no step was "
                "taken. Run the same layers in every pass, or enable the model again, on all ranks"
            )
        if not number:
            self.made.states.extend(known)
        self.trace.end_forward(len(self._with_gradients) if backward_calls is None else backward_calls)
        if self._facts is not None and exchanges and self._transport.world_size > 1:
            self._agrees_on_backward = attends_again or bool(self._with_gradients)
            if not self._agrees_on_backward:
                self._agree_to_differentiate()

    def _enter_backward(self, goes_on: bool) -> None:
        """Agrees with the other ranks if a call is the first one of a backward pass. With `goes_on` it follows a
        recomputed one, and may be in a nested backward pass."""
        number = backward_number()
        if number in self._in_autograd:
            return
        if goes_on and self._in_autograd:
            self._in_autograd.add(number)
            return
        self._in_autograd, self._backward_from = {number}, self.backward_calls
        if self._agrees_on_backward:
            self._agree_to_differentiate()

    def _agree_to_differentiate(self) -> None:
        """Waits until all ranks have shown which pass they differentiate, which calls it made, and which of these have
        a backward.
        """
        layers = torch.stack(self.layers).tolist() if self.layers else []
        numbers = {
            "attention calls": self.num_calls or 0,
            "order of the layers that attend": _checksum(layers),
            "sliding windows of the layers that attend": _checksum(self.made.masks),
            "scales, softcaps and sinks of the layers that attend": _checksum(self._scores),
            "attention calls with gradients": len(self._with_gradients),
            "which of them have gradients": _checksum(self._with_gradients),
            "exchanges of states with gradients": len(self._states_with_gradients),
        }
        which = {"forward pass that backward follows": f"number {self._number}"}
        agreement = Agreement.start(self._transport, Occasion.DIFFERENTIATE, self._micro_batch, which, numbers)
        of_ranks = agreement.wait()
        different = {name: values for name, values in of_ranks.items() if len(set(values)) > 1}
        if different:
            name, values = next(iter(different.items()))
            shown = by_value([str(value) for value in values], agreement.labels)
            raise PlanMismatchError(
                f"{self._transport.grid.name}, micro-batch {self._micro_batch}: ranks ran other attention calls in "
                f"their forward passes: {name} is {shown}; no step was taken. "
                "All ranks must run the same layers in one order. Where inputs need gradients on only some ranks "
                "(frozen layers after embeddings that another module made), that module must take part on every rank"
            )

    def _next_backward_layer(self, num_calls: int) -> int:
        """Returns the layer whose backward call is next: the last one first, and again if a graph is retained."""
        calls = self.backward_calls - self._backward_from
        return num_calls - 1 - calls % (len(self._with_gradients) or max(1, num_calls))

    def _place(self, call: int, phase: str) -> str:
        return f"micro-batch {self._micro_batch}, {self._layer(call)}, {phase}"

    def _layer(self, call: int) -> str:
        of = self._layers_of_calls
        return f"layer {of[call]}, tile {call - of.index(of[call])}" if 0 <= call < len(of) else f"layer {call}"


def _checksum(values: Sequence[Hashable]) -> int:
    texts = {value: str(value) for value in set(values)}  # few layers differ, and texts cost host time
    return zlib.crc32(",".join([texts[value] for value in values]).encode())
