"""What the certificate leaves out is really left out: not read, not stored, and the same set forwards and backwards.

Values outside a query block's window may be NaN without anyone noticing; output and gradients are those of dense
attention restricted to exactly the kept set; and no tensor ever grows like length x length.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trainshort as ts
from tests.ops.budget import error_budget, excess
from tests.ops.cases import left_padding, random_case
from tests.ops.dense import Case, exact
from trainshort.ops import reference
from trainshort.ops.blocked import run as blocked
from trainshort.ops.problem import Problem
from trainshort.ops.threads import one_thread

STEEP_AND_GENTLE = torch.tensor([0.9, 0.1, 0.02])


def poison_unvisited(case: Case, row: int, head: int, queries: slice) -> Case:
    """NaN in every value that these queries do not visit, whoever else does."""
    visited = case.kept()[row, head, queries].any(0)  # [Tk]
    assert not bool(visited.all()), "nothing is skipped here"
    v = case.v.clone()
    v[row, head * v.shape[1] // case.q.shape[1], ~visited] = math.nan
    return replace(case, v=v)


POWERS = {
    "bias": "none",
    "slopes": None,
    "strengths": torch.tensor([0.2, 0.9, 0.002]),
    "exponents": torch.tensor([1.0, 0.8, 1.7]),
    "logarithmic": False,
}


def skipping(**features) -> dict:
    return {"batch": 1, "queries": 1100, "slopes": STEEP_AND_GENTLE} | features


SKIPPING: dict[str, dict] = {
    "causal": skipping(),
    "two_rows": skipping(batch=2, queries=900),
    "symmetric": skipping(causal=False),
    "one_sided": skipping(causal=False, sees=("past", "future", "past")),
    "left_right": skipping(causal=False, future=STEEP_AND_GENTLE.flip(0)),
    "grouped": skipping(heads=6, kv_heads=3, slopes=STEEP_AND_GENTLE.repeat_interleave(2)),
    "fewer_queries": skipping(queries=300, keys=1500),
    "query_start": skipping(queries=300, keys=1500, query_start=1000),
    "query_start_by_row": skipping(batch=2, queries=300, keys=1500, query_start=torch.tensor([1150, 900])),
    "padded": skipping(batch=2, queries=900, key_padding_mask=left_padding(900, 700, length=900)),
    "packed": skipping(queries=1500, cu_seqlens=torch.tensor([0, 100, 1200, 1500])),
    "slopes_by_row": skipping(batch=2, queries=900, slopes=torch.tensor([[0.9, 0.1, 0.05], [0.2, 0.9, 0.6]])),
    "powers": skipping(**POWERS),
    "powers_symmetric": skipping(causal=False, **POWERS),
    "half": skipping(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("tolerance", [2.0**-24, 0.05])
@pytest.mark.parametrize("feature", SKIPPING)
def test_unvisited_values_are_not_read(feature: str, tolerance: float) -> None:
    """Block by block of queries: NaN in what they do not visit leaves their output and their dq finite."""
    case = random_case(**SKIPPING[feature], tolerance=tolerance)
    queries = case.q.shape[2]
    clean = case.run("blocked")
    for block in {0, queries // 256, (queries - 1) // 128}:
        rows = slice(block * 128, block * 128 + 128)
        for row, head in ((0, 0), (case.q.shape[0] - 1, 1)):
            if bool((case.kept() | ~case.seen)[row, head, rows].all()):
                continue
            results = poison_unvisited(case, row, head, rows).run("blocked")
            for name in ("out", "q"):
                mine = results[name][row, head, rows]
                assert bool(torch.isfinite(mine).all()), (name, row, head, block)
                torch.testing.assert_close(mine, clean[name][row, head, rows])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_values_outside_every_window_do_not_exist(causal: bool) -> None:
    """Few queries at the end of many keys: whole blocks of keys are visited by nobody."""
    case = random_case(queries=200, keys=1500, slopes=torch.tensor([0.9, 0.5, 0.3]), causal=causal)
    visited = case.kept().any(2)  # [B, H, Tk]
    assert float(visited.double().mean()) < 0.5
    v = case.v.masked_fill(~visited[..., None], math.nan)
    results = replace(case, v=v).run("blocked")
    clean = case.run("blocked")
    for name, tensor in results.items():
        assert bool(torch.isfinite(tensor).all()), name
        torch.testing.assert_close(tensor, clean[name])
    for name in ("k", "v"):
        assert not bool(results[name].masked_fill(visited[..., None], 0.0).any()), name


GENTLE = torch.tensor([0.9, 0.03, 0.015])
GENTLE_POWERS = {"strengths": torch.tensor([0.9, 0.03, 0.1]), "exponents": torch.tensor([1.0, 1.0, 0.7])}


def quiet(case: Case) -> Case:
    """With short queries the bound is nearly tight, so that a large tolerance is really used up."""
    return replace(case, q=0.2 * case.q)


@pytest.mark.parametrize("feature", [name for name in SKIPPING if name != "half"])
def test_forward_and_backward_skip_exactly_the_kept_set(feature: str) -> None:
    """With a large tolerance the kept set shows: it is what ts.certified_windows says, for all results alike."""
    gentle = {
        "left_right": {"slopes": GENTLE, "future": GENTLE.flip(0)},
        "grouped": {"slopes": GENTLE.repeat_interleave(2)},
        "slopes_by_row": {"slopes": torch.stack((GENTLE, GENTLE.roll(1)))},
        "powers": GENTLE_POWERS,
        "powers_symmetric": GENTLE_POWERS,
    }.get(feature, {"slopes": GENTLE})
    case = quiet(random_case(**(SKIPPING[feature] | gentle), tolerance=0.05))
    keep = case.kept()
    assert bool((case.seen & ~keep).any())
    results = case.run("blocked")
    allowed = error_budget(case, keep, skipping=False)
    errors = excess(results, exact(case, keep), allowed)
    assert max(errors.values()) <= 1.0, errors
    # The gradient of a bias is one sum over everything, in which a few skipped keys need not show.
    without = excess(results, exact(case), allowed)
    without = {name: value for name, value in without.items() if name in ("out", "q", "k", "v")}
    assert min(without.values()) > 1.0, f"the kept set is not to be told from everything: {without}"


@pytest.mark.slow
@pytest.mark.parametrize("needs_bias_gradient", [True, False])
def test_only_some_gradients_skip_the_same_set(needs_bias_gradient: bool) -> None:
    """Another path may compute the gradients where the slopes ask for none: it skips the same set."""
    case = quiet(random_case(queries=1500, batch=1, slopes=GENTLE, tolerance=0.05))
    keep = case.kept()
    q, k, v = (t.clone().requires_grad_() for t in (case.q, case.k, case.v))
    slopes = GENTLE.clone().requires_grad_(needs_bias_gradient)
    out = replace(case, q=q, k=k, v=v, slopes=slopes).attend("blocked")
    results = dict(zip(("q", "k", "v"), torch.autograd.grad(out, (q, k, v), case.upstream()), strict=True))
    allowed = error_budget(case, keep, skipping=False)
    truth, unrestricted = ({n: r[n] for n in results} for r in (exact(case, keep), exact(case)))
    errors = excess(results, truth, allowed)
    assert max(errors.values()) <= 1.0, errors
    assert min(excess(results, unrestricted, allowed).values()) > 1.0


class NothingQuadratic(TorchDispatchMode):
    """Fails on any tensor that an operator makes whose memory has `limit` elements or more."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.largest = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func.name())
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest = max(self.largest, elements)
                if elements >= self.limit:
                    raise AssertionError(f"{func.name()} made {list(tensor.shape)}: {elements} elements")
        return result


