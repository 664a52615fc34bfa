"""Cases on the GPU: moved there whole, with random shapes of a few kinds, so that compiled kernels are shared."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from tests.ops.cases import random_case
from tests.ops.dense import Case

MOST_PAIRS = 12_000_000  # of queries and keys, over all heads: float64 matrices of them must fit many times


def on_gpu(case: Case) -> Case:
    there = {f.name: getattr(case, f.name) for f in fields(case)}
    return replace(case, **{name: value.cuda() for name, value in there.items() if isinstance(value, Tensor)})


def gpu_case(**features) -> Case:
    return on_gpu(random_case(**features))


def kind(dtype: torch.dtype, dim: int, **features) -> dict:
    return {"dtype": dtype, "dim": dim, "batch": 2, "heads": 4, "ragged": None} | features


# One compiled set of kernels each. `ragged` says how sequences differ inside a call.
KINDS: dict[str, dict] = {
    "bf16_128_causal": kind(torch.bfloat16, 128),
    "bf16_64_grouped": kind(torch.bfloat16, 64, heads=8, kv_heads=2),
    "fp16_64_symmetric": kind(torch.float16, 64, causal=False),
    "bf16_80_packed_odd_heads": kind(torch.bfloat16, 80, batch=1, heads=3, ragged="packed"),
    "fp32_64_causal": kind(torch.float32, 64, heads=2),
    "fp32_32_left_right": kind(torch.float32, 32, heads=2, causal=False, slopes="by_row", future=True, offset=0.5),
    "bf16_64_padded": kind(torch.bfloat16, 64, ragged="padded"),
    "fp16_128_one_sided": kind(torch.float16, 128, causal=False, sees=("past", "past", "future", "future")),
    "bf16_64_bucket": kind(torch.bfloat16, 64, bias="bucket", heads=2),
    "fp32_64_bucket_symmetric_padded": kind(
        torch.float32, 64, heads=2, bias="bucket", causal=False, bidirectional=True, ragged="padded"
    ),
    "bf16_128_no_bias_start_by_row": kind(torch.bfloat16, 128, bias="none", ragged="start_by_row"),
    "bf16_32_start": kind(torch.bfloat16, 32, heads=2, ragged="start"),
    "bf16_64_gates_grouped": kind(torch.bfloat16, 64, heads=4, kv_heads=2, bias="gates"),
    "fp16_128_gates_symmetric_padded": kind(torch.float16, 128, bias="gates", causal=False, ragged="padded"),
    "bf16_64_gates_packed": kind(torch.bfloat16, 64, batch=1, bias="gates", ragged="packed"),
    "fp32_64_times": kind(torch.float32, 64, heads=2, bias="times"),
}


class Draws:
    """Random choices from a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def between(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def slopes(self, *shape: int) -> Tensor:
        return 2.0 ** (-9.0 * torch.rand(shape, generator=self.generator))


def random_lengths(draws: Draws, heads: int, square: bool, never_round: bool) -> tuple[int, int]:
    """Queries and keys, of a kind that Triton need not compile anew for: see `same_kernels`."""
    round_number = draws.between(0, 3) == 0 and not never_round
    while True:
        keys = draws.between(130, 2040)
        queries = keys if square else draws.between(130, 2040)
        if round_number:
            queries, keys = queries // 16 * 16, keys // 16 * 16
        if queries * keys * heads <= MOST_PAIRS and same_kernels(queries, keys, round_number):
            return queries, keys


def same_kernels(queries: int, keys: int, round_number: bool) -> bool:
    """Triton specialises on lengths that are multiples of 16."""
    return (queries % 16 == 0, keys % 16 == 0) == (round_number, round_number)


def random_gpu_case(name: str, seed: int) -> Case:
    """One shape of a kind, with its features filled in at random."""
    features = dict(KINDS[name])
    draws = Draws(7919 * seed + list(KINDS).index(name))
    ragged, causal = features.pop("ragged"), features.get("causal", True)
    batch, heads = features["batch"], features["heads"]
    square = ragged == "packed" or draws.between(0, 2) == 0
    # A start in front of the end of the keys is a kind of its own already.
    queries, keys = random_lengths(draws, batch * heads, square, never_round=ragged == "start")
    if features.get("bias", "linear") == "linear":
        by_row = features.pop("slopes", None) == "by_row"
        features["slopes"] = draws.slopes(batch, heads) if by_row else draws.slopes(heads)
        if features.pop("future", False):
            features["future"] = draws.slopes(batch, heads) if by_row else draws.slopes(heads)
    if ragged == "packed":
        borders = sorted(draws.between(0, keys) for _ in range(3))
        features["cu_seqlens"] = torch.tensor([0, borders[0], *borders, keys])  # with an empty document
    elif ragged == "padded":
        real = torch.tensor([[draws.between(0, keys)] for _ in range(batch)])
        index = torch.arange(keys).expand(batch, -1)
        features["key_padding_mask"] = index < real if draws.between(0, 1) else index >= keys - real
    elif ragged == "start":
        features["query_start"] = draws.between(-20, keys + 20)
    elif ragged == "start_by_row":
        features["query_start"] = torch.tensor([draws.between(-20, keys + 20) for _ in range(batch)])
    features["tolerance"] = [None, None, 1e-3][draws.between(0, 2)]
    features["causal"] = causal
    return gpu_case(queries=queries, keys=keys, seed=seed, **features)
