"""The choice of the next token: greedy, or sampled as temperature, top_k and top_p say; and which rows have ended.

Nothing here waits for a GPU or changes its shape, so that a CUDA graph can replay it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

COLDEST = 1e-30  # a temperature that float32 can divide by


class State(NamedTuple):
    """What sampling remembers from token to token."""

    ended: Tensor
    generator: Tensor | None


class Sampling:
    """How tokens are chosen. Rows that have said a stop token go on saying it: `ended` remembers which, bool [B]."""

    def __init__(
        self,
        tokens: Tensor,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        seed: int | None,
        stop_tokens: Collection[int],
    ) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generator = None if seed is None else torch.Generator(device=tokens.device).manual_seed(int(seed))
        self.stops: Tensor | None = None
        if len(stop_tokens):
            self.stops = torch.tensor(sorted(stop_tokens), dtype=torch.int64, device=tokens.device)
        self.ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)

    def next(self, logits: Tensor, last: Tensor) -> Tensor:
        """The tokens after `last` [B], in its dtype, from logits [B, V]."""
        token = self._choose(logits.float()).to(last.dtype)
        if self.stops is None:
            return token
        token = torch.where(self.ended, last, token)
        self.ended |= (token[:, None] == self.stops).any(-1)
        return token

    def state(self) -> State:
        return State(self.ended.clone(), None if self.generator is None else self.generator.get_state())

    def restore(self, state: State) -> None:
        self.ended.copy_(state.ended)
        if self.generator is not None and state.generator is not None:
            self.generator.set_state(state.generator)

    def _choose(self, logits: Tensor) -> Tensor:
        largest, first = logits.max(-1, keepdim=True)
        if largest.device.type == "cpu" and not bool(largest.isfinite().all()):
            raise ValueError("the logits are not finite: there is nothing to choose from")
        if self.temperature == 0:
            return first[:, 0]
        logits = (logits - largest) / max(self.temperature, COLDEST)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if self.top_p is not None and self.top_p < 1:
            ranked, order = logits.sort(dim=-1, descending=True)
            ranked = ranked.softmax(-1)
            before = ranked.cumsum(-1) - ranked  # probability of all that rank higher
            out = before >= self.top_p
            out[:, 0] = False  # also where top_p is 0 in float32
            logits = logits.masked_fill(out.scatter(-1, order, out), float("-inf"))
        # The first of exponential clocks to ring, with these rates, rings with these probabilities.
        weights = logits.softmax(-1)
        return (weights / torch.empty_like(weights).exponential_(generator=self.generator)).argmax(-1)
