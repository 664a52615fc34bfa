"""How the kernels of a call are configured: sizes, tiles, constants, scratch memory, and the values of each kernel.

A `Config` holds what is the same for all calls with the same features and memory layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trainshort.ops.bias import DECAY, KernelBias, alibi_slopes
from trainshort.ops.problem import BLOCK
from trainshort.ops.triton import append, backward, decode, forward, rotate, windows
from trainshort.ops.triton.cache import CACHE
from trainshort.ops.triton.call import Features
from trainshort.ops.triton.driver import Kernel, Slice
from trainshort.ops.triton.shapes import ROWS, UNIT, blocks_of, layout_of, window_width
from trainshort.ops.triton.tuning import Tiles, is_hopper, tiles_for

COARSE = {"ieee": 0.0, "tf32": 2.0**-9}  # rounding of products beyond float32's, relative
MOST_ROWS = 65535  # of the batch: the second and third number of a grid
_SIGHTS = {"past": 1, "future": 2, "both": 3}
# Names by which kernels know slices of the tensors `windows` and `scratch`.
_SLICES = (
    "FIRST", "LAST", "UNTIL", "SINCE", "QUERY_NORM", "COMMON", "CENTER", "NORM", "NORM_PAST", "NORM_AHEAD", "PASTS",
    "MOST_PAST", "AHEADS", "MOST_AHEAD", "REACH_PAST", "REACH_AHEAD", "FROM", "TO", "FOUND_FIRST", "FOUND_LAST",
)  # fmt: skip
_OF_DECAY = ("REACH_PAST", "REACH_AHEAD")
_FUTURE = (
    "LAST",
    "SINCE",
    "NORM_AHEAD",
    "AHEADS",
    "MOST_AHEAD",
    "REACH_AHEAD",
    "TO",
    "FOUND_LAST",
)  # absent if causal


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, for tests."""
    return bool(triton.knobs.runtime.interpret)


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    """strides("q", q): stride_qb, stride_qh and stride_qt, of row of the batch, head and token."""
    return {f"stride_{name}{axis}": stride for axis, stride in zip("bht", tensor.stride(), strict=False)}


