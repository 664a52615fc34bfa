"""What the kernels of a problem are told that does not change from call to call with the same shapes.

Launching through Triton's front door costs more time on the host than a short sequence takes on the GPU: it looks at
every argument anew. So a plan remembers sizes, strides and constants of a kind of problem, and the compiled kernels
themselves, by everything that could make Triton compile another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trainshort.attention.bias import BucketBias, LinearBias, alibi_slopes
from trainshort.attention.problem import Problem
from trainshort.attention.triton.shapes import ROWS, UNIT, blocks_of, window_width
from trainshort.attention.triton.tuning import Tiles, is_hopper, tiles_for

_SIGHTS = {"past": 1, "future": 2, "both": 3}
_MOST = 512  # plans to remember


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, for tests."""
    return bool(triton.knobs.runtime.interpret)


class Plan:
    """One kind of problem: see the module's docstring."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, aligned: bool) -> None:
        bias = problem.bias
        self.device = q.device
        self.batch, self.heads, self.queries, self.dim = q.shape
        self.kv_heads, self.keys = k.shape[1], k.shape[2]
        self.group = self.heads // self.kv_heads
        self.block_dim = max(16, triton.next_power_of_2(self.dim))
        self.causal = problem.causal
        self.packed = problem.cu_seqlens is not None
        self.ragged = self.packed or problem.key_padding_mask is not None or isinstance(problem.start, Tensor)
        self.tail = has_tail(problem)
        self.linear = isinstance(bias, LinearBias)
        self.bucket = isinstance(bias, BucketBias)
        self.offset = float(bias.offset) if isinstance(bias, LinearBias) else 0.0
        self.reach = bias.max_distance if isinstance(bias, BucketBias) else 0
        self.entries = blocks_of(self.queries, problem.cu_seqlens)
        self.key_entries = blocks_of(self.keys, problem.cu_seqlens)
        self.units = self.entries * (ROWS // UNIT)
        self.key_units = self.key_entries * (ROWS // UNIT)
        self.width = window_width(q, k, self.linear, problem.cu_seqlens, problem.causal, problem.tolerance)
        described = aligned and q.element_size() == 2 and not self.ragged and not self.tail
        self.tma = described and (is_hopper(q.device) or interpreted())
        self.precision = "ieee"
        if q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
            self.precision = "tf32"
        self.tiles = {
            kernel: tiles_for(kernel, q.dtype, self.dim, q.device) for kernel in ("forward", "queries", "keys")
        }
        sights = tuple(_SIGHTS[sight] for sight in problem.sights)
        self.sided = not problem.causal and sights != (3,) * self.heads
        self.sees = torch.tensor(sights, dtype=torch.int32, device=q.device) if self.sided else None
        self.order = self._order()
        self.compiled: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self.described: dict[tuple[Any, ...], dict[str, Any]] = {}

    def _order(self) -> Tensor | None:
        """Heads from steep to gentle by the paper's rule, where that is not their own order."""
        if self.heads & (self.heads - 1) == 0:
            return None
        return alibi_slopes(self.heads).argsort(descending=True).to(device=self.device, dtype=torch.int32)

    def constants(self, **more: Any) -> dict[str, Any]:
        return {
            "D": self.dim,
            "BD": self.block_dim,
            "CAUSAL": self.causal,
            "RAGGED": self.ragged and not self.packed,
            "PACKED": self.packed,
            **more,
        }

    def attention_constants(self, tiles: Tiles, **more: Any) -> dict[str, Any]:
        if tiles.registers is not None:
            more["maxnreg"] = tiles.registers
        return self.constants(
            BM=tiles.rows,
            BN=tiles.keys,
            BIAS=1 if self.linear else 2 if self.bucket else 0,
            SIDED=self.sided,
            WINDOWS=self.width > 0,
            ORDERED=self.order is not None,
            TMA=self.tma,
            PRECISION=self.precision,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **more,
        )

    def readable(self, tensor: Tensor, rows: int) -> Any:
        """A tensor for load_rows in tiles of `rows`: a descriptor, or the tensor itself."""
        if not self.tma:
            return tensor
        key = (tensor.shape, tensor.stride(), rows)
        fields = self.described.get(key)
        if fields is None:
            descriptor = TensorDescriptor(tensor, tensor.shape, tensor.stride(), [1, 1, rows, self.block_dim])
            self.described[key] = {**vars(descriptor), "base": None}
            return descriptor
        descriptor = object.__new__(TensorDescriptor)  # checked before, and its checks cost more than the launch
        vars(descriptor).update(fields)
        descriptor.base = tensor
        return descriptor

    def split(self, tensor: Tensor, starts: Sequence[int], kernels: tuple[str, ...]) -> list[Any]:
        """Parts of a buffer for these kernels, given where each begins: views, or addresses if all are remembered."""
        if not all(kernel in self.compiled for kernel in kernels):
            flat = tensor.view(-1)
            return [flat[start:] for start in starts]
        base, size = tensor.data_ptr(), tensor.element_size()
        return [base + start * size for start in starts]

    def launch(
        self, name: str, kernel: Any, grid: tuple[int, int, int], tiles: tuple[Any, ...], tensors: tuple[Any, ...],
        numbers: tuple[Any, ...], sizes: Callable[[], tuple[Any, ...]], constants: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        """Run a kernel, whose parameters come in this order.

        name: of the kernel, and of whatever of its constants the plan leaves open. tiles: what `readable` gave.
        numbers: change from call to call; Triton must not specialise on them. sizes, constants: the plan's own.
        """
        remembered = self.compiled.get(name)
        if remembered is not None:
            run, tail = remembered
            # An address is taken as it is; of a tensor, the launcher would ask the driver where it lies.
            run(*tiles, *[t if type(t) is int else t.data_ptr() for t in tensors], *numbers, *tail)
            return
        own_sizes, own_constants = sizes(), constants()
        arguments = (*tiles, *tensors, *numbers, *own_sizes)
        handle = kernel[grid](*arguments, **own_constants)
        if not interpreted():
            names = kernel.arg_names[len(arguments) :]
            self.compiled[name] = (handle[grid], (*own_sizes, *(own_constants[name] for name in names)))


_plans: dict[tuple[Any, ...], Plan] = {}


def plan_for(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Plan:
    """The plan for this kind of problem. others: more tensors that the kernels read as they do q."""
    bias = problem.bias
    described: tuple[Any, ...] = ()
    if isinstance(bias, LinearBias):
        ahead = None if bias.future is None else bias.future.dim()
        described = (bias.slopes.dim(), ahead, bias.offset, bias.sees)
    elif isinstance(bias, BucketBias):
        described = (bias.table.shape, bias.max_distance)
    layouts = [(tensor.shape, tensor.stride(), tensor.data_ptr() % 16) for tensor in (q, k, v, *others)]
    key = (
        *layouts,
        q.dtype,
        q.device,
        described,
        problem.causal,
        problem.tolerance > 0.0,
        problem.key_padding_mask is not None,
        isinstance(problem.query_start, Tensor),
        has_tail(problem),
        None if problem.cu_seqlens is None else problem.cu_seqlens.shape,
        torch.backends.cuda.matmul.allow_tf32,
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST:
            _plans.clear()
        aligned = all(_can_describe(tensor) for tensor in (q, k, v, *others))
        plan = _plans[key] = Plan(problem, q, k, v, aligned)
    return plan


def has_tail(problem: Problem) -> bool:
    """Whether there are keys after the last query that nobody may look at, not even to multiply them by zero."""
    start = problem.query_start
    return problem.causal and isinstance(start, int) and start + problem.q.shape[2] < problem.k.shape[2]


def _can_describe(tensor: Tensor) -> bool:
    """Whether the hardware's tile copies can read it: rows and starts on 16 bytes."""
    size = tensor.element_size()
    b, h, t, d = tensor.stride()
    return (
        d == 1
        and (b * size | h * size | t * size | tensor.data_ptr()) % 16 == 0
        and min(b, h, t) > 0
        and tensor.numel() > 0
    )
