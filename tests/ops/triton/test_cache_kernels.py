"""The small kernels beside attention: tokens into a cache with the norms of their blocks, and rotary embeddings."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainshort.models.cache import norms_above
from trainshort.ops.triton import run
from trainshort.ops.triton.call import Rotation, Stored
from trainshort.positions import Shape, build_position

CAPACITY, BLOCK = 700, 128


def stored(batch: int = 2, heads: int = 3, dim: int = 12, dtype: torch.dtype = torch.float32) -> Stored:
    """A cache with room for 700 tokens, NaN where nothing is written."""
    keys, values = (torch.full((batch, heads, CAPACITY, dim), math.nan, dtype=dtype) for _ in range(2))
    return Stored(keys, values, torch.zeros(batch, heads, -(-CAPACITY // BLOCK)))


def qkv(tokens: int, batch: int = 2, heads: int = 3, dim: int = 12) -> tuple[Tensor, Tensor]:
    """Keys and values as views of one projection, [B, H, T, D] with the heads of a token together."""
    generator = torch.Generator().manual_seed(tokens)
    both = torch.randn(batch, tokens, 2 * heads, dim, generator=generator).transpose(1, 2)
    return both[:, :heads], both[:, heads:]


def norms_of(keys: Tensor) -> Tensor:
    """Of each block, none where nothing is written."""
    lengths = torch.nan_to_num(norms_above(keys), nan=0.0)
    return torch.stack([part.amax(-1) for part in lengths.split(BLOCK, dim=2)], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "pieces", [[1] * 3, [127, 1, 1], [128, 128], [300, 5, 200], [129, 127, 130], [700]], ids=lambda p: f"{p[:3]}"
)
def test_pieces_of_any_length(pieces: list[int], dtype: torch.dtype) -> None:
    cache, written = stored(dtype=dtype), 0
    for tokens in pieces:
        k, v = qkv(tokens)
        run.append(k, v, cache, written)
        assert torch.equal(cache.keys[:, :, written : written + tokens], k.to(dtype))
        assert torch.equal(cache.values[:, :, written : written + tokens], v.to(dtype))
        written += tokens
    for buffer in (cache.keys, cache.values):
        assert bool(buffer[:, :, :written].isfinite().all())
        assert bool(buffer[:, :, written:].isnan().all()), "written beyond the tokens"
    torch.testing.assert_close(cache.norms, norms_of(cache.keys), rtol=2.0**-20, atol=0.0)
    exact = torch.nan_to_num(cache.keys.double().norm(dim=-1), nan=0.0)
    largest = torch.stack([part.amax(-1) for part in exact.split(BLOCK, dim=2)], dim=-1)
    assert bool((cache.norms >= largest).all()), "no bound"


def test_where_each_row_stands() -> None:
    """A row's place in the cache: its first key and, counted from there, the position of its next query."""
    cache = stored()
    k, v = qkv(1)
    table = torch.tensor([[0, 1, 0, 131, 130], [0, 1, 40, 91, 90]], dtype=torch.int32)
    run.append(k, v, cache, sequences=table)
    assert torch.equal(cache.keys[:, :, 130:131], k)
    assert torch.equal(cache.values[:, :, 130:131], v)
    assert bool(cache.keys[:, :, :130].isnan().all())
    assert bool(cache.keys[:, :, 131:].isnan().all())
    torch.testing.assert_close(cache.norms, norms_of(cache.keys), rtol=2.0**-20, atol=0.0)


def test_a_block_keeps_the_largest_norm() -> None:
    cache = stored()
    k, v = qkv(1)
    run.append(k * 100, v, cache, 5)
    before = cache.norms.clone()
    run.append(k, v, cache, 6)
    assert torch.equal(cache.norms, before)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_the_norms(bad: float, tokens: int) -> None:
    cache = stored()
    k, v = qkv(tokens)
    k = k.clone()
    k[1, 2, 0, 3] = bad
    run.append(k, v, cache, 0)
    run.append(*qkv(1), cache, tokens)
    odd = ~cache.norms.isfinite()
    assert odd.nonzero().tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("positions", ["alike", "by row"])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 16), (70, 12), (300, 64)])
def test_rotary_embeddings(tokens: int, dim: int, positions: str) -> None:
    method = build_position("rotary", Shape(d_model=4 * dim, num_heads=4, head_dim=dim), {})
    both = torch.randn(2, tokens, 6, dim, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    q, k = both[:, :4], both[:, 4:]
    index = torch.arange(100_000, 100_000 + tokens)[None]
    if positions == "by row":
        index = index - torch.tensor([[0], [99_990]])
    expected = method.rotate(q, k, index)
    frequencies = torch.exp(-math.log(10000.0) * (torch.arange(dim // 2) / (dim // 2)))
    found = run.rotate(q, k, index, Rotation(frequencies))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "dim", "size"), [(3, 12, 1.0), (6, 16, 1.3), (12, 64, 0.7)])
def test_keys_turned_as_they_are_stored(heads: int, dim: int, size: float, dtype: torch.dtype) -> None:
    """By the position of each row, behind its padding: the bits of the kernel that turns prompts, and those of torch
    to rounding; and norms that bound what is stored."""
    cache = stored(dim=dim, dtype=dtype)
    both = 20.0 * torch.randn(2, 1, heads + 6, dim, generator=torch.Generator().manual_seed(heads)).to(dtype)
    q, k, v = both.transpose(1, 2).split((heads, 3, 3), dim=1)
    table = torch.tensor([[0, 1, 0, 131, 130], [0, 1, 40, 91, 90]], dtype=torch.int32)
    method = build_position("rotary", Shape(d_model=heads * dim, num_heads=heads, head_dim=dim), {})
    rotation = method.rotation(torch.device("cpu"))
    assert rotation is not None
    out = run.append_turned(q, k, v, cache, table, rotation._replace(size=size))
    place = slice(130, 131)
    found = out, cache.keys[:, :, place]
    for one, two in zip(found, run.rotate(q, k, table[:, 4:].long(), rotation._replace(size=size)), strict=True):
        assert torch.equal(one, two)
    wide = [(each * size).to(dtype) for each in (q, k)]
    for one, two in zip(found, method.rotate(*wide, table[:, 4:].long()), strict=True):
        torch.testing.assert_close(one, two, rtol=torch.finfo(dtype).eps, atol=64 * torch.finfo(torch.float32).eps)
    assert torch.equal(cache.values[:, :, place], v)
    for buffer in (cache.keys, cache.values):
        assert bool(buffer[:, :, :130].isnan().all())
        assert bool(buffer[:, :, 131:].isnan().all())
    exact = cache.keys[:, :, 130].double().norm(dim=-1)
    assert bool((cache.norms[:, :, 1] >= exact).all()), "no bound"
    torch.testing.assert_close(cache.norms[:, :, 1].double(), exact, rtol=2.0**-18, atol=0.0)
    assert not cache.norms[:, :, [0, 2, 3, 4, 5]].any()