class Config:
    """What the kernels need to know of calls with these features and this memory layout of q, k and v."""

    def __init__(self, features: Features, layout: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> None:
        self.features, self.layout = features, layout
        self.batch, self.heads, self.queries, self.dim = q.shape
        if max(self.batch, self.heads) > MOST_ROWS:
            raise ValueError(
                f"backend 'triton' takes at most {MOST_ROWS:,} rows and heads, got {self.batch:,} and "
                f"{self.heads:,}: split the batch, or use backend='blocked'"
            )
        self.kv_heads, self.keys = k.shape[1], k.shape[2]
        self.group = self.heads // self.kv_heads
        self.causal = features.causal
        self.packed = features.borders > 0
        self.uneven = features.ragged or self.packed
        self.blocks = blocks_of(self.queries, features.borders)
        self.key_blocks = blocks_of(self.keys, features.borders)
        self.units = self.blocks * (ROWS // UNIT)
        self.key_units = self.key_blocks * (ROWS // UNIT)
        self.sequences = max(features.borders - 1, 1) if self.packed else self.batch
        self.width = window_width(self.queries, self.keys, features.windows, features.borders, self.causal)
        tiled = q.element_size() == 2 and not self.uneven and not features.tail
        self.tma = tiled and (is_hopper(q.device) or interpreted()) and all(can_describe(t) for t in (q, k, v))
        self.precision = "tf32" if features.tf32 else "ieee"
        kernels = ("forward", "queries", "keys")
        self.tiles = {name: tiles_for(name, q.dtype, self.dim, q.device, self.width == 0) for name in kernels}
        self.buckets = triton.next_power_of_2(features.buckets)
        # Programs of the forward pass look at a unit of queries in so many parts.
        self.unit_parts = UNIT // min(UNIT, self.tiles["forward"].rows)
        self.slices, self.scratch_bytes = self._slices()
        self.values = self._values(q, k, v)

    def _slices(self) -> tuple[dict[str, Slice], int]:
        """Where in the tensors `windows` and `scratch` each kernel finds what, and the bytes of scratch memory."""
        if self.width == 0:
            return {}, 0
        key_units = self.batch * self.kv_heads * self.key_units
        by_head = key_units * self.group
        parts = self.batch * self.heads * self.units * self.unit_parts
        window_sizes = {"FIRST": self.units, "LAST": self.units, "UNTIL": self.key_units, "SINCE": self.key_units}
        scratch_sizes = {
            "QUERY_NORM": self.sequences * self.heads,
            "COMMON": self.sequences * self.kv_heads,
            "CENTER": self.sequences * self.kv_heads * self.dim,
            "NORM": key_units,
            "NORM_PAST": key_units,
            "NORM_AHEAD": key_units,
            "PASTS": by_head,
            "MOST_PAST": by_head,
            "AHEADS": by_head,
            "MOST_AHEAD": by_head,
            "REACH_PAST": by_head,
            "REACH_AHEAD": by_head,
            "FROM": parts,
            "TO": parts,
            "FOUND_FIRST": parts,
            "FOUND_LAST": parts,
        }
        absent = set(_FUTURE if self.causal else ()) | set(() if self.features.bias == DECAY else _OF_DECAY)
        for name in absent:
            window_sizes.pop(name, None)
            scratch_sizes.pop(name, None)
        window_starts = accumulate(window_sizes.values(), initial=0)
        scratch_starts = list(accumulate((-(-size // 4) * 4 for size in scratch_sizes.values()), initial=0))
        integers = ("FROM", "TO", "FOUND_FIRST", "FOUND_LAST")
        slices = {
            name: Slice("windows", 4 * start, torch.int32)
            for name, start in zip(window_sizes, window_starts, strict=False)
        }
        slices |= {
            name: Slice("scratch", 4 * start, torch.int32 if name in integers else torch.float32)
            for name, start in zip(scratch_sizes, scratch_starts, strict=False)
        }
        return slices, 4 * scratch_starts[-1]

    def _values(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """What all kernels are given alike."""
        features = self.features
        sights = tuple(_SIGHTS[sight] for sight in features.sights)
        sided = not self.causal and sights != (3,) * self.heads
        # Heads from steep to gentle by the paper's rule, where that is not their own order.
        ordered = self.heads & (self.heads - 1) != 0
        return {
            **dict.fromkeys(_SLICES),  # None where there is no slice of that name
            **strides("q", q),
            **strides("k", k),
            **strides("v", v),
            "SEES": _numbers(sights, q.device) if sided else None,
            "ORDER": _numbers(_steepest_first(self.heads), q.device) if ordered else None,
            "stride_slope": self.heads if features.by_row else 0,
            "stride_level": features.level_strides[0],
            "stride_level_head": features.level_strides[1],
            "stride_found": self.units * self.unit_parts,
            "stride_window": self.width,
            "units": self.units,
            "blocks": self.key_blocks,
            "H": self.heads,
            "Hk": self.kv_heads,
            "group": self.group,
            "Tq": self.queries,
            "Tk": self.keys,
            "offset": features.offset,
            "max_distance": features.max_distance,
            "D": self.dim,
            "BD": block_dim(self.dim),
            "BIAS": features.bias,
            "GATES": features.gates,
            "CAUSAL": self.causal,
            "RAGGED": features.ragged,
            "PACKED": self.packed,
            "SIDED": sided,
            "ORDERED": ordered,
            "WINDOWS": self.width > 0,
            "TMA": self.tma,
            "PRECISION": self.precision,
            "COARSE": COARSE[self.precision],
            "BLIND": features.blind,
            "DROPOUT": features.dropout,
            "PART": features.part,
            "NB": self.buckets,
            "PARTS": self.unit_parts,
            "TOGETHER": min(1024, triton.next_power_of_2(max(self.units, self.key_units))),
        }

    def forward_kernels(self, out: Tensor, track: bool) -> list[Kernel]:
        """Windows, if there can be any, and the output; with `track` the windows of the backward pass. Of `out` only
        the layout counts."""
        tiles = self.tiles["forward"]
        attention = self._attention(
            forward.forward_kernel,
            (self.blocks * (ROWS // tiles.rows), self.batch, self.heads),
            tiles,
            {"Q": tiles.rows, "K": tiles.keys, "V": tiles.keys} if self.tma else {},
            **strides("o", out),
            TRACK=track and self.width > 0,
        )
        falls = self._falls()
        if self.width == 0:
            return [*falls, attention]
        sequences = (self.sequences, self.kv_heads, 1)
        blocks = (self.key_blocks, self.batch, self.kv_heads)
        few = {"num_warps": 4}
        scan = {"num_warps": 4 if self.values["TOGETHER"] >= 512 else 1}
        kernels = [
            *falls,
            Kernel(windows.sample_kernel, sequences, self.values, few),
            Kernel(windows.bounds_kernel, blocks, self.values, few, self._shapes({"K": ROWS} if self.tma else {})),
            Kernel(windows.largest_kernel, sequences, self.values, scan),
            attention,
        ]
        if track:
            kernels.append(Kernel(windows.order_kernel, (self.sequences, self.heads, 1), self.values, scan))
        return kernels

    def backward_kernels(
        self, grad: Tensor, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, want_bias: bool, has_dlse: bool = False
    ) -> list[Kernel]:
        """All gradients; those of slopes and table as partial sums. Of the tensors only their layouts count."""
        tma = self.tma and can_describe(grad)
        by_query, by_key = self.tiles["queries"], self.tiles["keys"]
        return [
            *self._falls(),
            self._attention(
                backward.query_kernel,
                (self.blocks * (ROWS // by_query.rows), self.batch, self.heads),
                by_query,
                {"Q": by_query.rows, "K": by_query.keys, "V": by_query.keys, "DO": by_query.rows} if tma else {},
                **strides("do", grad),
                **strides("o", out),
                **strides("dq", dq),
                DBIAS=want_bias,
                HAS_DLSE=has_dlse,
                GROUP=by_key.rows,
            ),
            self._attention(
                backward.key_kernel,
                (self.key_blocks * (ROWS // by_key.keys), self.batch, self.kv_heads),
                by_key,
                {"Q": by_key.rows, "K": by_key.keys, "V": by_key.keys, "DO": by_key.rows} if tma else {},
                **strides("do", grad),
                **strides("dk", dk),
                **strides("dv", dv),
                DBIAS=want_bias and self.features.gates,
                ORDERED=self.values["ORDERED"] and self.group == 1,
            ),
        ]

    def _falls(self) -> list[Kernel]:
        if self.features.bias != DECAY:
            return []
        grid = (self.key_blocks, self.batch, self.heads)
        return [Kernel(windows.falls_kernel, grid, self.values, {"num_warps": ROWS // 32})]

    def _attention(
        self, function: Any, grid: tuple[int, int, int], tiles: Tiles, rows: Mapping[str, int], **values: Any
    ) -> Kernel:
        """rows: of the tiles of tensors that are read by tile copies, if any."""
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        if tiles.registers is not None:
            options["maxnreg"] = tiles.registers
        own = {"BM": tiles.rows, "BN": tiles.keys, "STAGES": tiles.stages, "TMA": bool(rows)}
        return Kernel(function, grid, self.values | own | values, options, self._shapes(rows))

    def _shapes(self, rows: Mapping[str, int]) -> dict[str, list[int]]:
        return {name: [1, 1, count, self.values["BD"]] for name, count in rows.items()}

    @property
    def partial_shape(self) -> tuple[int, int, int]:
        """Of what each program of the backward pass finds of the gradient of slopes."""
        return self.batch, self.heads, self.blocks * (ROWS // self.tiles["queries"].rows)

    def visited_parts(self, scratch: Tensor) -> tuple[Tensor, Tensor | None]:
        """The first and one-past-last key unit that a forward pass visited, from its scratch memory, for every part
        of a unit of queries: int32 [B, H, units, parts] each. Causal attention stops at the diagonal: None."""
        shape = (self.batch, self.heads, self.units, self.unit_parts)

        def read(name: str) -> Tensor:
            return scratch[self.slices[name].offset :].view(torch.int32)[: math.prod(shape)].view(shape)

        return read("FROM"), None if self.causal else read("TO")

    def visited(self, scratch: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same for every unit of queries: int32 [B, H, units] each."""
        # Parts of a unit beyond the last query were not written.
        part = torch.arange(self.units * self.unit_parts, device=scratch.device).view(-1, self.unit_parts)
        written = part * (UNIT // self.unit_parts) < self.queries
        if self.packed:  # nor were those of short documents
            assert self.unit_parts == 1
            written = torch.ones_like(written)
        first, last = self.visited_parts(scratch)
        return first.where(written, 2**30).amin(-1), None if last is None else last.where(written, 0).amax(-1)


def config_for(features: Features, q: Tensor, k: Tensor, v: Tensor) -> Config:
    layout = layout_of(q, k, v)
    key = ("config", features, layout)
    return CACHE.get(key) or CACHE.put(key, Config(features, layout, q, k, v))


class DecodingOptions(NamedTuple):
    """How a decoding step is computed, besides what shapes and layouts say."""

    ragged: bool
    splits: int  # of the keys
    precision: str
    chunk: int  # norms that are read at once


def decoding_kernels(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, norms: Tensor | None, bias: KernelBias, options: DecodingOptions
) -> list[Kernel]:
    """For a few causal queries a row: each split of the keys, and joining them. Of tensors only the layouts count."""
    batch, heads, queries, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    wide = q.element_size() == 4
    values = {
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        **strides("o", out),
        "stride_nb": 0 if norms is None else norms.stride(0),
        "stride_nh": 0 if norms is None else norms.stride(1),
        "stride_slope": heads if bias.by_row else 0,
        "H": heads,
        "group": group,
        "Tq": queries,
        "max_distance": bias.max_distance,
        "D": dim,
        "BD": block_dim(dim),
        "BM": max(16, triton.next_power_of_2(group * queries)),
        "BN": 32 if wide else 64,
        "BIAS": bias.kind,
        "GATES": bias.gate_first is not None,
        "WINDOWS": norms is not None,
        "RAGGED": options.ragged,
        "SPLITS": options.splits,
        "PRECISION": options.precision,
        "STAGES": 1 if wide else 3,
        "CHUNK": options.chunk,
        "ALONE": group * queries == 1,
    }
    warps = {"num_warps": 4}
    return [
        Kernel(decode.split_kernel, (options.splits, kv_heads, batch), values, warps),
        Kernel(decode.join_kernel, (queries, heads, batch), values, warps),
    ]


def append_kernels(tensors: Mapping[str, Tensor], ragged: bool) -> list[Kernel]:
    """New keys and values into a cache, and queries that are turned as the keys are, where there are any. Of tensors
    only the layouts count. ragged: where is told by `SEQ`."""
    k, q = tensors["K"], tensors.get("Q")
    batch, kv_heads, tokens, dim = k.shape
    rows = min(BLOCK, triton.next_power_of_2(tokens))
    values = {
        **strides("k", k),
        **strides("v", tensors["V"]),
        **strides("c", tensors["KEYS"]),
        **strides("q", tensors.get("Q", k)),
        **strides("o", tensors.get("OUT", k)),
        "stride_nb": tensors["NORMS"].stride(0),
        "stride_nh": tensors["NORMS"].stride(1),
        "Hkv": kv_heads,
        "D": dim,
        "BD": block_dim(dim),
        "BN": rows,
        "HALF": dim // 2,
        "BH": triton.next_power_of_2(max(1, dim // 2)),
        "RAGGED": ragged,
        "TURNED": q is not None,
    }
    blocks = (tokens + BLOCK - 2) // BLOCK + 1  # that so many tokens can fall into, wherever they begin
    warps = 1 if rows * dim <= 512 else 4 if dim <= 64 else 8
    heads = kv_heads + (0 if q is None else q.shape[1])
    return [Kernel(append.append_kernel, (blocks, heads, batch), values, {"num_warps": warps})]


def rotation_kernels(q: Tensor, k: Tensor, out_q: Tensor, out_k: Tensor) -> list[Kernel]:
    """Rotary embeddings of queries and keys. Of tensors only the layouts count."""
    batch, heads, tokens, dim = q.shape
    half = dim // 2
    columns = triton.next_power_of_2(half)
    rows = min(triton.next_power_of_2(tokens), max(1, 2048 // columns))
    values = {
        **strides("q", q),
        **strides("k", k),
        **strides("oq", out_q),
        **strides("ok", out_k),
        "H": heads,
        "HALF": half,
        "BH": columns,
        "BM": rows,
    }
    grid = (-(-tokens // rows), heads + k.shape[1], batch)
    return [Kernel(rotate.rotate_kernel, grid, values, {"num_warps": 1 if rows * columns <= 256 else 4})]


def block_dim(dim: int) -> int:
    """Columns of a tile that holds so many: Triton multiplies powers of two, from 16 on."""
    return max(16, triton.next_power_of_2(dim))


@cache
def _numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept for good, unlike configurations: a captured CUDA graph goes on reading them."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int32, device=device)


def _steepest_first(heads: int) -> tuple[int, ...]:
    return tuple(alibi_slopes(heads, "cpu").argsort(descending=True).tolist())


def can_describe(tensor: Tensor) -> bool:
    """Whether the hardware's tile copies can read it: rows and starts on 16 bytes."""
    size = tensor.element_size()
    b, h, t, d = tensor.stride()
    return (
        d == 1
        and (b * size | h * size | t * size | tensor.data_ptr()) % 16 == 0
        and min(b, h, t) > 0
        and tensor.numel() > 0
    )
