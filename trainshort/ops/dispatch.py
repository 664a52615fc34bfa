"""Which path computes a problem: each says which problems it takes, or why not, in words.

    path               backend      takes
    reference          reference    everything; dense
    triton decoding    triton       a few causal queries a row, forward only
    sdpa               auto only    attention without a bias, where torch's own kernels compute exactly that
    triton             triton       16- and 32-bit CUDA tensors with a head_dim of at most 256
    blocked decoding   blocked      one causal query a row with key_norms, on a CPU, forward only
    blocked            blocked      everything, on any device

The first path of a backend that takes a problem computes it; "auto" tries all but the reference, in this order, and
Triton only for tensors on a GPU. Decoding comes before torch's kernels, which plan anew for every number of keys.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops import operators, reference, sdpa
from trainshort.ops.bias import learned_tensors
from trainshort.ops.blocked import decode as blocked_decoding
from trainshort.ops.blocked import run as blocked_backend
from trainshort.ops.problem import BLOCK, Problem
from trainshort.ops.results import AttentionOutput, finished_lse, finished_windows
from trainshort.ops.tracing import is_eager, is_recording, refuse_transforms
from trainshort.ops.triton import run as triton_backend
from trainshort.ops.triton import shapes
from trainshort.ops.values import check_values
from trainshort.ops.windows import visible_blocks

BACKENDS = ("auto", "reference", "blocked", "triton")
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton then runs kernels on the CPU, for tests


def _tensors(problem: Problem) -> list[Tensor]:
    """The tensors that autograd could ask a gradient for."""
    return [problem.q, problem.k, problem.v, *learned_tensors(problem.bias)]


def _is_eager(problem: Problem) -> bool:
    return is_eager(*_tensors(problem))


def _is_recording(problem: Problem) -> bool:
    return is_recording(*_tensors(problem))


# Output, natural log-sum-exp, and what was visited: first and one-past-last key of each query; None for everything.
Everything = tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]


class Path(NamedTuple):
    name: str
    backend: str
    why_not: Callable[[Problem], str | None]  # in words; None where it takes the problem
    run: Callable[[Problem], Tensor]
    skips: Callable[[Problem], bool]  # whether it may skip keys of a problem that it takes
    run_fully: Callable[[Problem], Everything] | None = None  # None where it computes the output alone


def _nothing_against(problem: Problem) -> str | None:
    return None


def _run_reference(problem: Problem) -> Tensor:
    check_values(problem)
    return reference.attend(problem)


def _run_reference_fully(problem: Problem) -> Everything:
    check_values(problem)
    return *reference.attend_with_lse(problem), None


def why_not_triton(q: Tensor) -> str | None:
    if not HAS_TRITON:
        return "it needs Triton, which is not installed"
    if not q.is_cuda and not INTERPRETED:
        return f"it needs CUDA tensors, got q on {q.device}"
    if q.dtype == torch.float64:
        return f"it computes in at most float32, got {q.dtype}"
    if q.shape[-1] > shapes.LARGEST_DIM:
        return f"it needs a head_dim of at most {shapes.LARGEST_DIM}, got {q.shape[-1]}"
    return None


def _why_not_kernels(problem: Problem) -> str | None:
    if problem.bias is not None and not problem.bias.has_kernels:
        return f"it does not take a {type(problem.bias).__name__} yet"
    return why_not_triton(problem.q)


def takes_kernels(*tensors: Tensor) -> bool:
    """Whether kernels may compute something of these right now, with nobody asking for gradients or a graph."""
    return why_not_triton(tensors[0]) is None and is_eager(*tensors) and not is_recording(*tensors)


def _why_not_triton_decoding(problem: Problem) -> str | None:
    reason = _why_not_kernels(problem)
    if reason is not None:
        return reason
    if not problem.is_decoding:
        return "it takes a few causal queries a row"
    if problem.wants_windows:
        return "it does not tell which keys it visits"
    if problem.dropout:
        return "it takes no dropout"
    return "it is forward only, and a gradient may be asked for" if _is_recording(problem) else None


def _run_triton_decoding(problem: Problem) -> Tensor:
    refuse_transforms(_tensors(problem))
    if not _is_eager(problem):
        return operators.triton_decode_op(*operators.pack(problem))
    return triton_backend.decode(problem)


def _run_triton_decoding_fully(problem: Problem) -> Everything:
    refuse_transforms(_tensors(problem))
    return *operators.triton_decode_lse_op(*operators.pack(problem)), None


def _run_triton(problem: Problem) -> Tensor:
    refuse_transforms(_tensors(problem))
    if not _is_eager(problem):
        return operators.triton_op(*operators.pack(problem))[0]
    return triton_backend.attend(problem)


def _run_triton_fully(problem: Problem) -> Everything:
    refuse_transforms(_tensors(problem))
    out, lse, windows = operators.triton_op(*operators.pack(problem))
    visited = triton_backend.visited_keys(problem, windows) if problem.wants_windows else None
    return out, lse * math.log(2.0), visited


def _why_not_blocked_decoding(problem: Problem) -> str | None:
    if problem.q.shape[2] != 1:  # before anything that takes longer
        return "it takes one causal query a row"
    if _is_recording(problem):
        return "it is forward only, and a gradient may be asked for"
    if not _is_eager(problem):
        return "a compiler or a transform of torch is at work"
    return blocked_decoding.why_not(problem)


def _run_blocked_decoding(problem: Problem) -> Tensor:
    """Without the operator's bookkeeping, where a step takes microseconds."""
    refuse_transforms(_tensors(problem))
    if problem.key_padding_mask is not None:  # slopes and norms are looked at below, and refused by _run_blocked
        check_values(problem)
    out = blocked_decoding.attend(problem)
    return _run_blocked(problem) if out is None else out


