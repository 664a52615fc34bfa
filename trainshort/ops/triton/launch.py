"""Running kernels: their arguments bound by name, and what the passes allocate, launch and return.

Nothing here looks inside a tensor or waits for the GPU: once a call of its kind has compiled the kernels, every call
can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trainshort.ops.bias import BUCKET, DECAY, LINEAR, KernelBias
from trainshort.ops.problem import Problem
from trainshort.ops.triton.cache import CACHE
from trainshort.ops.triton.call import (
    Call,
    Rotation,
    Saved,
    Stored,
    Values,
    describe,
    kernel_bias,
    may_skip,
    numbers_of,
    sequences_of,
)
from trainshort.ops.triton.config import (
    Config,
    DecodingOptions,
    append_kernels,
    config_for,
    decoding_kernels,
    rotation_kernels,
)
from trainshort.ops.triton.driver import DirectLaunch, Kernel, Slice, UnsupportedError
from trainshort.ops.triton.shapes import UNIT, allows_tf32, gradient_of, layout_of, rows_contiguous
from trainshort.ops.windows import visible_blocks

PROGRAMS = 512  # of decoding: they keep a large GPU busy
MOST_SPLITS = 64  # of the keys, in decoding


class Launch:
    """Kernels that run one after another on the same values.

    The first run goes through Triton, which compiles; those after it straight to the driver, where that is possible.
    """

    def __init__(self, kernels: Sequence[Kernel], slices: Mapping[str, Slice]) -> None:
        self.kernels, self.slices = tuple(kernels), slices
        self.direct: DirectLaunch | None = None
        self.why_not_direct = ""

    def run(self, values: Mapping[str, Any]) -> None:
        """values: tensors and numbers that change from run to run, by the names of the kernels' parameters."""
        if self.direct is not None:
            self.direct.run(values)
        else:
            self._run_through_triton(values)

    def _run_through_triton(self, values: Mapping[str, Any]) -> None:
        given = dict(values)
        for name, part in self.slices.items():
            given[name] = values[part.tensor].view(-1).view(torch.uint8)[part.offset :].view(part.dtype)
        compiled = [kernel.function[kernel.grid](**bind(kernel, given), **kernel.options) for kernel in self.kernels]
        if not self.why_not_direct:
            try:
                self.direct = DirectLaunch(self.kernels, self.slices, compiled, values)
            except UnsupportedError as reason:
                self.why_not_direct = str(reason)


