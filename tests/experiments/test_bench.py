"""What bench compares is the same attention, and what cannot run is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import trainshort as ts
from trainshort.experiments.bench import Case, about, dense_bias, measure

CASE = Case(
    length=40,
    batch=2,
    heads=2,
    head_dim=8,
    dtype=torch.float32,
    device=torch.device("cpu"),
    backward=False,
)


def test_the_dense_table_is_alibi() -> None:
    q, k, v = (torch.randn(1, 4, 33, 8) for _ in range(3))
    slopes = ts.alibi_slopes(4)
    torch_way = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_bias(slopes, 33, torch.float32))
    torch.testing.assert_close(torch_way, ts.alibi_attention(q, k, v, slopes))


@pytest.mark.parametrize("backward", [False, True])
def test_every_way_is_measured(backward: bool) -> None:
    record = measure(replace(CASE, backward=backward), seconds=0.001, dense=True)
    assert list(record["ms"]) == ["trainshort", "dense bias", "row bias", "no bias"]
    assert all(time is not None and time > 0 for time in record["ms"].values())


def test_what_torch_cannot_do_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = F.scaled_dot_product_attention

    def refuses_masks(*inputs: torch.Tensor, attn_mask: torch.Tensor | None = None, **more: bool) -> torch.Tensor:
        if attn_mask is not None and more:
            raise RuntimeError("no mask with is_causal\nand more lines")
        return kernel(*inputs, attn_mask=attn_mask, **more)

    monkeypatch.setattr("trainshort.experiments.bench.F.scaled_dot_product_attention", refuses_masks)
    record = measure(CASE, seconds=0.001, dense=False)
    assert record["ms"]["row bias"] is None
    assert record["why"]["row bias"] == "no mask with is_causal"
    assert "too large" in record["why"]["dense bias"]


def test_the_machine_is_named() -> None:
    assert torch.__version__ in about(torch.device("cpu"))