def _run_blocked(problem: Problem) -> Tensor:
    refuse_transforms(_tensors(problem))
    return operators.blocked_op(*operators.pack(problem))[0]


def _run_blocked_fully(problem: Problem) -> Everything:
    refuse_transforms(_tensors(problem))
    out, lse, windows = operators.blocked_op(*operators.pack(problem))
    return out, lse, blocked_backend.visited_keys(problem, windows)


def _never(problem: Problem) -> bool:
    return False


def _may_skip(problem: Problem) -> bool:
    return problem.may_skip


def _may_skip_with_norms(problem: Problem) -> bool:
    return problem.may_skip and problem.key_norms is not None


def _may_skip_in_kernels(problem: Problem) -> bool:
    return problem.may_skip and problem.k.shape[2] >= shapes.SHORTEST


PATHS = (
    Path("reference", "reference", _nothing_against, _run_reference, _never, _run_reference_fully),
    Path(
        "triton decoding", "triton", _why_not_triton_decoding, _run_triton_decoding, _may_skip_with_norms,
        _run_triton_decoding_fully,
    ),
    Path("sdpa", "", sdpa.why_not, sdpa.attend, _never),
    Path("triton", "triton", _why_not_kernels, _run_triton, _may_skip_in_kernels, _run_triton_fully),
    Path("blocked decoding", "blocked", _why_not_blocked_decoding, _run_blocked_decoding, _may_skip),
    Path("blocked", "blocked", _nothing_against, _run_blocked, _may_skip, _run_blocked_fully),
)  # fmt: skip
_NAMED = {name: tuple(path for path in PATHS if path.backend == name) for name in BACKENDS if name != "auto"}
_AUTO_ON_GPU = tuple(path for path in PATHS if path.backend != "reference")
_AUTO_ELSEWHERE = tuple(path for path in _AUTO_ON_GPU if path.backend != "triton")


def _candidates(problem: Problem, backend: str) -> tuple[Path, ...]:
    """The paths that may be chosen, in the order in which they are asked."""
    if backend != "auto":
        return _NAMED[backend]
    return _AUTO_ON_GPU if problem.q.is_cuda else _AUTO_ELSEWHERE


def choose(problem: Problem, backend: str, fully: bool = False) -> Path:
    """The first path that takes the problem, or an error that says why none of a named backend does.

    fully: whether more than the output is asked for.
    """
    reason = None
    for path in _candidates(problem, backend):
        reason = _why_not(path, problem, fully)
        if reason is None:
            return path
    reason = str(reason).removeprefix("it ")
    raise RuntimeError(f"backend {backend!r} {reason}: use backend='auto' or 'blocked', which run on any device")


def _why_not(path: Path, problem: Problem, fully: bool) -> str | None:
    return "it computes the output alone" if fully and path.run_fully is None else path.why_not(problem)


def attend(problem: Problem, backend: str) -> Tensor:
    """Compute a problem with a backend."""
    return choose(problem, backend).run(problem)