def bind(kernel: Kernel, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a kernel, by the names of its parameters. None stands for a pointer that it does not read."""
    given = {**kernel.values, **values}
    missing = [name for name in kernel.function.arg_names if name not in given]
    if missing:
        raise TypeError(f"{kernel.function.fn.__name__} is not given {', '.join(missing)}")
    arguments = {name: given[name] for name in kernel.function.arg_names}
    for name, shape in kernel.tiles.items():
        tensor = arguments[name]
        arguments[name] = TensorDescriptor(tensor, tensor.shape, tensor.stride(), list(shape))
    return arguments


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, config: Config | None = None, track: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Output like q, log-sum-exp [B, H, Tq] in units of log2, and the windows of the backward pass.

    config: if it is known already. track: whether there will be a backward pass; if not, windows are left unwritten.
    """
    if config is None:
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        config = config_for(call.features, q, k, v)
    return forward_with_scratch(call, config, q, k, v, track)[:3]


def forward_with_scratch(
    call: Call, config: Config, q: Tensor, k: Tensor, v: Tensor, track: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same, and the scratch memory in which the kernels looked for windows; None if they did not."""
    device = q.device
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=device)
    windows = torch.empty((config.batch, config.heads, config.width), dtype=torch.int32, device=device)
    if q.numel() == 0 or config.keys == 0:
        return out.zero_(), lse.fill_(math.inf), windows.zero_(), None
    key = ("forward", config, track)
    launch = CACHE.get(key) or CACHE.put(key, Launch(config.forward_kernels(out, track), config.slices))
    scratch = torch.empty(config.scratch_bytes, dtype=torch.uint8, device=device) if config.width else None
    launch.run(
        {
            "Q": q,
            "K": k,
            "V": v,
            "OUT": out,
            "LSE": lse,
            "windows": windows,
            "scratch": scratch,
            **_falls(config),
            **call.values,
        }
    )
    return out, lse, windows, scratch


def _falls(config: Config) -> dict[str, Tensor | None]:
    """Room for what `falls_kernel` writes, and a unit behind it: tiles are read whole."""
    names = ("FALLS", "RESTS", "FALLS_AHEAD")
    if config.features.bias != DECAY:
        return dict.fromkeys(names)
    size, device = config.batch * config.heads * config.keys + UNIT, config.features.device
    absent = "FALLS_AHEAD" if config.causal else "RESTS"
    return {name: None if name == absent else torch.empty(size, dtype=torch.float32, device=device) for name in names}


def forward_with_visited(
    call: Call, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same as `forward`, and the first and one-past-last key of the window of each query, in sight or not:
    int32 [B, H, 2, Tq]."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    config = config_for(call.features, q, k, v)
    out, lse, windows, scratch = forward_with_scratch(call, config, q, k, v, track=True)
    visited = windows.new_empty((config.batch, config.heads, 2, config.queries))
    visited[:, :, 0], visited[:, :, 1] = 0, config.keys
    if scratch is not None:
        part, offset = _parts_of_queries(call, config, cu_seqlens)
        for side, units in enumerate(config.visited_parts(scratch)):
            if units is not None:
                visited[:, :, side] = units.flatten(2)[:, :, part] * UNIT + offset
    return out, lse, windows, visited


def _parts_of_queries(call: Call, config: Config, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | int]:
    """Which part of which unit each query is in, [Tq], and the first key of its sequence."""
    query = torch.arange(config.queries, device=config.features.device)
    rows = UNIT // config.unit_parts
    if cu_seqlens is not None:
        first_unit = call.values["UNIT0"]
        assert isinstance(first_unit, Tensor)
        borders = cu_seqlens.to(torch.int64)
        document = torch.searchsorted(borders, query, right=True) - 1
        return first_unit[document] * config.unit_parts + (query - borders[document]) // rows, borders[document]
    sequences = call.values["SEQ"]
    return query // rows, sequences[:, 2, None, None] if isinstance(sequences, Tensor) else 0


def backward(
    call: Call,
    saved: Saved,
    grad: Tensor,
    want_bias: bool,
    config: Config | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor] | None]:
    """Gradients of q, k, v, and if wanted sums for Bias.gradients, in float64. config: if it may be known already.
    grad_lse: of the natural log-sum-exp, float32 [B, H, Tq], if it has one."""
    q, k, v = rows_contiguous(saved.q), rows_contiguous(saved.k), rows_contiguous(saved.v)
    grad, out = rows_contiguous(grad), rows_contiguous(saved.out)
    lse, windows = _aligned(saved.lse), _aligned(saved.windows)
    if config is None or config.layout != layout_of(q, k, v):  # hooks may have stored tensors elsewhere
        config = config_for(call.features, q, k, v)
    dq, dk, dv = gradient_of(q), gradient_of(k), gradient_of(v)
    empty = q.numel() == 0 or config.keys == 0
    if empty or config.uneven or call.features.tail:  # padding, what lies between documents, the end of a cache
        for gradient in (dq, dk, dv):
            gradient.zero_()
    partials = _partials(config, empty) if want_bias else _NO_PARTIALS
    if not empty:
        has_dlse = grad_lse is not None
        addresses = (grad.data_ptr() % 16, out.data_ptr() % 16)
        key = ("backward", config, grad.stride(), out.stride(), *addresses, want_bias, has_dlse)
        launch = CACHE.get(key)
        if launch is None:
            kernels = config.backward_kernels(grad, out, dq, dk, dv, want_bias, has_dlse)
            slices = {name: part for name, part in config.slices.items() if part.tensor == "windows"}
            launch = CACHE.put(key, Launch(kernels, slices))
        launch.run({
            "Q": q, "K": k, "V": v, "DO": grad, "OUT": out, "LSE": lse, "DELTA": torch.empty_like(lse),
            "DQ": dq, "DK": dk, "DV": dv, "windows": windows, **_falls(config), **_terms(config, lse),
            **partials, **call.values,
            "DLSE": None if grad_lse is None else _aligned(grad_lse),
        })  # fmt: skip
    return dq, dk, dv, _summed(call, config, partials) if want_bias else None


def _terms(config: Config, lse: Tensor) -> dict[str, Tensor | None]:
    """What one kernel of the backward pass leaves for the other, of a decay."""
    of_decay = config.features.bias == DECAY
    return {
        "TERMS": torch.empty_like(lse) if of_decay else None,
        "TERMS_AHEAD": torch.empty_like(lse) if of_decay and not config.causal else None,
    }


_NO_PARTIALS: dict[str, Tensor | None] = dict.fromkeys(
    ("DSLOPES", "DFUTURES", "DTABLE", "ROW_SUMS", "COLUMN_SUMS", "ROW_SUMS_AHEAD", "COLUMN_SUMS_AHEAD")
)


def _partials(config: Config, empty: bool) -> dict[str, Tensor | None]:
    """For what each program of the backward pass finds of the gradients of a bias: zeros, because blocks beyond the
    end of a sequence write nothing. empty: nothing will be written at all."""
    shape, device = config.partial_shape, config.features.device
    if config.features.bias == LINEAR:
        past, future = (torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(2))
        return _NO_PARTIALS | {"DSLOPES": past, "DFUTURES": future}
    if config.features.bias == BUCKET:
        return _NO_PARTIALS | {"DTABLE": torch.zeros((*shape, config.buckets), dtype=torch.float32, device=device)}
    if config.features.gates:
        sizes = {"ROW_SUMS": config.queries, "COLUMN_SUMS": config.keys}
        if not config.causal:
            sizes |= {f"{name}_AHEAD": size for name, size in sizes.items()}
        make = torch.zeros if empty or config.uneven or config.features.tail else torch.empty
        return _NO_PARTIALS | {
            name: make((config.batch, config.heads, size), dtype=torch.float32, device=device)
            for name, size in sizes.items()
        }
    if config.features.bias == DECAY:
        return _NO_PARTIALS | {"DSLOPES": torch.zeros(shape, dtype=torch.float32, device=device)}
    return _NO_PARTIALS


def _summed(call: Call, config: Config, partials: dict[str, Tensor | None]) -> dict[str, Tensor]:
    if config.features.gates:
        return _by_token(call, config, partials)
    past = "rates" if config.features.bias == DECAY else "past"
    names = {"DSLOPES": past, "DFUTURES": "future", "DTABLE": "table"}
    return {names[name]: each.double().sum(2) for name, each in partials.items() if each is not None}


def _by_token(call: Call, config: Config, partials: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The gradient of c: what the rows of queries sum to, at their places among the keys, less what columns do; with
    the opposite sign for later keys."""
    found = {}
    for name, side in (("gate_sums", ""), ("ahead_sums", "_AHEAD")):
        rows, columns = partials[f"ROW_SUMS{side}"], partials[f"COLUMN_SUMS{side}"]
        if rows is not None and columns is not None:
            rows = _at_places(call, config, rows.double())
            found[name] = columns - rows if side else rows - columns
    return found


def _at_places(call: Call, config: Config, rows: Tensor) -> Tensor:
    """Numbers of queries [B, H, Tq], added up at the keys where these stand: [B, H, Tk]."""
    queries, keys, sequences = config.queries, config.keys, call.values["SEQ"]
    start = call.values["start"]
    assert isinstance(start, int)
    if keys == 0:
        return rows[:, :, :0]
    if config.packed or (sequences is None and start == 0 and queries == keys):
        return rows
    if sequences is None and start >= 0 and start + queries <= keys:  # each at a place of its own
        return torch.nn.functional.pad(rows, (start, keys - queries - start))
    index = torch.arange(queries, device=rows.device)
    if isinstance(sequences, Tensor):
        _, _, first, count, begin = sequences.long()[..., None].unbind(1)  # [B, 1] each
        place = first + torch.minimum(begin + index, count - 1).clamp(min=0)
    else:
        place = (start + index).clamp(0, keys - 1)[None]
    row, head, place = torch.broadcast_tensors(
        torch.arange(config.batch, device=rows.device)[:, None, None],
        torch.arange(config.heads, device=rows.device)[:, None],
        place[:, None],
    )
    # Not scatter_add: queries beyond all keys share a place, and the order of atomics would show.
    return rows.new_zeros((config.batch, config.heads, keys)).index_put((row, head, place), rows, accumulate=True)


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, at an address that is a multiple of 16, as the kernels were compiled for."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def splits_for(batch: int, kv_heads: int) -> int:
    """Into how many parts decoding splits the keys of a head."""
    return min(MOST_SPLITS, triton.next_power_of_2(max(1, -(-PROGRAMS // (batch * kv_heads)))))


class Decoding(NamedTuple):
    """A few causal queries a row after cached keys. There is no `Config`: every step has one key more."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: KernelBias
    norms: Tensor | None  # float32 [B, Hkv, any]: None where no keys are skipped
    sequences: Tensor | None  # as sequences_of makes them; None: the next two numbers say it for all rows
    keys: int
    start: int
    scale: float
    tolerance: float


def decode(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output like q, for a few causal queries a row, forward only, without a pass over the keys; and the log-sum-exp
    of each split of the keys in units of log2, [B, H, Tq, splits]."""
    q, k, v = (rows_contiguous(t.detach()) for t in (problem.q, problem.k, problem.v))
    start, sequences, norms = problem.start, None, None
    if q.numel() == 0 or k.shape[2] == 0:
        return torch.zeros_like(q), torch.full((*q.shape[:3], 1), -math.inf, device=q.device)
    if problem.key_padding_mask is not None or isinstance(start, Tensor):
        sequences, start = sequences_of(problem, start), 0
    assert isinstance(start, int)
    if problem.key_norms is not None and may_skip(problem):
        norms = problem.key_norms.detach().float()
        norms = norms[..., None] if norms.dim() == 2 else rows_contiguous(norms)
    numbers = numbers_of(problem, start)
    return run_decoding(
        Decoding(
            q,
            k,
            v,
            kernel_bias(problem),
            norms,
            sequences,
            k.shape[2],
            int(numbers["start"]),
            numbers["scale"],
            problem.tolerance,
        )
    )


def run_decoding(step: Decoding) -> tuple[Tensor, Tensor]:
    """Output like q, and the log-sum-exps of the splits."""
    q, k, v, bias, norms = step.q, step.k, step.v, step.bias, step.norms
    batch, heads, queries, dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty_like(q)
    norm_count = 0 if norms is None else norms.shape[2]
    norm_layout = None if norms is None else (norms.stride(), norms.data_ptr() % 16)
    splits = splits_for(batch, kv_heads)
    precision = "tf32" if q.element_size() == 4 and allows_tf32() else "ieee"
    chunk = min(1024, triton.next_power_of_2(max(norm_count, 1)))
    options = DecodingOptions(step.sequences is not None, splits, precision, chunk)
    # Not the number of keys, which is another one at every step.
    layout = (q.shape, kv_heads, q.stride(), k.stride(), v.stride(), *(t.data_ptr() % 16 for t in (q, k, v)))
    about_bias = (bias.kind, bias.by_row, bias.max_distance, bias.gate_first is not None)
    key = ("decode", layout, norm_layout, about_bias, options, q.dtype, q.device)
    launch = CACHE.get(key)
    if launch is None:
        kernels = decoding_kernels(q, k, v, out, norms, bias, options)
        launch = CACHE.put(key, Launch(kernels, {}))
    sums = torch.empty((batch, heads, queries, splits), dtype=torch.float32, device=q.device)
    values: Values = {
        "Q": q,
        "K": k,
        "V": v,
        "OUT": out,
        "PARTIAL": torch.empty((batch, heads, queries, splits, dim), dtype=torch.float32, device=q.device),
        "SUMS": sums,
        "SLOPES": bias.slopes,
        "LINE": bias.line,
        "LEVELS": bias.levels,
        "GATE_FIRST": bias.gate_first,
        "stride_level": bias.level_strides[0],
        "stride_level_head": bias.level_strides[1],
        "NORMS": norms,
        "SEQ": step.sequences,
        "norm_count": norm_count,
        "Tk": step.keys,
        "start": step.start,
        "scale": step.scale,
        "budget": 0.0 if norms is None else -math.log(step.tolerance),
    }
    launch.run(values)
    return out, sums


def append(
    k: Tensor, v: Tensor, stored: Stored, start: int, sequences: Tensor | None,
    q: Tensor | None = None, rotation: Rotation | None = None,
) -> Tensor | None:  # fmt: skip
    """Write new keys and values into a cache from `start` on, or where the next query of `sequences` stands, and
    raise the norms of their blocks. rotation, with sequences: of keys and of q, which is returned."""
    if k.numel() == 0:
        return q
    tensors = {"K": rows_contiguous(k.detach()), "V": rows_contiguous(v.detach())}
    tensors |= {"KEYS": stored.keys, "VALUES": stored.values, "NORMS": stored.norms}
    if q is not None:
        q = rows_contiguous(q.detach())
        tensors |= {"Q": q, "OUT": torch.empty_like(q)}
    layout = tuple((t.stride(), t.data_ptr() % 16, t.dtype) for t in tensors.values())
    key = ("append", k.shape, None if q is None else q.shape[1], layout, sequences is not None, k.device)
    launch = CACHE.get(key) or CACHE.put(key, Launch(append_kernels(tensors, ragged=sequences is not None), {}))
    turning: Values = {"Q": None, "OUT": None, "FREQUENCIES": None, "size": 1.0}
    if rotation is not None:
        turning |= rotation.values()
    launch.run({**turning, **tensors, "SEQ": sequences, "start": start, "tokens": k.shape[2]})
    return tensors.get("OUT")


def rotate(q: Tensor, k: Tensor, positions: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, heads, T, D] turned by positions int64 [B or 1, T]."""
    q, k, positions = rows_contiguous(q.detach()), rows_contiguous(k.detach()), positions.contiguous()
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    if q.numel() == 0:
        return out_q, out_k
    layout = tuple((t.stride(), t.data_ptr() % 16) for t in (q, k, positions))
    key = ("rotate", q.shape, k.shape, layout, q.dtype, positions.dtype, q.device)
    launch = CACHE.get(key) or CACHE.put(key, Launch(rotation_kernels(q, k, out_q, out_k), {}))
    launch.run({
        "Q": q, "K": k, "OUT_Q": out_q, "OUT_K": out_k, "POSITIONS": positions, **rotation.values(),
        "T": q.shape[2], "stride_position": 0 if positions.shape[0] == 1 else q.shape[2],
    })  # fmt: skip
    return out_q, out_k


def certified_blocks(problem: Problem, block: int) -> Tensor | None:
    """The keys visited, in blocks: int32 [B, H, ceil(Tq / block), 2]; None where none are looked for."""
    if problem.cu_seqlens is not None or block % UNIT or 0 in problem.q.shape:
        return None
    call = describe(problem)
    q, k = rows_contiguous(problem.q), rows_contiguous(problem.k)
    config = config_for(call.features, q, k, k)
    scratch = forward_with_scratch(call, config, q, k, k, track=True)[3] if config.width else None
    if scratch is None:
        return None
    first, last = config.visited(scratch)
    low, high = visible_blocks(problem, block)  # [B, H, blocks]
    units = -(-config.queries // UNIT)
    sequences = call.values["SEQ"]
    offset = sequences[:, None, None, 2] if isinstance(sequences, Tensor) else 0

    def by_block(values: Tensor, fill: int) -> Tensor:
        missing = -units % (block // UNIT)
        padded = torch.nn.functional.pad(values[..., :units].long(), (0, missing), value=fill)
        return padded.unflatten(-1, (-1, block // UNIT))

    empty = high <= low
    low = torch.maximum(low, (offset + by_block(first, 2**40).amin(-1) * UNIT) // block)
    if last is not None:
        high = torch.minimum(high, -(-(offset + by_block(last, 0).amax(-1) * UNIT) // block))
    return torch.stack((low, high), dim=-1).masked_fill(empty[..., None], 0).to(torch.int32)
