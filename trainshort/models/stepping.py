"""Generation on a GPU: one step captured in a CUDA graph, and replayed for every token.

A step is a function of tensors that stay where they are: the last token goes through the model and its stepping
cache, and the choice becomes the last token. Python and launches, which take many times as long as the GPU needs, are
paid for once.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trainshort.models.cache import KeyValueCache
from trainshort.models.sampling import Sampling, State

if TYPE_CHECKING:
    from trainshort.models.language_model import LanguageModel

AT_ONCE = 4  # steps queued together: the host looks at the results of some while the GPU computes the next


class Text:
    """The tokens so far, [B, length], and room for more."""

    def __init__(self, tokens: Tensor, room: int) -> None:
        self.length = tokens.shape[1]
        self._all = torch.cat((tokens, tokens.new_zeros((tokens.shape[0], room))), dim=1)

    @property
    def tokens(self) -> Tensor:
        return self._all[:, : self.length]

    @property
    def room(self) -> int:
        """Tokens that can come before it must grow."""
        return self._all.shape[1] - self.length

    def reserve(self, tokens: int) -> None:
        """Make room for this many more tokens."""
        if tokens > self.room:
            more = max(tokens - self.room, self._all.shape[1])
            self._all = torch.cat((self._all, self._all.new_zeros((self._all.shape[0], more))), dim=1)

    def append(self, column: Tensor) -> Tensor:
        """One token [B] more for each row; returns where it is now."""
        self.reserve(1)
        self.length += 1
        place = self._all[:, self.length - 1]
        return place.copy_(column)


def why_not_graphed(model: LanguageModel, cache: KeyValueCache) -> str | None:
    """Why a step of this model cannot be replayed from a CUDA graph, in words; None where it may."""
    if not cache.keys[0].is_cuda:
        return f"the model is on {cache.keys[0].device}"
    everywhere = torch.nn.modules.module
    hooked = bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)
    if hooked or any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "there are forward hooks, which a graph would not call again"
    return cache.why_not_stepping()


class Step:
    """One step: from the last token to the next, and what the host wants to know of it."""

    def __init__(self, model: LanguageModel, cache: KeyValueCache, sampling: Sampling, last: Tensor) -> None:
        """last: [B]. The cache holds all tokens before it, and steps."""
        self.model, self.cache, self.sampling = model, cache, sampling
        self.token = last[:, None].clone()  # [B, 1]
        self.going = torch.zeros(1, dtype=torch.int64, device=last.device)  # steps after which some row went on

    def run(self) -> None:
        logits = self.model(self.token, cache=self.cache, last_only=True)[:, -1]
        self.token.copy_(self.sampling.next(logits, self.token[:, 0])[:, None])
        if self.sampling.stops is not None:
            self.going += ~self.sampling.ended.all()


class Queued(NamedTuple):
    """Steps that the GPU has been given, and where it tells when they are done."""

    columns: list[Tensor]
    first: int  # steps before them
    going: Tensor  # of the step, in memory of the host
    excess: Tensor | None  # the cache's failure_flag, in memory of the host
    before: State  # of sampling
    done: torch.cuda.Event


class GraphedSteps:
    """Steps on a stream of their own, so that who reads a column does not wait for the steps queued behind it.

    The first step runs as it is, which compiles kernels; the second is captured, and replayed from then on. A cache
    that grows has moved: its first step runs as it is again.
    """

    def __init__(self, step: Step, text: Text, required: bool) -> None:
        """required: raise where a step cannot be captured, rather than warn and go on without a graph."""
        self.step, self.text, self.required = step, text, required
        self.device = step.token.device
        self.stream = _stream_of(self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.has_run = self.failed = self.went_back = False
        self.taken = 0
        self.going = [torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory() for _ in range(3)]
        self.excess = [torch.zeros(1, dtype=torch.float64, device="cpu").pin_memory() for _ in range(3)]

    def columns(self, count: int | None) -> Iterator[tuple[Tensor, bool]]:
        """Up to `count` columns [B] in order, each with whether all rows have ended, where it ends."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        queued: deque[Queued] = deque()
        try:
            while count is None or self.taken < count or queued:
                left = AT_ONCE if count is None else min(AT_ONCE, count - self.taken)
                if left:
                    queued.append(self._queue(left))
                if len(queued) < 2 and left:
                    continue
                steps = queued.popleft()
                steps.done.synchronize()
                if steps.excess is not None and not self.step.cache.heed(float(steps.excess)):
                    queued.clear()
                    self._go_back(steps)
                    continue
                last = int(steps.going) if self.step.sampling.stops is not None else self.taken
                for number, column in enumerate(steps.columns, start=steps.first):
                    yield column, number == last
                    if number == last:
                        return
        finally:
            self._close()

    def _queue(self, steps: int) -> Queued:
        cache, first = self.step.cache, self.taken
        if cache.length + steps > cache.capacity or self.text.room < steps:
            self._grow(steps)
        turn = (first // AT_ONCE) % len(self.going)
        going, excess = self.going[turn], None
        with torch.cuda.stream(self.stream):
            before = self.step.sampling.state()
            columns = []
            for _ in range(steps):
                self._run()
                columns.append(self.text.append(self.step.token[:, 0]))
            going.copy_(self.step.going, non_blocking=True)
            flag = cache.failure_flag()
            if flag is not None:
                excess = self.excess[turn].copy_(flag, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self.taken += steps
        return Queued(columns, first, going, excess, before, done)

    def _run(self) -> None:
        if self.graph is None and self.has_run and not self.failed:
            self.graph = self._capture()
        if self.graph is None:
            self.step.run()
            self.has_run = True
            if self.went_back:
                self.went_back = False
                self.step.cache.begin_steps()
                self.step.cache.reserve(AT_ONCE)
        else:
            self.graph.replay()
            self.step.cache.length += 1

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        cache, graph = self.step.cache, torch.cuda.CUDAGraph()
        generators = [torch.cuda.default_generators[self.device.index or 0]]
        if self.step.sampling.generator is not None:
            generators.append(self.step.sampling.generator)
            graph.register_generator_state(self.step.sampling.generator)
        states = [generator.clone_state() for generator in generators]
        length = cache.length
        try:
            # Not torch.cuda.graph(): it would give all free memory back to the device first.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.step.run()
            finally:
                graph.capture_end()
        except BaseException as error:
            _set_back(generators, states)
            if self.required or not isinstance(error, RuntimeError):
                raise
            self.failed = True
            cause = error.__context__ or error
            warn_eager(f"the model cannot be captured: {str(cause).strip().partition(chr(10))[0]}")
            return None
        finally:
            cache.length = length  # nothing has been computed yet
        return graph

    def _grow(self, steps: int) -> None:
        self.stream.synchronize()
        self._drop_graph()
        self.step.cache.reserve(steps)
        self.text.reserve(steps)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def _go_back(self, steps: Queued) -> None:
        """To before these steps: what they gave and what came after may be wrong. The cache makes up for it with the
        next step, which is no replay."""
        self.stream.synchronize()
        self._drop_graph()
        step, wrong = self.step, self.taken - steps.first
        self.taken, self.went_back = steps.first, True
        self.text.length -= wrong
        step.cache.rollback(wrong)
        step.sampling.restore(steps.before)
        step.token.copy_(self.text.tokens[:, -1:])
        step.going.fill_(steps.first)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def _drop_graph(self) -> None:
        if self.graph is not None:
            self.graph.reset()
        self.graph, self.has_run = None, False

    def _close(self) -> None:
        """Wait for what is queued, and leave memory and cache as those who come after expect them."""
        self.stream.synchronize()
        self._drop_graph()
        self.step.cache.end_steps()


def _set_back(generators: list[torch.Generator], states: list[torch.Generator]) -> None:
    """After a capture that failed: they would believe that it goes on."""
    for generator, state in zip(generators, states, strict=True):
        generator.graphsafe_set_state(state)


def warn_eager(reason: str) -> None:
    warnings.warn(f"generate runs without CUDA graphs: {reason}", stacklevel=2)


_streams = threading.local()


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for each thread and device, kept: torch keeps workspaces for every stream that multiplied matrices."""
    kept: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("by_device", {})
    if device not in kept:
        kept[device] = torch.cuda.Stream(device)
    return kept[device]