def attend_fully(problem: Problem, backend: str, want_lse: bool) -> AttentionOutput:
    """The same, with the log-sum-exp if wanted, and the windows if the problem wants them."""
    run = choose(problem, backend, fully=True).run_fully
    assert run is not None
    out, lse, visited = run(problem)
    return AttentionOutput(
        out,
        finished_lse(problem, lse) if want_lse else None,
        finished_windows(problem, visited) if problem.wants_windows else None,
    )


def backend_for(q: Tensor) -> str:
    """The name of the backend that "auto" chooses for such queries.

    Args:
        q: [B, H, Tq, D], or any tensor of that device, dtype and last dimension.

    Returns:
        "triton" for 16- and 32-bit CUDA tensors with D of at most 256 where Triton is installed, else "blocked".

    Example:
        >>> ts.backend_for(torch.zeros(1, 8, 16, 64))
        'blocked'
    """
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a tensor, got {type(q).__name__}")
    supported = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return "triton" if supported and why_not_triton(q) is None else "blocked"


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")


def backend_of(problem: Problem, backend: str) -> str:
    """The backend with a forward and a backward operator for a problem: "triton" or "blocked"."""
    if backend == "reference":
        raise ValueError("backend 'reference' is dense and runs in one process: use 'auto', 'blocked' or 'triton'")
    if backend == "auto":
        return "triton" if problem.q.is_cuda and _why_not_kernels(problem) is None else "blocked"
    if backend == "triton" and (reason := _why_not_kernels(problem)) is not None:
        raise RuntimeError(f"backend 'triton' {reason.removeprefix('it ')}: use backend='auto' or 'blocked'")
    return backend


def certified_blocks(problem: Problem, block: int) -> Tensor:
    """First and one-past-last key block that "auto" visits: int32 [B, H, ceil(Tq / block), 2]."""
    return _windows(problem, block, of_kernels=problem.q.is_cuda and _why_not_kernels(problem) is None)


def _windows(problem: Problem, block: int, of_kernels: bool) -> Tensor:
    """The windows of the Triton kernels, where they tell them, or of the blocked backend."""
    with torch.no_grad():
        found = triton_backend.certified_blocks(problem, block) if of_kernels and _is_eager(problem) else None
        return blocked_backend.certified_blocks(problem, block) if found is None else found


@dataclass(frozen=True)
class Explanation:
    """How attention computes a call. Printed, it is a short text."""

    backend: str  # "reference", "sdpa" (torch's own kernels), "blocked" or "triton"
    path: str  # of the backend: "triton decoding", say
    why_not: dict[str, str]  # path: why it was not taken
    keys_visited: float  # share of the keys in sight, counted in blocks of 128

    def __str__(self) -> str:
        lines = [
            f"computed by: {self.path}",
            f"keys visited: {self.keys_visited:.1%} of those in sight, in blocks of {BLOCK}",
            *(f"not {name}: {reason}" for name, reason in self.why_not.items()),
        ]
        return "\n".join(lines)


def explain(problem: Problem, backend: str, fully: bool = False) -> Explanation:
    """Which path computes a problem, why not the others, and what share of keys it visits."""
    chosen = choose(problem, backend, fully)
    why_not = {}
    for path in PATHS:
        if path is chosen:
            continue
        reason = _why_not(path, problem, fully)
        if reason is None:
            allowed = path in _candidates(problem, backend)
            reason = f"{chosen.name} comes first" if allowed else f"backend={backend!r} does not choose it"
        why_not[path.name] = reason
    share = _visited(problem, chosen) if chosen.skips(problem) else 1.0
    return Explanation(chosen.backend or chosen.name, chosen.name, why_not, share)


def _visited(problem: Problem, path: Path) -> float:
    """The share of key blocks in sight that a path visits; for packed documents on a GPU, of the blocked backend."""
    windows = _windows(problem, BLOCK, of_kernels=path.name == "triton")
    low, high = visible_blocks(problem, BLOCK)
    in_sight = (high - low).clamp_min(0).sum().item()
    return (windows[..., 1] - windows[..., 0]).sum().item() / in_sight if in_sight else 1.0


def attend_with_lse(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output like q, and the log-sum-exp of the scores of visited keys [B, H, Tq]: forward only, values unchecked.

    By the backend that "auto" chooses. The log-sum-exp of a query that sees no key is not finite.
    """
    if backend_for(problem.q) == "triton":
        out, lse, _ = triton_backend.forward(problem)
        return out, lse * math.log(2.0)
    out, lse, _ = blocked_backend.forward(problem)
    return out, lse
