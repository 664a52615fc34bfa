"""A call like one before is not checked again: what must be noticed all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.ops.layouts import columns_first, transposed
from trainshort.ops import INTERPRETED
from trainshort.ops.triton import run
from trainshort.ops.triton.cache import CACHE, Cache

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def _forget() -> None:
    CACHE.clear()


def cached_calls() -> int:
    return sum(isinstance(value, run.CachedCall) for _, value in CACHE.items())


def inputs(dtype: torch.dtype = torch.float32, length: int = 80) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, 2, length, 16, generator=generator).to(dtype) for _ in range(3)]


def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, **about) -> Tensor:
    return ts.alibi_attention(q, k, v, slopes, backend="triton", **about)


def assert_right(out: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, **about) -> None:
    exact = ts.alibi_attention(
        q.double(), k.double(), v.double(), None if slopes is None else slopes.double(), backend="reference", **about
    )
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


def test_a_second_call_is_cached_and_right() -> None:
    q, k, v = inputs()
    first = attend(q, k, v)
    assert cached_calls() == 1
    q2, k2, v2 = (t + 0.5 for t in (q, k, v))
    second = attend(q2, k2, v2)
    assert cached_calls() == 1
    assert_right(first, q, k, v)
    assert_right(second, q2, k2, v2)


@pytest.mark.parametrize(
    "other",
    [{"scale": 0.7}, {"tolerance": 0.0}, {"tolerance": 0.01}, {"causal": False}, {"query_start": 3}, {"scale": 1}],
    ids=str,
)
def test_other_numbers_are_another_call(other: dict) -> None:
    q, k, v = inputs()
    attend(q, k, v)
    out = attend(q, k, v, **other)
    assert cached_calls() == 2
    exact = {key: value for key, value in other.items() if key != "tolerance"}
    if other.get("tolerance", 0.0) == 0.0:
        assert_right(out, q, k, v, **exact)


def test_other_memory_is_another_call() -> None:
    q, k, v = inputs()
    attend(q, k, v)
    assert_right(attend(transposed(q), k, v), q, k, v)
    shifted = torch.cat([torch.zeros(1), q.flatten()])[1:].view(q.shape)  # four bytes on
    assert_right(attend(shifted, k, v), q, k, v)
    assert cached_calls() == 3
    assert_right(attend(columns_first(q), k, v), q, k, v)
    assert cached_calls() == 3  # copied at each call, so looked at each time


def test_bad_input_after_good_is_refused() -> None:
    q, k, v = inputs()
    slopes = torch.tensor([0.5, 0.25])
    attend(q, k, v, slopes)
    for bad in (torch.tensor([0.5, -0.25]), torch.tensor([float("nan"), 1.0])):
        with pytest.raises(ValueError, match="slopes must be 0 or positive"):
            attend(q, k, v, bad)
    with pytest.raises(ValueError, match="slopes must be"):
        attend(q, k, v, torch.tensor([0.5, 0.25, 0.1]))
    with pytest.raises(ValueError, match="v must have k's shape"):
        attend(q, k, v[:, :, :-1])
    with pytest.raises(TypeError, match="dtype"):
        attend(q, k.half(), v)
    with pytest.raises(TypeError, match="scale must be a number"):
        attend(q, k, v, slopes, scale="1")
    with pytest.raises(TypeError, match="query_start must be an int"):
        attend(q, k, v, slopes, query_start=1.5)
    with pytest.raises(TypeError, match="query_start must be an int"):
        attend(q, k, v, slopes, query_start=True)
    with pytest.raises(ValueError, match="tolerance must lie"):
        attend(q, k, v, slopes, tolerance=1.0)


def test_slopes_changed_in_place_are_read_again() -> None:
    q, k, v = inputs()
    slopes = torch.tensor([0.5, 0.25])
    attend(q, k, v, slopes)
    slopes.mul_(0.1)
    assert_right(attend(q, k, v, slopes), q, k, v, slopes)
    slopes.neg_()
    with pytest.raises(ValueError, match="slopes must be 0 or positive"):
        attend(q, k, v, slopes)


def test_slopes_of_another_dtype_are_converted_each_time() -> None:
    q, k, v = inputs()
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    for _ in range(2):
        assert_right(attend(q, k, v, slopes), q, k, v, slopes)
    assert cached_calls() == 0


def test_gradients_asked_for_later() -> None:
    q, k, v = inputs()
    slopes = torch.tensor([0.5, 0.25])
    with torch.no_grad():
        attend(q, k, v, slopes)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, slopes)]
    out = attend(*leaves)
    assert cached_calls() == 1
    found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wide = ts.alibi_attention(*exact, backend="reference")
    for gradient, right in zip(found, torch.autograd.grad(wide, exact, torch.ones_like(wide)), strict=True):
        torch.testing.assert_close(gradient.double(), right, rtol=2e-3, atol=2e-3)
    assert not attend(q, k, v, slopes).requires_grad


def test_autocast_converts_what_a_cached_call_had() -> None:
    q, k, v = inputs()
    assert attend(q, k, v).dtype == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert attend(q, k, v).dtype == torch.float16
    half = [t.half() for t in (q, k, v)]
    assert attend(*half).dtype == torch.float16
    count = cached_calls()
    with torch.autocast("cpu", torch.float16):
        assert attend(*half).dtype == torch.float16
    assert cached_calls() == count


def test_a_subclass_is_never_cached() -> None:
    class Marked(Tensor):
        pass

    q, k, v = inputs()
    attend(q, k, v)
    bias = ts.LinearBias(ts.alibi_slopes(2))
    assert run.cached_signature(q, k, v, bias, True, None, None, None) is not None
    assert run.cached_signature(q.as_subclass(Marked), k, v, bias, True, None, None, None) is None


def test_other_biases_are_looked_at_each_time() -> None:
    q, k, v = inputs()
    for bias in (None, ts.BucketBias(torch.zeros(32, 2))):
        ts.attention(q, k, v, bias=bias, backend="triton")
    assert cached_calls() == 0


def test_decoding_is_not_taken_for_attention() -> None:
    """One query with a gradient is attention, and without one decoding: neither may stand for the other."""
    q, k, v = inputs()
    q = q[:, :, -1:].clone()
    with_gradient = attend(q.clone().requires_grad_(), k, v)
    assert cached_calls() == 0
    assert_right(attend(q, k, v), q, k, v)
    assert_right(with_gradient.detach(), q, k, v)


def test_numbers_of_another_type_are_looked_at() -> None:
    q, k, v = inputs()
    attend(q, k, v, query_start=3)
    with pytest.raises(TypeError, match="query_start must be an int"):
        attend(q, k, v, query_start=3.0)
    flag = torch.tensor(True)
    assert_right(attend(q, k, v, causal=flag), q, k, v)
    flag.fill_(False)
    assert_right(attend(q, k, v, causal=flag), q, k, v, causal=False)


def test_without_a_gradient_nothing_is_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainshort.ops.triton import launch

    q, k, v = inputs()
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    tracked: list[bool] = []
    forward = launch.forward

    def spy(*arguments):
        tracked.append(arguments[-1])
        return forward(*arguments)

    monkeypatch.setattr(launch, "forward", spy)
    for _ in range(2):  # a new call, and a cached one
        with torch.no_grad():
            attend(q, k, v, slopes)
        with torch.inference_mode():
            attend(q, k, v, slopes)
        attend(q, k, v, slopes)
    assert tracked == [False, False, True] * 2


@pytest.mark.slow
def test_both_ways_to_allow_tf32() -> None:
    """Torch raises when one is read after the other was set."""
    code = (
        "import torch, trainshort as ts\n"
        "torch.backends.cuda.matmul.{} = {}\n"
        "q = torch.randn(1, 2, 40, 16)\n"
        "ts.alibi_attention(q, q, q, backend='triton')\n"
        "ts.alibi_attention(q[:, :, -1:], q, q, backend='triton')\n"
        "from trainshort.ops.triton.shapes import allows_tf32\n"
        "print(allows_tf32())\n"
    )
    for setting, value in (("fp32_precision", "'tf32'"), ("fp32_precision", "'ieee'"), ("allow_tf32", "True")):
        command = [sys.executable, "-c", code.format(setting, value)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.stdout.strip() == str(value in ("'tf32'", "True")), result.stderr


def test_the_cache_drops_what_was_used_longest_ago() -> None:
    cache = Cache(3)
    for key in "abc":
        assert cache.put(key, key.upper()) == key.upper()
    assert cache.get("a") == "A"
    cache.put("b", "B again")  # no room is needed for what is there
    cache.put("d", "D")
    assert dict(cache.items()) == {"a": "A", "b": "B again", "d": "D"}
    assert cache.get("c") is None
    cache.clear()
    assert cache.items() == []


def test_a_call_that_was_dropped_is_checked_again_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CACHE, "most", 3)
    calls = [inputs(length=length) for length in (20, 30, 40)]
    for tensors in (*calls, *calls):
        assert_right(attend(*tensors), *tensors)
        assert len(CACHE.items()) <= 3


def test_the_cache_keeps_no_inputs() -> None:
    q, k, v = inputs()
    slopes = torch.tensor([0.5, 0.25])
    attend(*(t.clone().requires_grad_() for t in (q, k, v)), slopes).sum().backward()
    attend(q, k, v, slopes)
    attend(q[:, :, -1:], k, v, slopes)
    counts = [sys.getrefcount(t) for t in (q, k, v, slopes)]
    CACHE.clear()
    assert [sys.getrefcount(t) for t in (q, k, v, slopes)] == counts
