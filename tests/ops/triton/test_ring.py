"""A token over rings in the kernels gives what it gives in plain torch: output, norms, and what certificates need."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trainshort.ops import ring_step
from trainshort.ops.ring_step import Lines, RingStep, lengths_above
from trainshort.ops.rings import Rings, Span

DIM, KV_HEADS = 16, 3
# Length before the token, capacities, first keys: filling up, wrapped, and larger since a while ago.
PLACES = {
    "empty": (0, (32, 32, 64), (0, 0, 0)),
    "filling": (40, (128, 64, 48), (0, 0, 0)),
    "wrapped": (333, (32, 64, 150), (0, 0, 0)),
    "grown": (300, (100, 64, 200), (260, 0, 170)),
}


def ring_of(place: str, group: int, dtype: torch.dtype, padding: Tensor | None, center: float) -> RingStep:
    length, capacities, first = PLACES[place]
    generator = torch.Generator().manual_seed(1)
    rings = Rings(torch.empty((2, DIM), dtype=dtype), capacities, first)
    middle = center * torch.randn((2, KV_HEADS, DIM), generator=generator)
    for run in rings.runs:
        low, heads = run.low(length), run.heads.stop - run.heads.start
        keys, values = (torch.randn((2, heads, length - low, DIM), generator=generator).to(dtype) for _ in range(2))
        norms = lengths_above(keys - middle[:, run.heads, None])
        rings.store(Span(run.heads, low, keys, values, norms))
    return RingStep(
        rings=rings,
        slopes=torch.linspace(0.02, 0.5, KV_HEADS * group),
        scale=DIM**-0.5,
        tolerance=1e-6,
        place=torch.tensor([length]),
        capacity=torch.tensor(capacities),
        first=torch.tensor(first),
        offset=torch.tensor(rings.offsets),
        center=middle,
        longest=torch.full((2, KV_HEADS), 9.0),
        before=torch.zeros((2, KV_HEADS)),
        x=torch.zeros((2, KV_HEADS * group)),
        lse=torch.zeros((2, KV_HEADS * group)),
        padding=padding,
        most_padding=0 if padding is None else int(padding.max()),
    )


def copied(step: RingStep) -> RingStep:
    rings = Rings(step.rings.keys, step.rings.capacities, step.rings.first)
    for name in ("keys", "values", "norms"):
        getattr(rings, name).copy_(getattr(step.rings, name))
    written = {name: getattr(step, name).clone() for name in ("longest", "before", "x", "lse")}
    return replace(step, rings=rings, **written)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("group", "padded", "center"), [(1, False, 0.0), (2, False, 2.0), (3, True, 0.5)])
def test_kernels_give_what_torch_gives(
    group: int, padded: bool, center: float, place: str, dtype: torch.dtype
) -> None:
    from trainshort.ops.triton import ring_step as kernels

    length = PLACES[place][0]
    padding = torch.tensor([length // 2, max(0, length - 3)]) if padded else None
    step = ring_of(place, group, dtype, padding, center)
    plain = copied(step)
    generator = torch.Generator().manual_seed(2)
    # As a layer has them: the queries, keys and values of a token beside each other.
    together = torch.randn((2, (group + 2) * KV_HEADS, DIM), generator=generator).to(dtype)
    q, k, v = together.split((group * KV_HEADS, KV_HEADS, KV_HEADS), dim=1)
    lines = Lines(step.slopes, KV_HEADS, torch.float32)
    expected = ring_step.attend(q, k, v, plain, length, lines)
    found = kernels.attend(q, k, v, step)
    rounding = 2e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found, expected, rtol=0.0, atol=rounding)
    torch.testing.assert_close(step.lse, plain.lse, rtol=0.0, atol=1e-5)
    for name in ("before", "x", "longest"):
        torch.testing.assert_close(getattr(step, name), getattr(plain, name), rtol=1e-5, atol=1e-5)
    assert torch.equal(step.rings.keys, plain.rings.keys)
    assert torch.equal(step.rings.values, plain.rings.values)
    torch.testing.assert_close(step.rings.norms, plain.rings.norms, rtol=1e-5, atol=1e-5)
    exact = torch.linalg.vector_norm(k.double() - step.center.double(), dim=-1)
    slots = step.offset + step.place % step.capacity
    assert bool((step.rings.norms[:, slots].double() >= exact).all())
    assert bool((step.x.double() >= torch.linalg.vector_norm(q.double(), dim=-1) * step.scale).all())


def test_distant_keys_are_not_read() -> None:
    """Those that cannot matter for this query, though the ring has them."""
    from trainshort.ops.triton import ring_step as kernels

    step = ring_of("wrapped", 1, torch.float32, None, 0.0)
    step.slopes.fill_(1.0)
    for run in step.rings.runs:  # what lies more than 120 keys back, in the ring of 150
        if run.capacity == 150:
            step.rings.slots_of(step.rings.values, run)[:, :, [(333 - back) % 150 for back in range(125, 150)]] = 1e30
    q, k, v = torch.ones((3, 2, KV_HEADS, DIM)).unbind(0)
    assert float(kernels.attend(q, k, v, step).abs().max()) < 100.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_seen(bad: float) -> None:
    from trainshort.ops.triton import ring_step as kernels

    for where in ("q", "k"):
        step = ring_of("wrapped", 1, torch.float32, None, 0.0)
        tensors = {name: torch.ones((2, KV_HEADS, DIM)) for name in ("q", "k", "v")}
        tensors[where][1, 2, 3] = bad
        kernels.attend(**tensors, step=step)
        seen = step.x if where == "q" else step.longest
        assert torch.isfinite(seen).logical_not().nonzero().tolist() == [[1, 2]]
        assert not bool(torch.isfinite(step.lse[1, 2]))
