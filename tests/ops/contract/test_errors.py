"""Bad input is refused, before anything is computed, with a message that names the argument and what came.

On a CPU: a GPU is never waited for, so that there the device itself fails on bad values (tests/gpu/test_norms.py).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.ops.contract.places import Place, at
from trainshort.ops import attention

pytestmark = at("reference", "blocked", "auto", "interpreted")
B, H, T, D = 2, 4, 10, 8


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (B, H, T, D), dtype=dtype)


def one_row(**changes) -> dict:
    return {"q": tensor(1, H, T, D), "k": tensor(1, H, T, D), "v": tensor(1, H, T, D)} | changes


def borders(*values: int, **changes) -> dict:
    return one_row(cu_seqlens=torch.tensor(values)) | changes


def one_negative(*shape: int) -> torch.Tensor:
    norms = torch.full(shape, 3.0)
    norms.view(-1)[-1] = -0.5
    return norms


def linear(**arguments) -> ts.LinearBias:
    return ts.LinearBias(**({"slopes": torch.ones(H)} | arguments))


MASK = torch.ones((B, T), dtype=torch.bool)
HOLE = torch.tensor([[True] * T, [True, True, False] + [True] * (T - 3)])
SPLIT = torch.tensor([[True] * T, [False, True, False, False, True] + [False] * (T - 5)])

# name: (arguments that replace good ones, error, what the message says)
CALLS: dict[str, tuple[dict, type[Exception], str]] = {
    "q_not_a_tensor": ({"q": [1.0]}, TypeError, r"q .*list"),
    "k_not_a_tensor": ({"k": None}, TypeError, r"k .*NoneType"),
    "q_of_rank_3": ({"q": tensor(H, T, D)}, ValueError, r"q .*\[4, 10, 8\]"),
    "k_of_rank_5": ({"k": tensor(1, B, H, T, D)}, ValueError, r"k .*\[1, 2, 4, 10, 8\]"),
    "v_of_rank_3": ({"v": tensor(H, T, D)}, ValueError, r"v .*\[4, 10, 8\]"),
    "heads_do_not_divide": ({"k": tensor(B, 3, T, D), "v": tensor(B, 3, T, D)}, ValueError, r"4.*3"),
    "more_key_heads": ({"k": tensor(B, 8, T, D), "v": tensor(B, 8, T, D)}, ValueError, r"4.*8"),
    "no_key_heads": ({"k": tensor(B, 0, T, D), "v": tensor(B, 0, T, D)}, ValueError, r"4.*0"),
    "no_heads": (
        {"q": tensor(B, 0, T, D), "k": tensor(B, 0, T, D), "v": tensor(B, 0, T, D), "bias": None},
        ValueError,
        r"q .*\[2, 0, 10, 8\]",
    ),
    "no_head_dim": (
        {"q": tensor(B, H, T, 0), "k": tensor(B, H, T, 0), "v": tensor(B, H, T, 0)},
        ValueError,
        r"q .*10, 0\]",
    ),
    "head_dim_of_k": ({"k": tensor(B, H, T, 16), "v": tensor(B, H, T, 16)}, ValueError, r"k .*8.*16"),
    "head_dim_of_v": ({"v": tensor(B, H, T, 16)}, ValueError, r"v .*8.*16"),
    "batch_of_k": ({"k": tensor(3, H, T, D), "v": tensor(3, H, T, D)}, ValueError, r"k .*2.*3"),
    "length_of_v": ({"v": tensor(B, H, 11, D)}, ValueError, r"v .*10.*11"),
    "heads_of_v": ({"v": tensor(B, 2, T, D)}, ValueError, r"v .*\[2, 2, 10, 8\]"),
    "dtype_of_k": ({"k": tensor(dtype=torch.float64)}, TypeError, r"k .*float32.*float64"),
    "dtype_of_v": ({"v": tensor(dtype=torch.bfloat16)}, TypeError, r"v .*float32.*bfloat16"),
    "int_tensors": (
        {"q": tensor(dtype=torch.int64), "k": tensor(dtype=torch.int64), "v": tensor(dtype=torch.int64)},
        TypeError,
        r"q .*int64",
    ),
    "complex_tensors": (
        {"q": tensor(dtype=torch.complex64), "k": tensor(dtype=torch.complex64), "v": tensor(dtype=torch.complex64)},
        TypeError,
        r"q .*complex64",
    ),
    "device_of_k": ({"k": tensor().to("meta"), "v": tensor().to("meta")}, ValueError, r"k .*cpu.*meta"),
    "slopes_negative": ({"bias": linear(slopes=torch.tensor([1.0, -0.5, 1.0, 1.0]))}, ValueError, r"slopes .*-0\.5"),
    "slopes_nan": ({"bias": linear(slopes=torch.tensor([1.0, math.nan, 1.0, 1.0]))}, ValueError, r"slopes .*nan"),
    "slopes_inf": ({"bias": linear(slopes=torch.tensor([1.0, math.inf, 1.0, 1.0]))}, ValueError, r"slopes .*inf"),
    "slopes_for_other_heads": ({"bias": linear(slopes=torch.ones(3))}, ValueError, r"slopes .*\[3\]"),
    "slopes_for_other_rows": ({"bias": linear(slopes=torch.ones(3, H))}, ValueError, r"slopes .*\[3, 4\]"),
    "slopes_on_meta": ({"bias": linear(slopes=torch.ones(H, device="meta"))}, ValueError, r"slopes .*cpu.*meta"),
    "future_negative": ({"bias": linear(future=-torch.ones(H)), "causal": False}, ValueError, r"future .*-1\.0"),
    "future_for_other_heads": (
        {"bias": linear(future=torch.ones(3)), "causal": False},
        ValueError,
        r"future .*\[3\]",
    ),
    "causal_one_sided": ({"bias": ts.LinearBias.one_sided(torch.ones(H))}, ValueError, r"sees.*causal=False"),
    "causal_future": ({"bias": linear(future=torch.ones(H))}, ValueError, r"future.*causal=False"),
    "causal_offset": ({"bias": linear(offset=0.5)}, ValueError, r"offset.*causal=False"),
    "bias_is_a_tensor": ({"bias": torch.ones(H)}, TypeError, r"bias .*Tensor"),
    "bias_is_a_string": ({"bias": "alibi"}, TypeError, r"bias .*str"),
    "table_for_other_heads": ({"bias": ts.BucketBias(torch.ones(32, 3))}, ValueError, r"table .*\[32, 3\]"),
    "scale_nan": ({"scale": math.nan}, ValueError, r"scale .*nan"),
    "scale_inf": ({"scale": math.inf}, ValueError, r"scale .*inf"),
    "scale_string": ({"scale": "1"}, TypeError, r"scale .*str"),
    "scale_bool": ({"scale": True}, TypeError, r"scale .*bool"),
    "tolerance_negative": ({"tolerance": -1}, ValueError, r"tolerance .*-1"),
    "tolerance_one": ({"tolerance": 1.0}, ValueError, r"tolerance .*1\.0"),
    "tolerance_nan": ({"tolerance": math.nan}, ValueError, r"tolerance .*nan"),
    "tolerance_string": ({"tolerance": "small"}, TypeError, r"tolerance .*str"),
    "tolerance_bool": ({"tolerance": False}, TypeError, r"tolerance .*bool"),
    "padding_with_a_hole": ({"key_padding_mask": HOLE}, ValueError, r"key_padding_mask .*row 1"),
    "padding_in_two_runs": ({"key_padding_mask": SPLIT}, ValueError, r"key_padding_mask .*row 1"),
    "padding_shape": ({"key_padding_mask": MASK[:, 1:]}, ValueError, r"key_padding_mask .*\[2, 10\].*\[2, 9\]"),
    "padding_of_one_row": ({"key_padding_mask": MASK[:1]}, ValueError, r"key_padding_mask .*\[1, 10\]"),
    "padding_of_floats": ({"key_padding_mask": MASK.float()}, TypeError, r"key_padding_mask .*float32"),
    "padding_of_ints": ({"key_padding_mask": MASK.long()}, TypeError, r"key_padding_mask .*int64"),
    "padding_as_a_list": ({"key_padding_mask": MASK.tolist()}, TypeError, r"key_padding_mask .*list"),
    "packing_late_start": (borders(1, T), ValueError, r"cu_seqlens .*\[1, 10\]"),
    "packing_early_end": (borders(0, 4, T - 1), ValueError, r"cu_seqlens .*10.*\[0, 4, 9\]"),
    "packing_late_end": (borders(0, 4, T + 1), ValueError, r"cu_seqlens .*10.*\[0, 4, 11\]"),
    "packing_going_down": (borders(0, 6, 4, T), ValueError, r"cu_seqlens .*\[0, 6, 4, 10\]"),
    "packing_two_rows": ({"cu_seqlens": torch.tensor([0, T])}, ValueError, r"cu_seqlens .*batch.*2"),
    "packing_and_padding": (borders(0, T, key_padding_mask=MASK[:1]), ValueError, r"cu_seqlens .*key_padding_mask"),
    "packing_and_start": (borders(0, T, query_start=0), ValueError, r"cu_seqlens .*query_start"),
    "packing_fewer_queries": (borders(0, T, q=tensor(1, H, 3, D)), ValueError, r"cu_seqlens .*3.*10"),
    "packing_of_floats": (one_row(cu_seqlens=torch.tensor([0.0, T])), TypeError, r"cu_seqlens .*float32"),
    "packing_as_a_list": (one_row(cu_seqlens=[0, T]), TypeError, r"cu_seqlens .*list"),
    "packing_of_rank_2": (one_row(cu_seqlens=torch.tensor([[0, T]])), ValueError, r"cu_seqlens .*\[1, 2\]"),
    "packing_empty": (one_row(cu_seqlens=torch.tensor([], dtype=torch.int64)), ValueError, r"cu_seqlens .*\[0\]"),
    "start_float": ({"query_start": 1.5}, TypeError, r"query_start .*float"),
    "start_bool": ({"query_start": True}, TypeError, r"query_start .*bool"),
    "start_for_other_rows": ({"query_start": torch.tensor([1, 2, 3])}, ValueError, r"query_start .*\[3\]"),
    "start_scalar_tensor": ({"query_start": torch.tensor(1)}, ValueError, r"query_start .*\[\]"),
    "start_of_floats": ({"query_start": torch.tensor([1.0, 2.0])}, ValueError, r"query_start .*float32"),
    "start_as_a_list": ({"query_start": [1, 2]}, TypeError, r"query_start .*list"),
    "norms_for_other_heads": ({"key_norms": torch.ones(B, 3)}, ValueError, r"key_norms .*\[2, 3\]"),
    "norms_for_other_keys": ({"key_norms": torch.ones(B, H, 7)}, ValueError, r"key_norms .*\[2, 4, 7\]"),
    "norms_of_ints": ({"key_norms": torch.ones((B, H), dtype=torch.int64)}, TypeError, r"key_norms .*int64"),
    "norms_as_a_float": ({"key_norms": 3.0}, TypeError, r"key_norms .*float"),
    "norms_negative": (
        {"key_norms": torch.full((B, H), -1.0)},
        ValueError,
        r"key_norms must not be negative, got -1\.0",
    ),
    "norms_negative_in_one_block": ({"key_norms": one_negative(B, H, 1)}, ValueError, r"key_norms .*got -0\.5"),
    "norms_negative_for_one_key": ({"key_norms": one_negative(B, H, T)}, ValueError, r"key_norms .*got -0\.5"),
}


def call(place: Place, changes: dict[str, Any]) -> torch.Tensor:
    arguments = {"q": tensor(), "k": tensor(), "v": tensor(), "bias": linear(), "backend": place.backend} | changes
    return attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("name", CALLS)
def test_bad_calls(name: str, place: Place) -> None:
    changes, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call(place, changes)


def test_a_slope_of_zero_is_said_in_a_bias(place: Place) -> None:
    """Where slopes are all that is given it is more likely a mistake."""
    q, slopes = tensor(), torch.tensor([1.0, 0.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"slopes must be positive, got 0\.0: .*LinearBias"):
        ts.alibi_attention(q, q, q, slopes, backend=place.backend)
    with pytest.raises(ValueError, match=r"slopes must be positive, got 0\.0: .*LinearBias"):
        ts.certified_windows(q, q, slopes)
    assert call(place, {"bias": linear(slopes=slopes)}).shape == (B, H, T, D)


def test_the_good_arguments_are_good(place: Place) -> None:
    assert call(place, {}).shape == (B, H, T, D)
    assert call(place, borders(0, 4, 4, T)).shape == (1, H, T, D)


@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("shape", [(B, H), (B, H, 3), (B, H, 300)], ids=str)
def test_negative_norms_are_refused_in_decoding(shape: tuple[int, ...], queries: int, place: Place) -> None:
    q, k = tensor(B, H, queries, D), tensor(B, H, 300, D)
    with pytest.raises(ValueError, match=r"key_norms must not be negative, got -0\.5"):
        attention(q, k, k, bias=linear(), key_norms=one_negative(*shape), backend=place.backend)


@pytest.mark.parametrize("queries", [1, 300])
def test_norms_of_nan_mean_that_everything_is_visited(queries: int, place: Place) -> None:
    q, k = tensor(B, H, queries, D), tensor(B, H, 300, D)
    bias, norms = linear(), torch.full((B, H, 3), math.nan)
    norms[0] = 0.0  # which bounds these keys: they are zero
    expected = attention(q, k, k, bias=bias, tolerance=0.0, backend=place.backend)
    torch.testing.assert_close(attention(q, k, k, bias=bias, key_norms=norms, backend=place.backend), expected)
    windows = ts.certified_windows(q, k, bias.slopes, key_norms=norms)
    assert bool((windows[1, ..., 0] == 0).all())


SLOPES: dict[str, tuple[object, type[Exception], str]] = {
    "list": ([1.0] * H, TypeError, r"slopes .*list"),
    "float": (0.5, TypeError, r"slopes .*float"),
    "three": (torch.ones(3), ValueError, r"slopes .*\[3\]"),
    "ints": (torch.ones(H, dtype=torch.int64), TypeError, r"slopes .*int64"),
    "zeros": (torch.zeros(H), ValueError, r"slopes .*0\.0"),
}


@pytest.mark.parametrize("name", SLOPES)
def test_bad_slopes(name: str, place: Place) -> None:
    slopes, error, message = SLOPES[name]
    with pytest.raises(error, match=message):
        ts.alibi_attention(tensor(), tensor(), tensor(), slopes, backend=place.backend)  # pyright: ignore[reportArgumentType]
    with pytest.raises(error, match=message):
        ts.certified_windows(tensor(), tensor(), slopes)  # pyright: ignore[reportArgumentType]
