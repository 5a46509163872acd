"""Pass trace: moments within the attention calls of one forward pass and its backward pass, without waiting for the
device. In most steps nothing is noted: `UNTRACED` takes every call, and does nothing.
"""

import time

import torch

from distca_hf.traces import CallTrace, PassPart, Spent


# A moment: nanoseconds of the host, or an event in the stream of a GPU.
Moment = int | torch.cuda.Event


class PassTrace:
    """Notes nothing; `NotedPass` does."""

    def begin(self, part: PassPart, layer: int, window_tokens: int) -> None:
        """Begins an attention call."""

    def spent(self, use: Spent) -> None:
        """Ends a span of the call: the time since the moment before was spent on this."""

    def end_forward(self, backward_calls: int) -> None:
        """Ends the forward pass.

        Args:
            backward_calls: that follow it.
        """


UNTRACED = PassTrace()


class NotedPass(PassTrace):
    """Notes moments on one device. Of a GPU they are events in the stream that attention runs in, which are read once
    the device has passed them.

    Args:
        device: that attention runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._began = self._last = self._now()
        self._calls: list[tuple[PassPart, int, int, Moment]] = []
        self._spans: list[list[tuple[Spent, Moment]]] = []
        self._backward_calls: int | None = None

    def begin(self, part: PassPart, layer: int, window_tokens: int) -> None:
        """Begins an attention call."""
        self._last = self._now()
        self._calls.append((part, layer, window_tokens, self._last))
        self._spans.append([])

    def spent(self, use: Spent) -> None:
        """Ends a span of the call: the time since the moment before was spent on this."""
        self._last = self._now()
        self._spans[-1].append((use, self._last))

    def end_forward(self, backward_calls: int) -> None:
        """Ends the forward pass; `backward_calls` follow it."""
        self._backward_calls = backward_calls

    @property
    def is_complete(self) -> bool:
        """Whether backward has made all calls that follow the forward pass, and the device has passed them."""
        return self.has_all_calls and self.has_passed

    @property
    def has_all_calls(self) -> bool:
        """Whether backward has made all calls that follow the forward pass."""
        made = sum(part is PassPart.BACKWARD for part, *_ in self._calls)
        return self._backward_calls is not None and made >= self._backward_calls

    @property
    def has_passed(self) -> bool:
        """Whether the device has passed all that was noted so far; does not wait."""
        return isinstance(self._last, int) or bool(self._last.query())

    def calls(self) -> tuple[CallTrace, ...]:
        """Returns all calls, once the device has passed them."""
        made = []
        for (part, layer, window_tokens, begin), ends in zip(self._calls, self._spans, strict=True):
            spans, before = [], begin
            for use, end in ends:
                spans.append((use, _us(before, end)))
                before = end
            made.append(CallTrace(part, layer, window_tokens, _us(self._began, begin), tuple(spans)))
        return tuple(made)

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the pass to the last moment that was noted; the device has passed it."""
        return _us(self._began, self._last) / 1e6

    def _now(self) -> Moment:
        if not self._is_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _us(begin: Moment, end: Moment) -> float:
    """Returns microseconds between two moments, to a tenth."""
    if isinstance(begin, int) or isinstance(end, int):
        assert isinstance(begin, int)
        assert isinstance(end, int)
        return round((end - begin) / 1e3, 1)
    return round(1e3 * begin.elapsed_time(end), 1)
