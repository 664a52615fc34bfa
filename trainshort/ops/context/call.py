"""What one rank is asked to compute, and what all ranks must agree on before they talk of anything else."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops.bias import Bias, learned_tensors
from trainshort.ops.biases import BIASES
from trainshort.ops.context.transport import Gather, Protocol
from trainshort.ops.decay import DecayBias
from trainshort.ops.dispatch import BACKENDS
from trainshort.ops.problem import DTYPES, Problem
from trainshort.ops.values import check_values


@dataclass(frozen=True)
class Call:
    """The part of one attention call that falls to a rank."""

    problem: Problem  # the rank's span of queries, keys, values, padding and gates; without documents
    borders: tuple[int, ...] | None  # of documents, in the whole sequence
    backend: str


class Spans(NamedTuple):
    """Where the spans of all ranks lie in the sequence."""

    rank: int  # this one
    lengths: list[int]

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:rank]) for rank in range(len(self.lengths))]

    @property
    def start(self) -> int:
        return sum(self.lengths[: self.rank])

    @property
    def end(self) -> int:
        return self.start + self.lengths[self.rank]

    @property
    def total(self) -> int:
        return sum(self.lengths)


def _float(bits: int) -> str:
    return str(struct.unpack("d", struct.pack("q", bits))[0])


def _yes_or_no(flag: int) -> str:
    return "yes" if flag else "no"


def _gradients(bits: int) -> str:
    names = [name for place, name in enumerate(("q", "k", "v", "the bias")) if bits >> place & 1]
    return ", ".join(names) or "none"


# What must be the same on every rank -> how its number reads. Lengths may differ.
FIELDS: dict[str, Callable[[int], str]] = {
    "batch size": str,
    "number of query heads": str,
    "number of key heads": str,
    "head_dim": str,
    "dtype": lambda code: str(DTYPES[code]),
    "causal": _yes_or_no,
    "scale": _float,
    "tolerance": _float,
    "dropout": _float,
    "bias": lambda code: [*(kind.__name__ for kind in BIASES), "None"][code],
    "slopes or numbers of the bias (by checksum)": hex,
    "key_padding_mask": _yes_or_no,
    "cu_seqlens (by checksum)": hex,
    "tensors that require gradients": _gradients,
    "backend": lambda code: BACKENDS[code],
}


def agree(rank: int, make: Callable[[], Call], device: torch.device) -> Protocol:
    """The first step of every call: returns the call and the spans, or raises on every rank what is wrong on one."""
    failure: Exception | None = None
    header = [0] * (2 + len(FIELDS))
    try:
        call = make()
        header = [1, call.problem.q.shape[2], *_numbers(call)]
    except Exception as error:  # the other ranks would wait for this rank forever
        failure = error
    gathered = yield Gather([torch.tensor(header, dtype=torch.int64, device=device)])
    if failure is not None:
        raise failure
    headers = torch.stack([numbers for (numbers,) in gathered]).tolist()
    _compare(headers)
    spans = Spans(rank, [numbers[1] for numbers in headers])
    _check_borders(call.borders, spans.total)
    return call, spans


def _numbers(call: Call) -> list[int]:
    problem = call.problem
    check_values(problem)
    q, bias = problem.q, problem.bias
    kind = len(BIASES) if bias is None else next(code for code, kind in enumerate(BIASES) if isinstance(bias, kind))
    asked = [tensor.requires_grad for tensor in (q, problem.k, problem.v)]
    asked.append(any(tensor.requires_grad for tensor in learned_tensors(bias)))
    borders = 0 if call.borders is None else zlib.crc32(str(call.borders).encode()) + 1
    return [
        q.shape[0], q.shape[1], problem.k.shape[1], q.shape[3], DTYPES.index(q.dtype), int(problem.causal),
        _bits(problem.scale), _bits(problem.tolerance), _bits(problem.dropout), kind, _checksum(bias),
        int(problem.key_padding_mask is not None), borders,
        sum(flag << place for place, flag in enumerate(asked)) if torch.is_grad_enabled() else 0,
        BACKENDS.index(call.backend),
    ]  # fmt: skip


def _bits(number: float) -> int:
    return int(struct.unpack("q", struct.pack("d", float(number)))[0])


def _checksum(bias: Bias | None) -> int:
    """Of what every rank has of a bias alike: all but gates and times, of which only the shapes count."""
    found = 0
    for field in () if bias is None else fields(bias):  # type: ignore[arg-type]
        value = getattr(bias, field.name)
        if isinstance(value, Tensor):
            own = isinstance(bias, DecayBias) and field.name != "rates"
            content = b"" if own else value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            shape = list(value.shape[:1] if field.name == "times" else value.shape[:2] if own else value.shape)
            value = f"{shape} {zlib.crc32(content)}"
        found = zlib.crc32(f"{field.name} {value}".encode(), found)
    return found


def _compare(headers: list[list[int]]) -> None:
    for rank, header in enumerate(headers):
        if not header[0]:
            raise RuntimeError(f"rank {rank} of the context refused its part of this call: see its own error")
    for rank, header in enumerate(headers):
        for (name, text), first, own in zip(FIELDS.items(), headers[0][2:], header[2:], strict=True):
            if own != first:
                raise ValueError(
                    f"all ranks of a context must make the same call, each with its span: {name} is {text(first)} "
                    f"on rank 0 and {text(own)} on rank {rank}"
                )


def _check_borders(borders: tuple[int, ...] | None, total: int) -> None:
    if borders is None:
        return
    if borders[0] != 0 or borders[-1] != total or any(a > b for a, b in itertools.pairwise(borders)):
        raise ValueError(
            f"under context_parallel cu_seqlens has the borders of the whole sequence: it must start at 0, never go "
            f"down and end at its length {total}, got {list(borders[:8])}{' ...' if len(borders) > 8 else ''}"
        )
