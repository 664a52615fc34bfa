"""torch's defaults say what users build tensors in, and nothing of what a proof is computed in."""

from __future__ import annotations

import math

import pytest
import torch

import trainshort as ts
from tests.defaults import DEFAULTS, default_dtype
from tests.ops.cases import left_padding, random_case

STEEP = torch.tensor([0.9, 0.3, 0.05])


FEATURES: dict[str, dict] = {
    "causal": {"queries": 600},
    "windows": {"queries": 1100, "slopes": STEEP},
    "symmetric": {"queries": 600, "causal": False, "slopes": STEEP},
    "left_right": {"queries": 600, "causal": False, "slopes": STEEP, "future": STEEP.flip(0), "offset": 0.5},
    "one_sided": {"queries": 600, "causal": False, "slopes": STEEP, "sees": ("past", "future", "both")},
    "padded": {"queries": 600, "slopes": STEEP, "key_padding_mask": left_padding(600, 420, length=600)},
    "packed": {"batch": 1, "queries": 700, "slopes": STEEP, "cu_seqlens": torch.tensor([0, 100, 700])},
    "query_start": {"queries": 20, "keys": 700, "slopes": STEEP, "query_start": torch.tensor([600, 400])},
    "bucket": {"queries": 600, "bias": "bucket"},
    "no_bias": {"queries": 300, "bias": "none"},
    "decoding": {"queries": 1, "keys": 2000, "slopes": STEEP, "key_norms": torch.full((2, 3), 6.0)},
    "decoding_norms_by_block": {"queries": 1, "keys": 700, "slopes": STEEP, "key_norms": torch.full((2, 3, 6), 6.0)},
    "bfloat16": {"queries": 1100, "slopes": STEEP, "dtype": torch.bfloat16},
    "float64": {"queries": 1100, "slopes": STEEP, "dtype": torch.float64, "tolerance": 1e-6},
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("name", [name for name in FEATURES if name not in ("bucket", "no_bias")])
def test_windows_are_the_same(name: str, default: torch.dtype) -> None:
    case = random_case(**FEATURES[name])
    blocks = (128, 16, 1) if case.q.shape[2] < 100 else (128, 16)
    found = [case.windows(block) for block in blocks]
    with default_dtype(default):
        for block, windows in zip(blocks, found, strict=True):
            assert torch.equal(case.windows(block), windows), block


@pytest.mark.parametrize("name", [name for name in FEATURES if name not in ("bucket", "no_bias")])
def test_windows_are_the_same_where_tensors_are_made_elsewhere(name: str) -> None:
    """As under torch.set_default_device, for tensors on another device than the default."""
    case = random_case(**FEATURES[name])
    expected = case.windows()
    with torch.device("meta"):
        windows = case.windows()
    assert torch.equal(windows, expected)


@pytest.mark.parametrize("default", DEFAULTS)
def test_decoding_without_gradients_is_the_same(default: torch.dtype) -> None:
    case = random_case(**FEATURES["decoding"])
    out = case.attend("auto")
    with default_dtype(default):
        assert torch.equal(case.attend("auto"), out)


@pytest.mark.parametrize("default", DEFAULTS)
def test_slopes_are_the_papers_for_every_number_of_heads(default: torch.dtype) -> None:
    """In 16 bits half of 255 is no number: with many heads the slopes were not the paper's."""
    heads = [*range(1, 40), 96, 200, 255, 256, 300, 511, 513, 2047]
    paper = [ts.alibi_slopes(count) for count in heads]
    with default_dtype(default):
        for count, slopes in zip(heads, paper, strict=True):
            found = ts.alibi_slopes(count)
            assert found.dtype == torch.float32
            assert torch.equal(found, slopes), count


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_given_for_keys_that_autocast_rounds_bound_the_rounded_ones(dtype: torch.dtype) -> None:
    """Every key that the query likes grows when it is rounded: the norms of the keys as they were bound it no more.

    Only keys so far away attract that their pull, of some 2000 nats, just makes up for the distance: there a window
    ends, and the bound is tight.
    """
    keys, dim, tolerance = 4096, 16, 1e-3
    growth = 0.51 * torch.finfo(dtype).eps  # rounds up, to all of eps
    k = torch.full((1, 1, keys, dim), 32.0 * (1.0 + growth))
    far = math.floor(2048.0 * (1.0 + growth) - math.log(tolerance))
    k[:, :, -far:] = 0.0
    q, slopes = torch.full((1, 1, 1, dim), 4.0), torch.tensor([1.0])
    with torch.autocast("cpu", dtype):
        windows = ts.certified_windows(
            q, k, slopes, scale=1.0, tolerance=tolerance, block=1, key_norms=k.norm(dim=-1) * (1 + 1e-6)
        )
    scores = (q.double() * k.to(dtype).double()).sum(-1) - torch.arange(keys - 1, -1, -1)
    weights = torch.softmax(scores[0, 0], dim=-1)
    first = int(windows[0, 0, 0, 0])
    assert first > keys - far - 100, "the case is no longer tight"
    assert weights[:first].sum().item() <= tolerance


def test_keys_that_autocast_makes_infinite_are_visited() -> None:
    k = torch.full((1, 1, 512, 4), 1e5)
    k[:, :, 256:] = 0.0
    norms = torch.tensor([[[3e5, 3e5, 0.0, 0.0]]])
    q, slopes = torch.full((1, 1, 1, 4), 1e-6), torch.tensor([2.0])
    with torch.autocast("cpu", torch.bfloat16):
        assert ts.certified_windows(q, k, slopes, key_norms=norms).tolist() == [[[[3, 4]]]]
    with torch.autocast("cpu", torch.float16):
        assert ts.certified_windows(q, k, slopes, key_norms=norms).tolist() == [[[[0, 4]]]]
