"""torch's default dtype says what users build tensors in, and nothing of what a sum is computed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.defaults import DEFAULTS, default_dtype
from tests.ops.cases import left_padding
from tests.ops.contract.places import ON_CPU, Place, at
from tests.ops.dense import Case

STEEP = torch.tensor([0.9, 0.3, 0.05])
FEATURES: dict[str, Callable[[Place, int], dict[str, Any]]] = {
    "causal": lambda p, n: {},
    "windows": lambda p, n: {"queries": 2 * n, "slopes": p.steep},
    "symmetric": lambda p, n: {"causal": False, "slopes": p.steep},
    "left_right": lambda p, n: {"causal": False, "slopes": p.steep, "future": p.steep.flip(0), "offset": 0.5},
    "one_sided": lambda p, n: {"heads": 3, "causal": False, "slopes": STEEP, "sees": ("past", "future", "both")},
    "padded": lambda p, n: {"batch": 2, "slopes": p.steep, "key_padding_mask": left_padding(n, n - 40, length=n)},
    "packed": lambda p, n: {"batch": 1, "slopes": p.steep, "cu_seqlens": torch.tensor([0, 40, n])},
    "query_start": lambda p, n: {
        "batch": 2, "queries": 20, "keys": n, "slopes": p.steep, "query_start": torch.tensor([n - 40, n // 2]),
    },
    "bucket": lambda p, n: {"bias": "bucket"},
    "no_bias": lambda p, n: {"bias": "none"},
    "decoding": lambda p, n: {
        "queries": 1, "keys": 3 * n, "slopes": p.steep, "key_norms": torch.full((p.batch, p.heads), 6.0),
    },
    "decoding_norms_by_block": lambda p, n: {
        "queries": 1, "keys": 700, "slopes": p.steep, "key_norms": torch.full((p.batch, p.heads, 6), 6.0),
    },
    "low": lambda p, n: {"queries": 2 * n, "slopes": p.steep, "dtype": p.low},
    "float64": lambda p, n: {"queries": 2 * n, "slopes": p.steep, "dtype": torch.float64, "tolerance": 1e-6},
}  # fmt: skip


@at(*ON_CPU)
@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_attention_and_every_gradient_are_the_same(name: str, default: torch.dtype, place: Place) -> None:
    if name == "float64" and place.interpreted:
        pytest.skip("the kernels compute in at most float32")
    length = 80 if place.interpreted else 600
    case = place.case(**{"queries": length} | FEATURES[name](place, length))
    results, upstream = case.run(place.backend), case.upstream()
    with torch.no_grad():
        decoded = case.attend(place.backend)
    leaves = {n: getattr(case, n).clone().requires_grad_() for n in results if n != "out"}
    with default_dtype(default):
        out = Case(**{**vars(case), **leaves}).attend(place.backend)
        gradients = torch.autograd.grad(out, list(leaves.values()), upstream, materialize_grads=True)
        with torch.no_grad():
            again = case.attend(place.backend)
    assert torch.equal(out, results["out"])
    assert torch.equal(again, decoded)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert gradient.dtype == results[leaf].dtype
        assert torch.equal(gradient, results[leaf]), leaf
