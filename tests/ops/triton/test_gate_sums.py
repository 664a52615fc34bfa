"""The kernels for running sums of log gates, against torch's operations."""

from __future__ import annotations

import math

import pytest
import torch

from trainshort.ops import gate_sums as host


@pytest.fixture(autouse=True, params=[16, 2048], ids=["chunks", "one chunk"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainshort.ops.triton import gate_sums

    monkeypatch.setattr(gate_sums, "MOST_AT_ONCE", request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 5, 16, 40, 64])
def test_sums_borders_and_gradients(length: int, dtype: torch.dtype) -> None:
    from trainshort.ops.triton import gate_sums

    torch.manual_seed(length)
    gates = -3 * torch.rand(2, length, 3).to(dtype)
    gates[0, length // 2, 1] = gates[1, length // 3 :: 7, 2] = -math.inf
    if dtype != torch.float16:
        gates[0, length // 4, 0], gates[1, ::5, 0] = -1e7, -1e17
    gates = gates.transpose(1, 2).requires_grad_()
    for ahead, right in ((False, host.running_sums(gates)), (True, host.running_sums_ahead(gates))):
        sums, borders = gate_sums.running_sums(gates, ahead)
        torch.testing.assert_close(sums, right[0].detach(), rtol=1e-14, atol=1e-14)
        assert torch.equal(borders, right[1])
        assert bool((sums.diff() <= 0).all())
        grad = torch.randn(2, 3, length, dtype=torch.float64)
        (expected,) = torch.autograd.grad(right[0], gates, grad)
        found = gate_sums.gradient(grad, gates)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-12)


def test_sums_that_do_not_start_at_a_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts positions from 0: it is not asked where they start elsewhere, as in a bounded cache."""
    gates = -torch.rand(1, 2, 20)
    gates[0, 1, 7] = -math.inf
    sums, first = host.running_sums(gates, start=1)
    assert first[0, 1].tolist() == [0] * 7 + [8] * 13
    monkeypatch.setattr(host, "_has_kernel", lambda log_gates: True)
    for found, right in zip(host.running_sums(gates, start=1), (sums, first), strict=True):
        assert torch.equal(found, right)
    torch.testing.assert_close(host.running_sums(gates)[0], sums, rtol=1e-14, atol=1e-14)


def test_sums_never_rise_and_keep_small_steps() -> None:
    """After a fall by 1e5, steps of 1e-8, which float32 sums would lose."""
    from trainshort.ops.triton import gate_sums

    gates = torch.full((1, 1, 100), -1e-8)
    gates[..., 10] = -1e5
    sums, _ = gate_sums.running_sums(gates, False)
    torch.testing.assert_close(
        sums[..., 11:].diff(), torch.full((1, 1, 88), -1e-8, dtype=torch.float64), rtol=2e-3, atol=0
    )
    assert bool((sums.diff() <= 0).all())


@pytest.mark.parametrize("bad", [0.1, math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 7, 20, 39])
def test_a_gate_that_is_refused_is_nan_to_the_end(place: int, bad: float) -> None:
    from trainshort.ops.triton import gate_sums

    gates = -torch.rand(1, 2, 40)
    gates[0, 1, place] = bad
    sums, _ = gate_sums.running_sums(gates, False)
    assert not bool(sums[0, 0].isnan().any() | sums[0, 1, :place].isnan().any())
    assert bool(sums[0, 1, place:].isnan().all())
