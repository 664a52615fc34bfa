"""The context manager, and attention inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainshort.ops.bias import Bias
from trainshort.ops.context import state
from trainshort.ops.context.call import Call, agree
from trainshort.ops.context.passes import Attend, learned_of
from trainshort.ops.context.plan import Plan, make_plan
from trainshort.ops.context.transport import Gather, ProcessGroup, Protocol, Sent, Simulated
from trainshort.ops.dispatch import backend_of, check_backend
from trainshort.ops.problem import make_problem
from trainshort.ops.tracing import refuse_transforms


class ContextParallel:
    """What `context_parallel` gives: where this rank stands, and what was sent."""

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = ranks

    @property
    def rank(self) -> int:
        """Of this process among those that share the sequence."""
        return self._ranks.ranks[0]

    @property
    def size(self) -> int:
        return self._ranks.size

    @property
    def sent(self) -> Sent:
        """Bytes that this rank sent so far, and what a ring would have sent."""
        return self._ranks.sent[0]

    def total(self) -> Sent:
        """The same, added up over all ranks. All of them must ask."""
        numbers = torch.tensor(self.sent.numbers(), dtype=torch.int64, device=self._device())
        dist.all_reduce(numbers, group=self._ranks.group)
        return Sent(*numbers.tolist())

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, of one shape and dtype, stacked: [ranks, ...]. Without gradients."""
        (gathered,) = self._ranks.run([_gather(tensor.detach())])
        return torch.stack([own for (own,) in gathered])

    def _device(self) -> torch.device:
        """One that all ranks of the group can talk over, whatever device their tensors are on."""
        on_cpu = torch.device("cpu") in self._ranks.group._device_types
        return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    @torch.compiler.disable
    def checked(self, make: Callable[[], Any]) -> Any:
        """What `make` gives. If it refuses its input, the other ranks, which wait in `attend`, are told."""
        try:
            return make()
        except Exception:
            self._ranks.run([agree(self.rank, make, self._device())])
            raise

    @torch.compiler.disable
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, backend: str, options: dict[str, Any]
    ) -> Tensor:
        (out,) = _attend(self._ranks, [call_maker(q, k, v, bias, backend, options)], self._device())
        return out


def _gather(tensor: Tensor) -> Protocol:
    gathered = yield Gather([tensor])
    return gathered


@contextmanager
def context_parallel(
    mesh: DeviceMesh | dist.ProcessGroup | None = None, *, group: dist.ProcessGroup | None = None
) -> Iterator[ContextParallel]:
    """Attention over a sequence that is split into contiguous spans, one a rank.

    Inside the context, `ts.attention` and `ts.alibi_attention` take a rank's span of queries, keys and values and
    give the output of its rows, as one process would over the whole sequence: within the tolerance, forward and
    backward. All ranks make the same calls in the same order. Spans may have different lengths, and none at all.

    `key_padding_mask` and the gates or times of a DecayBias are those of the span; `cu_seqlens` has the borders of
    the whole sequence, on every rank. Slopes, tables and weights are the same everywhere, and each rank gets the
    gradient that its own rows give: their sum over ranks is that of one process.

    Args:
        mesh: A one-dimensional DeviceMesh, or a process group.
        group: A process group, instead of a mesh.

    Returns:
        A ContextParallel, whose `sent` counts bytes of bounds, keys and gradients, beside those of ring attention.

    Example:
        >>> with ts.context_parallel(torch.distributed.group.WORLD) as parallel:  # or a mesh
        ...     out = ts.alibi_attention(q, k, v)
        >>> bytes_sent = parallel.sent.bytes
    """
    if mesh is not None and group is not None:
        raise TypeError("context_parallel takes a mesh or a group, not both")
    with _entered(ContextParallel(ProcessGroup(_group_of(group if mesh is None else mesh)))) as parallel:
        yield parallel


@contextmanager
def _entered(parallel: ContextParallel) -> Iterator[ContextParallel]:
    if state.current is not None:
        raise RuntimeError("a context_parallel inside another: a sequence is split once")
    state.current = parallel
    try:
        yield parallel
    finally:
        state.current = None


