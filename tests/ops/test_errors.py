"""Bad input that is refused before there is a backend: biases, blocks, names, and what certified_windows refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import trainshort as ts
from tests.ops.contract.test_errors import CALLS, H, linear, tensor

NOT_ABOUT_KEYS_ALONE = {name for name, (changes, _, _) in CALLS.items() if set(changes) & {"v", "bias"}} - {
    "heads_do_not_divide",
    "batch_of_k",
    "head_dim_of_k",
}


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_ABOUT_KEYS_ALONE])
def test_windows_refuse_the_same(name: str) -> None:
    changes, error, message = CALLS[name]
    arguments = {"q": tensor(), "k": tensor()} | {n: value for n, value in changes.items() if n != "v"}
    with pytest.raises(error, match=message):
        ts.certified_windows(arguments.pop("q"), arguments.pop("k"), **arguments)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: ts.LinearBias([1.0]), TypeError, r"slopes .*list"),
        (lambda: ts.LinearBias(torch.tensor([1])), TypeError, r"slopes .*int64"),
        (lambda: ts.LinearBias(torch.tensor(1.0)), ValueError, r"slopes .*\[\]"),
        (lambda: ts.LinearBias(torch.ones(1, 2, 3)), ValueError, r"slopes .*\[1, 2, 3\]"),
        (lambda: linear(future=2.0), TypeError, r"future .*float"),
        (lambda: linear(offset=-0.1), ValueError, r"offset .*-0\.1"),
        (lambda: linear(offset=1.5), ValueError, r"offset .*1\.5"),
        (lambda: linear(offset=math.nan), ValueError, r"offset .*nan"),
        (lambda: linear(sees=["past", "back", "both", "both"]), ValueError, r"sees .*'back'"),
        (lambda: linear(sees=["past"]), ValueError, r"sees .*4 .*1"),
        (lambda: ts.BucketBias([[1.0]]), TypeError, r"table .*list"),
        (lambda: ts.BucketBias(torch.ones((32, H), dtype=torch.int64)), TypeError, r"table .*int64"),
        (lambda: ts.BucketBias(torch.ones(32)), ValueError, r"table .*\[32\]"),
        (lambda: ts.BucketBias(torch.ones(1, H)), ValueError, r"table .*1"),
        (lambda: ts.BucketBias(torch.ones(7, H), bidirectional=True), ValueError, r"table .*7"),
        (lambda: ts.BucketBias(torch.ones(2, H), bidirectional=True), ValueError, r"table .*2"),
        (lambda: ts.BucketBias(torch.ones(32, H), max_distance=16), ValueError, r"max_distance .*16"),
        (lambda: ts.BucketBias(torch.ones(32, H), max_distance=0), ValueError, r"max_distance .*0"),
    ],
)
def test_bad_biases(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize("block", [0, -128, 1.5, True])
def test_bad_blocks(block: object) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"block .*{block}"):
        ts.certified_windows(tensor(), tensor(), block=block)  # pyright: ignore[reportArgumentType]


def test_windows_take_slopes_or_a_bias() -> None:
    with pytest.raises(ValueError, match="slopes and bias"):
        ts.certified_windows(tensor(), tensor(), torch.ones(H), bias=linear())
    with pytest.raises(TypeError, match=r"bias .*BucketBias"):
        ts.certified_windows(tensor(), tensor(), bias=ts.BucketBias(torch.ones(32, H)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("backend", ["dense", "Blocked", "", None, 3])
def test_unknown_backends(backend: object) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"backend .*reference.*blocked.*{backend}"):
        ts.alibi_attention(tensor(), tensor(), tensor(), backend=backend)  # pyright: ignore[reportArgumentType]


def test_triton_does_not_fall_back() -> None:
    with pytest.raises(RuntimeError, match=r"triton.*cpu.*blocked"):
        ts.alibi_attention(tensor(), tensor(), tensor(), backend="triton")


def test_backend_for_wants_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"q .*list"):
        ts.backend_for([1.0])  # pyright: ignore[reportArgumentType]
