"""The linear layer of a decoding step, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trainshort as ts
from trainshort.ops import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1")

ACTIVATED = {
    "": lambda y: y,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
}


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "activation"),
    [(1, 64, 32, "gelu"), (2, 100, 7, "relu"), (3, 513, 2050, "silu"), (4, 512, 33, "gelu_tanh"), (1, 1, 1, "")],
)
def test_like_torch(rows: int, inner: int, columns: int, activation: str) -> None:
    from trainshort.ops.triton.few_rows import linear

    generator = torch.Generator().manual_seed(rows)
    x, weight, bias, residual = (
        torch.randn(shape, generator=generator)
        for shape in ((rows, 1, inner), (columns, inner), (columns,), (rows, 1, columns))
    )
    for b in (None, bias):
        for r in (None, residual):
            got = linear(x, weight, b, activation=activation, residual=r)
            exact = ACTIVATED[activation](F.linear(x.double(), weight.double(), None if b is None else b.double()))
            exact = exact if r is None else exact + r
            assert got.shape == exact.shape
            torch.testing.assert_close(got.double(), exact, atol=3e-6 * inner**0.5, rtol=2e-6)


def test_half_precision_and_views() -> None:
    from trainshort.ops.triton.few_rows import linear

    generator = torch.Generator().manual_seed(0)
    wide = torch.randn((2, 3, 96), generator=generator).half()
    x, weight = wide[:, -1, 16:80], torch.randn((40, 128), generator=generator).half()[:, 64:]
    exact = F.linear(x.double(), weight.double())
    torch.testing.assert_close(linear(x, weight).double(), exact, atol=2e-2, rtol=2e-3)


def test_not_a_number_comes_out() -> None:
    from trainshort.ops.triton.few_rows import linear

    x, weight = torch.tensor([[float("nan"), 1.0]]), torch.ones((3, 2))
    for activation in ACTIVATED:
        assert linear(x, weight, activation=activation).isnan().all()


@pytest.mark.parametrize(
    "changes", [{}, {"gated": True, "activation": "silu", "ffn_bias": True}], ids=["plain", "gated"]
)
def test_a_block_of_few_rows(changes: dict[str, Any]) -> None:
    from trainshort.models.layers import Block, Context
    from trainshort.positions import Position

    torch.manual_seed(0)
    config = ts.ModelConfig(d_model=8, num_layers=1, num_heads=2, d_ff=12, position="none", **changes)
    block, x = Block(config, 0).eval(), torch.randn(1, 1, 8)
    plain, few = (
        block(x, Context(Position(), torch.zeros(1, 1, dtype=torch.int64), None, few_rows=few)).detach()
        for few in (False, True)
    )
    torch.testing.assert_close(few, plain, rtol=1e-5, atol=1e-6)


def test_a_weight_stored_by_columns() -> None:
    """As by who put the transpose of another matrix there."""
    from trainshort.models.linear import project

    layer, x = torch.nn.Linear(16, 12), torch.randn(1, 1, 16)
    expected = layer(x).detach()
    layer.weight.data = layer.weight.data.t().contiguous().t()
    torch.testing.assert_close(project(layer, x, few_rows=True).detach(), expected)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("outlier", [None, 0, -1])
@pytest.mark.parametrize("inner", [64, 700])
@pytest.mark.parametrize("apart", [False, True])
def test_norm(
    monkeypatch: pytest.MonkeyPatch, apart: bool, inner: int, outlier: int | None, mean: float, kind: str
) -> None:
    """As exact as a norm of its own in float32, also where the mean is much larger than the deviation, or a channel
    than all others. apart: by the kernel for long rows."""
    from trainshort.ops.triton import few_rows
    from trainshort.ops.triton.few_rows import Norm, linear

    monkeypatch.setattr(few_rows, "WIDEST_NORMED", 0 if apart else 1536)

    generator = torch.Generator().manual_seed(inner)
    x = mean + torch.randn((2, inner), generator=generator)
    if outlier is not None:
        x[:, outlier] = -3000.0
    weight, gain, offset = (torch.randn(size, generator=generator) for size in ((9, inner), (inner,), (inner,)))

    def normed(dtype: torch.dtype) -> Tensor:
        wide, g, z = x.to(dtype), gain.to(dtype), offset.to(dtype)
        if kind == "rmsnorm":
            return F.linear(F.rms_norm(wide, (inner,), g, 1e-5), weight.to(dtype))
        return F.linear(F.layer_norm(wide, (inner,), g, z, 1e-5), weight.to(dtype))

    found = linear(x, weight, norm=Norm(kind, gain, offset if kind == "layernorm" else None, 1e-5))
    exact = normed(torch.float64)
    allowed = 4 * (normed(torch.float32) - exact).norm() + 2e-6 * exact.norm()
    assert (found - exact).norm() <= allowed
