"""Calls written for F.scaled_dot_product_attention: they mean the same here, or the answer says what to use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trainshort as ts

BOTH: list[Callable[..., Tensor]] = [ts.attention, ts.alibi_attention]


def some(queries: int = 12, keys: int = 12, heads: int = 4, key_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, heads, queries, 8), torch.randn(2, key_heads, keys, 8), torch.randn(2, key_heads, keys, 8)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_same_call_gives_the_same_numbers(is_causal: bool, key_heads: int) -> None:
    q, k, v = some(key_heads=key_heads)
    call: dict[str, Any] = {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": is_causal,
        "scale": 0.3,
        "enable_gqa": True,
    }
    torch.testing.assert_close(ts.attention(q, k, v, **call), F.scaled_dot_product_attention(q, k, v, **call))


@pytest.mark.parametrize("attend", BOTH)
def test_names_of_torch_are_names_of_ours(attend: Callable[..., Tensor]) -> None:
    q, k, v = some()
    assert torch.equal(attend(q, k, v, is_causal=True), attend(q, k, v))
    assert torch.equal(attend(q, k, v, is_causal=False), attend(q, k, v, causal=False))
    assert not torch.equal(attend(q, k, v, is_causal=False), attend(q, k, v))
    dropped = attend(q, k, v, dropout_p=0.5, seed=3)
    assert torch.equal(dropped, attend(q, k, v, dropout=0.5, seed=3))
    assert not torch.equal(dropped, attend(q, k, v))
    assert torch.equal(attend(q, k, v, dropout=0.5, dropout_p=0.5, seed=3), dropped)
    assert torch.equal(attend(q, k, v, enable_gqa=False), attend(q, k, v))
    assert torch.equal(attend(q, k, v, causal=True, is_causal=True), attend(q, k, v))


@pytest.mark.parametrize("attend", BOTH)
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"causal": False, "is_causal": True}, ValueError, "causal=False and is_causal=True differ"),
        ({"dropout": 0.1, "dropout_p": 0.0}, ValueError, r"dropout=0\.1 and dropout_p=0\.0 differ"),
        ({"dropout_p": 1.5}, ValueError, r"must lie in \[0, 1\)"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False, got int"),
        ({"enable_gqa": "yes"}, TypeError, "enable_gqa must be True or False, got str"),
        ({"attn_mask": torch.ones(12, 12).bool()}, TypeError, "pass key_padding_mask .* cu_seqlens"),
        ({"attn_mask": torch.zeros(12, 12)}, TypeError, "pass slopes to alibi_attention, or bias to attention"),
        ({"attn_mask": torch.ones(12, 12).bool(), "is_causal": True}, TypeError, "key_padding_mask"),
        ({"attn_mask": [[True]]}, TypeError, "attn_mask must be None, got list"),
    ],
)
def test_what_differs_is_refused(
    attend: Callable[..., Tensor], options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        attend(*some(), **options)
    with pytest.raises(error, match=match):
        ts.explain(*some(), **options)


@pytest.mark.parametrize("shape", [(12, 12), (2, 1, 1, 12), (2, 4, 12, 12)], ids=str)
def test_a_mask_by_position_stands_where_slopes_do(shape: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=r"fourth argument is slopes.* torch\.bool .* pass key_padding_mask"):
        ts.alibi_attention(*some(), torch.ones(shape).bool())
    if shape[-2:] == (12, 12):
        with pytest.raises(TypeError, match=r"fourth argument is slopes.* torch\.float32 .* a bias that depends on"):
            ts.alibi_attention(*some(), torch.zeros(shape))


def test_slopes_of_each_row_are_no_mask() -> None:
    q, k, v = torch.randn(3, 5, 5, 5, 8).unbind()  # five rows, heads and tokens: [B, H] looks like [Tq, Tk]
    slopes = torch.rand(5, 5) + 0.1
    found = ts.alibi_attention(q, k, v, slopes)
    assert torch.equal(found, ts.attention(q, k, v, bias=ts.LinearBias(slopes)))


@pytest.mark.parametrize("queries", [1, 5, 20])
def test_is_causal_begins_at_the_first_key_in_torch(queries: int) -> None:
    """So unless it is said where queries stand, neither meaning is guessed."""
    q, k, v = some(queries=queries)
    with pytest.raises(ValueError, match=f"is_causal=True with {queries} queries and 12 keys.*query_start=0"):
        ts.attention(q, k, v, is_causal=True)
    found = ts.attention(q, k, v, is_causal=True, query_start=0)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    both = ts.attention(q, k, v, is_causal=False)
    torch.testing.assert_close(both, F.scaled_dot_product_attention(q, k, v, is_causal=False))


def test_grouped_queries_that_were_not_meant() -> None:
    with pytest.raises(ValueError, match="enable_gqa=False, but q has 4 heads and k has 2"):
        ts.attention(*some(key_heads=2), enable_gqa=False)


def test_tensors_that_are_none_are_still_refused_as_such() -> None:
    with pytest.raises(TypeError, match="q must be a tensor, got list"):
        ts.attention([1.0], *some()[1:], is_causal=True)  # type: ignore[call-overload]


@pytest.mark.slow
def test_compiled_without_a_break() -> None:
    q, k, v = some(key_heads=2)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ts.alibi_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True, enable_gqa=True)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v), call(q, k, v))


def test_explain_understands_them_too() -> None:
    q, k, v = some()
    one = ts.explain(q, k, v, is_causal=False, dropout_p=0.1, enable_gqa=True, attn_mask=None)
    assert one == ts.explain(q, k, v, causal=False, dropout=0.1)
    assert one.path != ts.explain(q, k, v, dropout_p=0.0).path == "sdpa"


def test_both_functions_name_them() -> None:
    for attend in BOTH:
        assert {"attn_mask", "dropout_p", "is_causal", "enable_gqa"} < set(inspect.signature(attend).parameters)
