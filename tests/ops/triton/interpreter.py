"""Handling the kernels under the interpreter: tile sizes, an empty cache, and the windows as a set of pairs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.ops.dense import Case
from trainshort.ops.problem import Problem

if TYPE_CHECKING:
    from trainshort.ops.triton.config import Config

UNIT = 64


def forget() -> None:
    """What is cached of shapes and tiles."""
    from trainshort.ops.triton import tuning
    from trainshort.ops.triton.cache import CACHE

    CACHE.clear()
    tuning.tiles_for.cache_clear()


@contextlib.contextmanager
def quick_tiles(dtypes: tuple[torch.dtype, ...]) -> Iterator[None]:
    """Tiles of 64 x 64 for these dtypes instead of those that fit a small GPU."""
    from trainshort.ops.triton import tuning

    sizes = {dtype.itemsize for dtype in dtypes}
    large = {key: tiles._replace(rows=64, keys=64) for key, tiles in tuning.ANYWHERE.items() if key[1] in sizes}
    with mock.patch.dict(tuning.ANYWHERE, large):
        forget()
        yield
    forget()


@contextlib.contextmanager
def shipped_tiles() -> Iterator[None]:
    """The tiles of a small GPU, inside a test that has the quick ones."""
    from trainshort.ops.triton import tuning

    small = {
        ("forward", 4, 64): tuning.Tiles(64, 32, 4, 2),
        ("queries", 4, 64): tuning.Tiles(32, 32, 4, 1),
        ("keys", 4, 64): tuning.Tiles(32, 32, 4, 1),
    }
    with mock.patch.dict(tuning.ANYWHERE, small):
        forget()
        yield
    forget()


@contextlib.contextmanager
def addresses_checked() -> Iterator[None]:
    """An error where a kernel reads or writes outside of the tensors that it is given."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    call = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    given: list[tuple[int, int]] = []  # first address, and one past the last

    def call_checked(kernel: Any, *arguments: Any, **named: Any) -> Any:
        tensors = [getattr(each, "base", each) for each in (*arguments, *named.values())]
        given[:] = [_extent(each) for each in tensors if isinstance(each, Tensor) and each.numel()]
        return call(kernel, *arguments, **named)

    def check(pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        for address in np.unique(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.int64)):
            inside = any(first <= address and address + size <= end for first, end in given)
            assert inside, f"address {address}, of tensors at {given}"

    def load_checked(builder: Any, pointers: Any, mask: Any, *others: Any, **named: Any) -> Any:
        check(pointers, mask)
        return load(builder, pointers, mask, *others, **named)

    def store_checked(builder: Any, pointers: Any, value: Any, mask: Any, *others: Any, **named: Any) -> Any:
        check(pointers, mask)
        return store(builder, pointers, value, mask, *others, **named)

    with (
        mock.patch.object(GridExecutor, "__call__", call_checked),
        mock.patch.object(InterpreterBuilder, "create_masked_load", load_checked),
        mock.patch.object(InterpreterBuilder, "create_masked_store", store_checked),
    ):
        yield


def _extent(tensor: Tensor) -> tuple[int, int]:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def problem_of(case: Case) -> Problem:
    arguments = case.arguments() | {"scale": case.true_scale, "tolerance": case.may_skip}
    return Problem(q=case.q, k=case.k, v=case.v, bias=case.bias, **arguments)


def sequences(case: Case) -> list[tuple[int, int, int, int, int]]:
    """(row of the batch, first query, queries, first key, keys) of every row or packed document."""
    batch, _, queries, _ = case.q.shape
    if case.cu_seqlens is not None:
        borders = case.cu_seqlens.tolist()
        return [(0, a, b - a, a, b - a) for a, b in itertools.pairwise(borders)]
    found = []
    for row in range(batch):
        first, count = 0, case.k.shape[2]
        if case.key_padding_mask is not None:
            mask = case.key_padding_mask[row]
            count = int(mask.sum())
            first = int(mask.int().argmax())
        found.append((row, 0, queries, first, count))
    return found


def run_forward(case: Case) -> tuple[Config, Tensor, Tensor]:
    """The configuration, the windows of the backward pass, and the scratch memory, after a forward pass."""
    from trainshort.ops.triton import launch
    from trainshort.ops.triton.call import describe
    from trainshort.ops.triton.config import config_for

    call = describe(problem_of(case))
    config = config_for(call.features, case.q, case.k, case.v)
    _, _, windows, scratch = launch.forward_with_scratch(call, config, case.q, case.k, case.v, track=True)
    assert scratch is not None
    return config, windows, scratch


def backward_windows(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FIRST, LAST, UNTIL and SINCE as they are for the backward pass; in causal attention first and third twice."""
    config, windows, _ = run_forward(case)
    return _split(case, config, windows)


def _split(case: Case, config: Config, windows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = [config.units, config.key_units] if case.causal else [config.units] * 2 + [config.key_units] * 2
    assert windows.shape[2] == config.width == sum(sizes) > 0
    parts = windows.split(sizes, dim=2)
    return (parts[0], parts[0], parts[1], parts[1]) if case.causal else parts


def kept_by_both(case: Case) -> tuple[Tensor, Tensor]:
    """The pairs inside the windows of the forward and of the backward pass, of one run: bool [B, H, Tq, Tk] each."""
    config, windows, scratch = run_forward(case)
    first, last, _, _ = _split(case, config, windows)
    return pairs(case, *config.visited(scratch)), pairs(case, first, last)


def kept_by_forward(case: Case) -> Tensor:
    return kept_by_both(case)[0]


def pairs(case: Case, first: Tensor, last: Tensor | None) -> Tensor:
    """The pairs inside windows of key units by query unit: bool [B, H, Tq, Tk]."""
    batch, heads, queries, _ = case.q.shape
    keys = case.k.shape[2]
    kept = torch.zeros((batch, heads, queries, keys), dtype=torch.bool, device=first.device)
    unit = 0
    for row, q0, nq, k0, nk in sequences(case):
        unit0 = unit if case.cu_seqlens is not None else 0
        units = unit0 + torch.arange(nq, device=first.device) // UNIT
        key = torch.arange(nk, device=first.device)
        low = first[row][:, units, None] * UNIT  # [H, nq, 1]
        inside = key >= low
        if not case.causal:
            assert last is not None
            inside = inside & (key < last[row][:, units, None] * UNIT)
        kept[row, :, q0 : q0 + nq, k0 : k0 + nk] = inside
        unit += -(-nq // 128) * 2
    return kept
