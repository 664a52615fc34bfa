"""How ranks talk: requests of a protocol, and who answers them.

What a rank does is a generator (plan.py, passes.py) that yields requests and is sent the answers, so that it knows
nothing of processes. `ProcessGroup` answers by torch.distributed, for one rank a process. `Simulated` runs the
generators of all ranks in one process, one after another from request to request: for tests, for counting bytes, and
for measuring what the ranks compute without what they wait for.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Gather:
    """Every rank gives tensors of the same shapes and dtypes. The answer: those of each rank, in order."""

    tensors: list[Tensor]


@dataclass(frozen=True)
class Start:
    """Send bytes to other ranks, and begin to receive some from them. The answer: what `Wait` needs.

    An entry a rank, of no bytes where there is nothing to send or to receive, as for the rank itself.
    """

    send: list[Tensor]  # uint8
    receive: list[int]
    kind: str  # "keys" or "gradients": which count of `Sent` it belongs to


@dataclass(frozen=True)
class Wait:
    """The answer: the bytes that came from each rank."""

    started: Any


Protocol = Generator[Any, Any, Any]


@dataclass
class Sent:
    """Bytes that this rank sent to others, by kind, and what ring attention would have sent for the same calls.

    A ring sends the keys and values of every rank to all others, hop by hop, and in the backward pass their
    gradients: here counted for the rank whose keys they are.
    """

    bounds: int = 0  # sizes, bounds of blocks and windows: everything but the next two
    keys: int = 0  # keys and values (under a DecayBias with the sums of gates, or times)
    gradients: int = 0  # of keys and values
    ring: int = 0
    calls: int = 0
    windows: int = 0  # of all calls: one for each row of the batch and key head
    everything: int = 0  # of these, the ones for which all keys in sight on other ranks, if any, were fetched

    @property
    def bytes(self) -> int:
        return self.bounds + self.keys + self.gradients

    @property
    def of_ring(self) -> float:
        """Bytes sent, as a share of the ring's."""
        return self.bytes / self.ring if self.ring else 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(*(mine + others for mine, others in zip(self.numbers(), other.numbers(), strict=True)))

    def numbers(self) -> list[int]:
        return [self.bounds, self.keys, self.gradients, self.ring, self.calls, self.windows, self.everything]

    def add(self, kind: str, count: int) -> None:
        setattr(self, kind, getattr(self, kind) + count)


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The contents of tensors of one device, one after the other: uint8 [bytes]. Those of large numbers first."""
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def from_bytes(data: Tensor, like: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """The tensors of these shapes and dtypes again."""
    found, place = [], 0
    for shape, dtype in like:
        count = math.prod(shape) * dtype.itemsize
        part = data[place : place + count]
        part = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
        found.append(part.view(dtype).view(list(shape)))
        place += count
    return found


def _gathered(request: Gather, all_bytes: Sequence[Tensor]) -> list[list[Tensor]]:
    like = [(tuple(tensor.shape), tensor.dtype) for tensor in request.tensors]
    return [from_bytes(data, like) for data in all_bytes]


class ProcessGroup:
    """The ranks of a group of torch.distributed: this process is one of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.ranks = [dist.get_rank(group)]  # those whose protocols are run here
        self.sent = [Sent()]

    def run(self, protocols: Sequence[Protocol]) -> list[Any]:
        """Run the protocol of this rank to its end. The others do so in their processes."""
        (protocol,) = protocols
        answer = None
        try:
            while True:
                answer = self._answer(protocol.send(answer))
        except StopIteration as done:
            return [done.value]

    def _answer(self, request: Gather | Start | Wait) -> Any:
        if isinstance(request, Gather):
            own = to_bytes(request.tensors)
            self.sent[0].bounds += own.numel() * (self.size - 1)
            everyone = [torch.empty_like(own) for _ in range(self.size)]
            if own.numel():
                dist.all_gather(everyone, own, group=self.group)
            return _gathered(request, everyone)
        if isinstance(request, Start):
            self.sent[0].add(request.kind, sum(data.numel() for data in request.send))
            return self._start(request)
        received, works = request.started
        for work in works:
            work.wait()
        return received

    def _start(self, request: Start) -> tuple[list[Tensor], list[Any]]:
        received = [request.send[0].new_empty(count) for count in request.receive]
        operations = []
        for rank in range(self.size):
            peer = dist.get_global_rank(self.group, rank)
            if request.send[rank].numel():
                operations.append(dist.P2POp(dist.isend, request.send[rank], peer, self.group))
            if received[rank].numel():
                operations.append(dist.P2POp(dist.irecv, received[rank], peer, self.group))
        return received, dist.batch_isend_irecv(operations) if operations else []


@dataclass
class Simulated:
    """All ranks in this process, one after another."""

    size: int
    sent: list[Sent] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = list(range(self.size))
        self.sent = [Sent() for _ in self.ranks]

    def run(self, protocols: Sequence[Protocol]) -> list[Any]:
        """Run the protocols of all ranks to their ends, all from one request to the next in turn."""
        answers: list[Any] = [None] * self.size
        while True:
            requests, values = [], []
            for protocol, answer in zip(protocols, answers, strict=True):
                try:
                    requests.append(protocol.send(answer))
                except StopIteration as done:
                    values.append(done.value)
            if values:
                assert not requests, "ranks must make the same requests"
                return values
            answers = self._answers(requests)

    def _answers(self, requests: list[Any]) -> list[Any]:
        if isinstance(requests[0], Gather):
            everyone = [to_bytes(request.tensors) for request in requests]
            for sent, data in zip(self.sent, everyone, strict=True):
                sent.bounds += data.numel() * (self.size - 1)
            found = _gathered(requests[0], everyone)
            return [found for _ in requests]
        if isinstance(requests[0], Start):
            for rank, request in enumerate(requests):
                self.sent[rank].add(request.kind, sum(data.numel() for data in request.send))
                for other, data in enumerate(request.send):
                    assert data.numel() == requests[other].receive[rank], "what is sent is what is expected"
            return [[request.send[rank] for request in requests] for rank in self.ranks]
        return [request.started for request in requests]