@contextlib.contextmanager
def nothing_quadratic(length: int) -> Iterator[NothingQuadratic]:
    with NothingQuadratic(length * length // 4) as mode:
        yield mode


def problem_of(case: Case) -> Problem:
    return Problem(
        q=case.q, k=case.k, v=case.v, bias=case.bias, causal=case.causal, scale=case.true_scale,
        tolerance=case.may_skip,
    )  # fmt: skip


MEMORY: dict[str, dict] = {
    "causal": {},
    "symmetric": {"causal": False},
    "bucket": {"bias": "bucket"},
    "bucket_symmetric": {"bias": "bucket", "bidirectional": True, "causal": False},
    "no_bias": {"bias": "none"},
    "steep": {"slopes": torch.tensor([0.9, 0.1])},
    "steep_symmetric": {"slopes": torch.tensor([0.9, 0.1]), "causal": False},
}


@pytest.mark.parametrize("length", [512, 1024, 2048])
@pytest.mark.parametrize("tolerance", [None, 0.0], ids=["windows", "everything"])
@pytest.mark.parametrize("feature", MEMORY)
def test_memory_is_linear(feature: str, tolerance: float | None, length: int) -> None:
    """Inside the implementation, where no operator hides anything: forward, backward, gradients of the bias."""
    case = random_case(batch=1, heads=2, queries=length, dim=16, tolerance=tolerance, **MEMORY[feature])
    problem = problem_of(case)
    upstream = case.upstream()
    # In one thread: the mode sees its own thread only.
    with torch.no_grad(), one_thread(), nothing_quadratic(length) as mode:
        windows = blocked.windows_of(problem)
        out, lse = blocked.forward_in(problem, windows)
        for want_bias in (False, True):
            blocked.backward_in(problem, windows, out, lse, upstream, want_bias)
    assert len(mode.names) > 10, "the mode must see the operators inside"
    assert mode.largest > 0


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("feature", MEMORY)
def test_memory_is_linear_from_outside(feature: str, length: int) -> None:
    case = random_case(batch=1, heads=2, queries=length, dim=16, **MEMORY[feature])
    for backend in ("blocked", "auto"):
        with nothing_quadratic(length):
            case.run(backend)


def test_the_mode_sees_quadratic_memory() -> None:
    case = random_case(batch=1, heads=2, queries=512, dim=16)
    with pytest.raises(AssertionError, match="elements"), nothing_quadratic(512):
        reference.attend(problem_of(case))
    with pytest.raises(AssertionError, match="elements"), nothing_quadratic(512):
        case.run("reference")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms_by_block"])
def test_a_head_without_a_slope_visits_everything(causal: bool, norms: bool) -> None:
    """Even where all far keys are nothing beside the near ones; the heads around it skip."""
    q = torch.zeros(1, 3, 1280, 8)
    q[..., 0] = 40.0
    k = torch.zeros(1, 3, 1280, 8)
    k[:, :, 640:, 0] = 3.0
    bias = ts.LinearBias(torch.tensor([2.0, 0.0, 2.0]))
    given = k.unflatten(2, (10, 128)).norm(dim=-1).amax(-1) if norms else None
    windows = ts.certified_windows(q, k, bias=bias, causal=causal, key_norms=given)[0]
    visited = windows[..., 1] - windows[..., 0]  # [3, 10]
    assert visited[1].tolist() == ([*range(1, 11)] if causal else [10] * 10)
    assert visited[0, -1] < 10
    assert visited[2, -1] < 10
