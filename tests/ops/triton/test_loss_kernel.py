"""The kernel of trainshort.models.loss: losses and gradients of rows, against F.cross_entropy in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def rows(count: int, vocabulary: int, dtype: torch.dtype, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits, whose rows are apart in memory with NaN in between, and targets."""
    wide = torch.full((count, vocabulary + 5), torch.nan, dtype=dtype)
    logits = wide[:, :vocabulary]
    logits.copy_(torch.randn(count, vocabulary) * spread)
    targets = torch.randint(vocabulary, (count,))
    targets[count // 2] = IGNORED
    return logits, targets


def truth(logits: Tensor, targets: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="none")
    factors = torch.ones_like(losses) if factors is None else factors.double()
    return losses.detach(), torch.autograd.grad(losses, exact, factors)[0]


def compare(found: Tensor, right: Tensor) -> None:
    """To the last bits of the dtype: sums are in float32, only the result is rounded."""
    unit = max(torch.finfo(found.dtype).eps, 2.0**-20)
    smallest = torch.finfo(found.dtype).smallest_normal * unit  # float16 is coarse near 0
    torch.testing.assert_close(found.double(), right, rtol=unit, atol=max(2.0**-22, 2 * smallest))


@pytest.mark.parametrize("largest", [32768, 16], ids=["one block", "many blocks"])
def test_losses_and_gradients(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    from trainshort.models import loss_kernel

    monkeypatch.setattr(loss_kernel, "LARGEST_ROW", largest)
    monkeypatch.setattr(loss_kernel, "BLOCK", 16)
    for dtype in (torch.float32, torch.float16):
        for vocabulary in (1, 61, 64, 130):
            logits, targets = rows(5, vocabulary, dtype)
            one, two, factors = logits.clone(), logits.clone(), torch.randn(5)
            losses, gradient = truth(logits, targets)
            found, lse = loss_kernel.losses_of(one, targets, IGNORED, False)
            assert torch.equal(one, logits), "no gradient was asked for"
            torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=2e-6)
            counts = targets != IGNORED
            exact = logits.double().logsumexp(1)
            torch.testing.assert_close(lse[counts].double(), exact[counts], rtol=1e-6, atol=1e-6)
            assert torch.equal(loss_kernel.losses_of(one, targets, IGNORED, True)[0], found)
            compare(one, gradient)
            loss_kernel.leave_gradients(two, targets, IGNORED, lse, factors)
            compare(two, truth(logits, targets, factors)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_bias_is_added_before_anything_is_rounded(dtype: torch.dtype) -> None:
    from trainshort.models import loss_kernel

    logits, targets = rows(5, 61, dtype)
    bias, factors = 100.0 * torch.randn(61), torch.randn(5)  # so large that its sum with the logits is coarse
    one, two, sums = logits.clone(), logits.clone(), logits.double() + bias.double()
    losses, gradient = truth(sums, targets)
    found, lse = loss_kernel.losses_of(one, targets, IGNORED, True, bias)
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=4e-5)
    torch.testing.assert_close(one.double(), gradient, rtol=torch.finfo(dtype).eps, atol=4e-5)
    loss_kernel.leave_gradients(two, targets, IGNORED, lse, factors, bias)
    expected = truth(sums, targets, factors)[1]
    torch.testing.assert_close(two.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_strided_rows_and_numbers() -> None:
    """What lies between rows stays as it is; targets and factors may have strides."""
    from trainshort.models import loss_kernel

    logits, targets = rows(5, 61, torch.float32)
    between = logits.as_strided((5, 66), (66, 1))[:, 61:]
    losses, gradient = truth(logits, targets)
    strided = torch.stack((targets, targets * 0), dim=1)[:, 0]
    found, lse = loss_kernel.losses_of(logits, strided, IGNORED, True)
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=2e-6)
    compare(logits, gradient)
    assert bool(between.isnan().all())
    again, _ = rows(5, 61, torch.float32)
    right = truth(again, targets, torch.full((5,), 0.5))[1]
    _, lse = loss_kernel.losses_of(again, targets, IGNORED, False)
    loss_kernel.leave_gradients(again, strided, IGNORED, lse, torch.tensor(0.5).expand(5))
    compare(again, right)


@pytest.mark.parametrize("largest", [32768, 16], ids=["one block", "many blocks"])
def test_logits_that_are_not_finite(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    """-inf is a token that can never be, also for a whole block; a row with NaN has a loss of NaN, others do not."""
    from trainshort.models import loss_kernel

    monkeypatch.setattr(loss_kernel, "LARGEST_ROW", largest)
    monkeypatch.setattr(loss_kernel, "BLOCK", 16)
    logits, targets = rows(6, 61, torch.float32)
    targets[:] = 50
    targets[5] = IGNORED
    logits[0, :40], logits[1, 3], logits[2, 60], logits[5] = -torch.inf, torch.nan, torch.inf, torch.nan
    losses, gradient = truth(logits, targets)
    found, _ = loss_kernel.losses_of(logits, targets, IGNORED, True)
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=2e-6, equal_nan=True)
    assert found.isnan().tolist() == [False, True, True, False, False, False]
    for row in (0, 3, 4, 5):
        compare(logits[row], gradient[row].nan_to_num())
    assert bool(logits[1].isnan().all())


@pytest.mark.parametrize("worst", [61, 1000, -1, 2**40])
def test_targets_out_of_range_read_nothing(worst: int) -> None:
    from trainshort.models import loss_kernel

    logits, targets = rows(3, 61, torch.float32)
    targets[:] = torch.tensor([7, worst, 9])
    losses, lse = loss_kernel.losses_of(logits.clone(), targets, IGNORED, False)
    assert losses.isnan().tolist() == [False, True, False]
    for known in (False, True):
        copy = logits.clone()
        if known:
            loss_kernel.leave_gradients(copy, targets, IGNORED, lse, torch.ones(3))
        else:
            loss_kernel.losses_of(copy, targets, IGNORED, True)
        assert copy.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("ignored", [1, 16, -1, 2**40])
def test_ignored_targets_can_be_any_number(ignored: int) -> None:
    from trainshort.models import loss_kernel

    logits, targets = rows(4, 61, torch.float32)
    targets[:] = torch.tensor([ignored, 2, 3, ignored])
    losses, _ = loss_kernel.losses_of(logits, targets, ignored, True)
    assert (losses == 0).tolist() == [True, False, False, True]
    assert (logits == 0).all(1).tolist() == [True, False, False, True]


def test_a_certain_target_has_a_small_loss_to_all_digits() -> None:
    from trainshort.models import loss_kernel

    logits = torch.full((1, 61), 58.0)
    logits[0, 7] = 70.0
    losses, _ = loss_kernel.losses_of(logits, torch.tensor([7]), IGNORED, False)
    right, _ = truth(logits, torch.tensor([7]))
    torch.testing.assert_close(losses.double(), right, rtol=2e-3, atol=0.0)  # the ulp of 70 is 2% of it