def _group_of(mesh: Any) -> dist.ProcessGroup:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"context_parallel needs a DeviceMesh of one dimension, got {mesh.ndim}: take the one that splits "
                "the sequence, mesh['context'] for example"
            )
        return mesh.get_group()
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not in the group that context_parallel was given: leave it out there")
    if not isinstance(mesh, dist.ProcessGroup):
        raise TypeError(f"context_parallel needs a DeviceMesh or a process group, got {type(mesh).__name__}")
    return mesh


def simulate(
    spans: Sequence[tuple[Tensor, Tensor, Tensor]],
    *,
    bias: Bias | Sequence[Bias | None] | None = None,
    key_padding_mask: Sequence[Tensor] | None = None,
    backend: str = "auto",
    **options: Any,
) -> tuple[list[Tensor], list[Sent]]:
    """What ranks would compute and send, all of them in this process, one after another.

    Args:
        spans: q, k and v of each rank.
        bias: Of all ranks, or one for each: gates and times are those of a span.
        key_padding_mask: Of each rank.
        **options: Other arguments of `attention`.

    Returns:
        The output of each rank, differentiable, and what each has sent so far: `backward` adds to it.
    """
    ranks = Simulated(len(spans))
    biases = list(bias) if isinstance(bias, Sequence) else [bias] * len(spans)
    masks = [None] * len(spans) if key_padding_mask is None else list(key_padding_mask)
    calls = [
        call_maker(*span, own, backend, {**options, "key_padding_mask": mask})
        for span, own, mask in zip(spans, biases, masks, strict=True)
    ]
    return list(_attend(ranks, calls, spans[0][0].device)), ranks.sent


def _attend(
    ranks: ProcessGroup | Simulated, calls: Sequence[Callable[[], Call]], device: torch.device
) -> tuple[Tensor, ...]:
    plans: list[Plan] = ranks.run(
        [make_plan(rank, make, device) for rank, make in zip(ranks.ranks, calls, strict=True)]
    )
    tensors = []
    for sent, plan in zip(ranks.sent, plans, strict=True):
        problem = plan.problem
        tensors += [problem.q, problem.k, problem.v, *learned_of(plan)]
        sent.calls += 1
        sent.windows += problem.k.shape[0] * problem.k.shape[1]
        sent.everything += plan.everything
        sent.ring += _ring_bytes(plan)
    results: tuple[Tensor, ...] = Attend.apply(ranks, plans, *tensors)
    return results


def _ring_bytes(plan: Plan) -> int:
    """What a ring sends of this rank's keys and values, and of their gradients if there will be any."""
    k = plan.problem.k
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (plan.problem.q, k, plan.problem.v))
    return 2 * k.numel() * k.element_size() * (len(plan.spans.lengths) - 1) * (2 if learns else 1)


UNSUPPORTED = {
    "query_start": "queries stand at the places of their keys",
    "key_norms": "there are no caches",
    "return_lse": "it gives the output alone",
    "return_windows": "it gives the output alone",
}


def call_maker(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, backend: str, options: dict[str, Any]
) -> Callable[[], Call]:
    def make() -> Call:
        given = dict(options)
        for name, why in UNSUPPORTED.items():
            value = given.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"under context_parallel attention takes no {name}: {why}")
        borders = given.pop("cu_seqlens", None)
        problem = make_problem(q, k, v, bias, **given)
        refuse_transforms([problem.q, problem.k, problem.v])
        if problem.q.shape[2] != problem.k.shape[2]:
            raise ValueError(
                "under context_parallel a span has as many queries as keys, got "
                f"{problem.q.shape[2]} and {problem.k.shape[2]}"
            )
        check_backend(backend)
        backend_of(problem, backend)
        return Call(problem, _borders(problem.q, problem.key_padding_mask, borders), backend)

    return make


def _borders(q: Tensor, mask: Tensor | None, borders: Any) -> tuple[int, ...] | None:
    if borders is None:
        return None
    if not isinstance(borders, Tensor) or borders.dtype not in (torch.int32, torch.int64):
        came = borders.dtype if isinstance(borders, Tensor) else type(borders).__name__
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, got {came}")
    if borders.dim() != 1 or borders.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be [documents + 1], got {list(borders.shape)}")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents into one row: batch must be 1, got {q.shape[0]}")
    if mask is not None:
        raise ValueError("cu_seqlens and key_padding_mask do not combine: leave the padding out of the row")
    return tuple(borders.tolist())
