"""Kernels that run one after another on the same tensors, described once for all calls of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trainshort.ops.triton.driver import Direct, Launch, Tile, UnsupportedError


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, for tests."""
    return bool(triton.knobs.runtime.interpret)


class Part(NamedTuple):
    """A stretch of one of a program's tensors, from `offset` bytes on, that kernels know by its own name."""

    tensor: str
    offset: int
    dtype: torch.dtype


class Program:
    """Launches, and the names of the tensors and numbers that `run` takes. block_dim: columns of a tile.

    The first run goes through Triton, which compiles; those after it straight to the driver, where that is possible.
    """

    def __init__(
        self, tensors: Sequence[str], numbers: Sequence[str], parts: dict[str, Part], launches: Sequence[Launch],
        block_dim: int = 0,
    ) -> None:  # fmt: skip
        self.tensors, self.numbers, self.parts = tuple(tensors), tuple(numbers), parts
        self.launches = tuple(launches)
        self.block_dim = block_dim
        self.direct: Direct | None = None
        self.why_not_direct = ""

    def run(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> None:
        if self.direct is not None:
            self.direct.run(tensors, numbers)
        else:
            self._run_through_triton(tensors, numbers)

    def _run_through_triton(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> None:
        values: dict[str, Any] = dict(zip(self.tensors, tensors, strict=True))
        values |= dict(zip(self.numbers, numbers, strict=True))
        for name, part in self.parts.items():
            values[name] = values[part.tensor].view(-1).view(torch.uint8)[part.offset :].view(part.dtype)
        compiled = []
        for launch in self.launches:
            arguments = [self._argument(argument, values) for argument in launch.arguments]
            compiled.append(launch.kernel[launch.grid](*arguments, **launch.constants))
        if interpreted() or self.why_not_direct:
            return
        parts = [(self.tensors.index(part.tensor), part.offset) for part in self.parts.values()]
        try:
            self.direct = Direct((*self.tensors, *self.parts), parts, self.numbers, self.launches, compiled, tensors)
        except UnsupportedError as reason:
            self.why_not_direct = str(reason)

    def _argument(self, argument: Any, values: dict[str, Any]) -> Any:
        if isinstance(argument, str):
            return values[argument]
        if isinstance(argument, Tile):
            tensor = values[argument.name]
            if not self.block_dim:
                return tensor
            return TensorDescriptor(tensor, tensor.shape, tensor.stride(), [1, 1, argument.rows, self.block_dim])
        return argument
