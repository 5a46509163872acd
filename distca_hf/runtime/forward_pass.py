"""Forward pass: the attention calls that a model makes with a plan, forward, recomputed and backward.

    first call ──▶ agree ──▶ exchange ... last call ──▶ end ──▶ agree ──▶ first recomputed or backward call ...

Twice in a pass ranks show each other what they run: dtypes and heads before the first exchange of the forward pass,
and their calls before the first exchange of the backward pass. A rank that computes in another dtype, calls other
layers, or needs other gradients would send rows that another rank takes for something else.
"""

import zlib
from collections.abc import Hashable, Mapping, Sequence

import torch

from distca_hf.comm.agreement import Agreement, Occasion, by_value
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import Transport
from distca_hf.errors import PlanError, PlanMismatchError
from distca_hf.runtime.pass_trace import UNTRACED, PassTrace
from distca_hf.torch_private import in_backward
from distca_hf.traces import PassPart


class ForwardPass:
    """Counts the attention calls of one forward pass and of its backward pass, and names their places.

    Args:
        facts: must be the same on all ranks; None for a pass of no enabled model, which agrees about nothing.
        num_calls: attention calls of the pass, if known.
        expected_windows: of each call, as in the pass before; None if there was none.
        trace: notes the moments of its calls, if the step is reported.

    Attributes:
        calls, backward_calls: calls of the operator so far; `calls` counts recomputed ones, too.
        layers: numbers of the layers that made them, on the host, recomputed ones left out.
        windows: tokens of the sliding window of each call, 0 without one; recomputed calls left out.
        agreement: shown to all ranks and not yet waited for.
    """

    def __init__(
        self,
        transport: Transport,
        micro_batch: int,
        facts: Mapping[str, object] | None = None,
        num_calls: int | None = None,
        expected_windows: Sequence[int] | None = None,
        trace: PassTrace = UNTRACED,
    ) -> None:
        self.num_calls, self.trace = num_calls, trace
        self.calls = self.backward_calls = 0
        self.agreement: Agreement | None = None
        self._transport, self._micro_batch, self._facts = transport, micro_batch, facts
        self._ended = False
        self.layers: list[torch.Tensor] = []
        self.windows: list[int] = []
        self._scores: list[Hashable] = []
        self._tensors: list[Hashable] = []
        self._expected_windows = expected_windows
        self._with_gradients: list[int] = []
        self._recomputed = 0
        self._calls_per_region = 1

    def check_open(self) -> None:
        """Checks that the model of a layer has begun this pass and did not end it; for layers of enabled models.

        A layer that backward computes again passes, too.

        Raises:
            PlanError: part of the model was called, and nothing around it is checked.
        """
        if self._facts is not None and (not self._ended or in_backward()):
            return
        raise PlanError(
            f"{self._transport.grid.name}, micro-batch {self._micro_batch}: a layer attends with a plan outside of a "
            "forward pass of its model, so that ranks could not agree on it; call the model that was enabled, as "
            "model(**batch), and neither a module inside of it (model.model) nor model.forward"
        )

    def note_call(self, layer: torch.Tensor | None, needs_gradients: bool) -> None:
        """Notes the layer of the latest call, if known, and whether backward will follow it.

        Args:
            layer: its number, on the host; read at the end of the pass, for all calls at once.
        """
        if self._ended:
            return
        if layer is not None:
            self.layers.append(layer)
        if needs_gradients:
            self._with_gradients.append(self.calls)

    def begin_forward(self, window_tokens: int = 0, scores: Hashable = None, tensors: Hashable = None) -> str:
        """Counts a forward call and names its place.

        Args:
            window_tokens: of the layer, 0 without a window. Other ranks make the exchanges of the one they expect.
            scores: how the layer makes them (scale, softcap, sinks); must be the same on all ranks.
            tensors: dtype and heads of the layer; must be the same on all ranks, or bytes of one dtype would be taken
                for another one.

        Raises:
            PlanError: it is another one than in the pass before.
        """
        self.calls += 1
        if self.num_calls is None or self.calls <= self.num_calls:
            place = self._place(self.calls - 1, "forward")
            if self._expected_windows is not None:
                self._check_window(window_tokens, self._expected_windows, place)
            self.windows.append(window_tokens)
            self._scores.append(scores)
            self._tensors.append(tensors)
            self.trace.begin(PassPart.FORWARD, self.calls - 1, window_tokens)
            return place
        self._recomputed += 1
        return self._begin_recomputed(window_tokens)

    def _check_window(self, window_tokens: int, expected: Sequence[int], place: str) -> None:
        call = len(self.windows)
        if call < len(expected) and expected[call] != window_tokens:
            windows = window_tokens, expected[call]
            now, before = (f"a sliding window of {one} tokens" if one else "no window" for one in windows)
            raise PlanError(
                f"{self._transport.grid.name}, {place}: the layer attends with {now}, and with {before} in the pass "
                "before; other ranks exchange rows for that. Windows of layers cannot change after the first pass: "
                "enable the model again, on all ranks"
            )

    def begin_backward(self) -> str:
        """Counts a backward call and names its place."""
        if self.num_calls is None:
            self.num_calls = self.calls
        if self._recomputed:
            self._calls_per_region, self._recomputed = self._recomputed, 0
        layer = self._next_backward_layer(self.num_calls)
        self.backward_calls += 1
        self.trace.begin(PassPart.BACKWARD, layer, self.windows[layer] if 0 <= layer < len(self.windows) else 0)
        return self._place(layer, "backward")

    def agree_to_attend(self, fingerprint: int, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> None:
        """Waits until all ranks have shown in which dtype and with which heads they attend, and the pass's facts.

        Args:
            fingerprint: of the plan.

        Raises:
            PlanMismatchError, PeerLostError: they differ.
        """
        if self._facts is None or len(self._transport.grid.members(Scope.STAGE)) == 1:
            return
        heads = ", ".join(f"{name} {tuple(x.shape[1:])}" for name, x in (("q", q_TNH), ("k", k_TGH), ("v", v_TGV)))
        dtypes = ", ".join(str(x.dtype) for x in (q_TNH, k_TGH, v_TGV))
        facts = {
            **self._facts,
            "fingerprint of the plan": fingerprint,
            "dtypes that attention computes in": dtypes,
            "heads and their dimensions": heads,
        }
        self.agreement = Agreement.start(self._transport, Occasion.ATTEND, self._micro_batch, facts, {})
        self.agreement.wait()
        self.agreement = None

    def end(self, exchanges: bool, backward_calls: int | None = None) -> None:
        """Ends the forward pass: all further calls belong to backward.

        Args:
            exchanges: whether ranks exchange rows in this pass; where they do not, they need not agree.
            backward_calls: that follow; None: one for each call that needs gradients, as was noted.
        """
        self.num_calls, self._ended = self.calls, True
        self.trace.end_forward(len(self._with_gradients) if backward_calls is None else backward_calls)
        if self._facts is not None and exchanges and self._transport.world_size > 1:
            self._agree_at_the_end()

    def _agree_at_the_end(self) -> None:
        """Starts showing the other ranks which calls were made."""
        layers = torch.stack(self.layers).tolist() if self.layers else []
        numbers = {
            "attention calls": self.calls,
            "order of the layers that attend": _checksum(layers),
            "sliding windows of the layers that attend": _checksum(self.windows),
            "scales, softcaps and sinks of the layers that attend": _checksum(self._scores),
            "dtypes and heads of the layers that attend": _checksum(self._tensors),
            "attention calls with gradients": len(self._with_gradients),
            "which of them have gradients": _checksum(self._with_gradients),
        }
        self.agreement = Agreement.start(self._transport, Occasion.DIFFERENTIATE, self._micro_batch, {}, numbers)

    def agree_to_differentiate(self) -> None:
        """Waits until all ranks have shown which calls they made and which of them backward will follow; once.

        Raises:
            PlanMismatchError, PeerLostError: they differ.
        """
        if self.agreement is None:
            return
        agreement = self.agreement
        of_ranks = agreement.wait()
        different = {name: values for name, values in of_ranks.items() if len(set(values)) > 1}
        if different:
            name, values = next(iter(different.items()))
            shown = by_value([str(value) for value in values], agreement.labels)
            raise PlanMismatchError(
                f"{self._transport.grid.name}, micro-batch {self._micro_batch}: ranks ran other attention calls in "
                f"their forward passes: {name} is {shown}; no step was taken. "
                "All ranks must run the same layers in one order. Where inputs need gradients on some ranks alone "
                "(frozen layers behind embeddings that another module made), that module must take part on every rank"
            )
        self.agreement = None

    def _begin_recomputed(self, window_tokens: int) -> str:
        """Names a call that checkpointing repeats for backward: the last region first, its calls in order."""
        assert self.num_calls is not None
        last = self._next_backward_layer(self.num_calls)
        layer = last - self._calls_per_region + self._recomputed
        self.trace.begin(PassPart.RECOMPUTED, min(layer, last), window_tokens)
        if layer <= last:
            return self._place(layer, "forward")
        return self._place(last, f"call {self._recomputed} of its checkpointed region, forward")

    def _next_backward_layer(self, num_calls: int) -> int:
        """Returns the layer whose backward call is next: the last one first, and again if a graph is retained."""
        return num_calls - 1 - self.backward_calls % (len(self._with_gradients) or max(1, num_calls))

    def _place(self, layer: int, phase: str) -> str:
        return f"micro-batch {self._micro_batch}, layer {layer}, {phase}"


def _checksum(values: Sequence[Hashable]) -> int:
    texts = {value: str(value) for value in set(values)}  # few layers differ, and texts cost the host
    return zlib.crc32(",".join([texts[value] for value in values]).encode())
