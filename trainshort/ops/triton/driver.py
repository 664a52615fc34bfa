"""Compiled kernels launched straight through the CUDA driver.

Triton's own way in looks at every argument of every launch: some 40 µs a kernel, and a short sequence takes seven.
But for a few addresses and numbers, the arguments of the kernels of a launch are the same each time. So they lie in
one table in memory: a run writes addresses and numbers into it, and passes each kernel a list of pointers into the
table that was made beforehand.

What a kernel's parameters are is Triton's own affair, so the layout assumed here is compared with what the driver
says of the compiled function, and where they differ nothing is launched this way: `UnsupportedError`.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

DESCRIPTOR_BYTES = 128
INVALID_CONTEXT = 201
_FORMATS = {"i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q", "fp32": "f4x", "f32": "f4x", "fp64": "d"}
_ELEMENTS = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_PROMOTE_TO_128_BYTES = 2  # CUtensorMapL2promotion


class UnsupportedError(Exception):
    """Why kernels cannot be launched straight through the driver."""


class Kernel(NamedTuple):
    """One kernel of a launch, with those of its values that stay the same from run to run."""

    function: Any  # decorated with @triton.jit
    grid: tuple[int, int, int]
    values: Mapping[str, Any]  # by the names of parameters; those of other kernels may be among them
    options: Mapping[str, Any]  # num_warps and the like
    tiles: Mapping[str, Sequence[int]] = {}  # tensors read by the hardware's tile copies, and the shape of a tile


class Slice(NamedTuple):
    """A stretch of a tensor, from `offset` bytes on, that kernels know by a name of its own."""

    tensor: str
    offset: int
    dtype: torch.dtype


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


@lru_cache(maxsize=1)
def cuda() -> Any:
    """The CUDA driver's functions."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in {
            "cuLaunchKernelEx": [ctypes.c_void_p] * 4,
            "cuTensorMapReplaceAddress": [ctypes.c_void_p] * 2,
            "cuFuncGetParamInfo": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p],
            "cuTensorMapEncodeTiled": [
                ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4,
            ],
            "cuGetErrorString": [ctypes.c_int, ctypes.c_void_p],
            "cuDevicePrimaryCtxRetain": [ctypes.c_void_p, ctypes.c_int],
            "cuCtxSetCurrent": [ctypes.c_void_p],
        }.items():  # fmt: skip
            getattr(library, name).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise UnsupportedError(f"the CUDA driver lacks something: {error}") from None
    return library


def check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        cuda().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA could not {what}: {(text.value or b'unknown error').decode()} ({status})")


class _Descriptor:
    """The description of a tile copy at `place` in the table, for the tensor that lies at `address`."""

    def __init__(self, place: int, tensor: int) -> None:
        self.place, self.tensor, self.address = place, tensor, 0


class _Layout:
    """What lies where in the table: first addresses and numbers that change, eight bytes each, then what stays."""

    def __init__(self, kernels: Sequence[Kernel], slices: Mapping[str, Slice], values: Mapping[str, Any]) -> None:
        """values: those of one run."""
        used = {name for kernel in kernels for name in kernel.function.arg_names}
        self.values = values
        self.slices = {name: part for name, part in slices.items() if name in used}
        used |= {part.tensor for part in self.slices.values()}
        self.tensors = [name for name, value in values.items() if name in used and isinstance(value, Tensor)]
        self.numbers = [name for name, value in values.items() if name in used and isinstance(value, (int, float))]
        changing = (*self.tensors, *self.slices, *self.numbers)
        self.slots = {name: 8 * index for index, name in enumerate(changing)}
        self.size = 8 * len(changing)
        self.types: dict[str, str] = {}  # of numbers that change
        self.constants: dict[tuple[str, float], int] = {}
        self.descriptors: dict[tuple[Any, ...], tuple[_Descriptor, dict[str, Any]]] = {}

    def reserve(self, size: int) -> int:
        place = -(-self.size // size) * size
        self.size = place + size
        return place

    def constant(self, kind: str, value: float) -> tuple[int, int]:
        if (kind, value) not in self.constants:
            self.constants[kind, value] = self.reserve(8)
        return self.constants[kind, value], _bytes(kind)

    def number(self, name: str, kind: str) -> tuple[int, int]:
        if self.types.setdefault(name, kind) != kind:
            raise UnsupportedError(f"{name} is {self.types[name]} to one kernel, {kind} to another")
        return self.slots[name], _bytes(kind)

    def tile(self, name: str, meta: dict[str, Any]) -> list[tuple[int, int]]:
        """A descriptor, and the shape and strides that Triton passes beside it."""
        key = (name, *(repr(value) for value in meta.values()))
        if key not in self.descriptors:
            descriptor = _Descriptor(self.reserve(DESCRIPTOR_BYTES), self.tensors.index(name))
            self.descriptors[key] = (descriptor, meta)
        place = self.descriptors[key][0].place
        shape = [self.constant("i32", size) for size in self.values[name].shape]
        strides = [self.constant("i64", stride) for stride in self.values[name].stride()]
        return [(place, DESCRIPTOR_BYTES), *shape, *strides]

    def parameters(self, kernel: Kernel, handle: Any) -> list[tuple[int, int]]:
        """The place and the bytes of each parameter of a compiled kernel, in the order of its signature."""
        found: list[tuple[int, int]] = []
        metas = iter(getattr(handle.metadata, "tensordesc_meta", None) or ())
        for name, kind in handle.src.signature.items():
            changes = name in self.slots
            if kind == "constexpr":
                if changes:
                    raise UnsupportedError(f"{name} changes from run to run, and was compiled in")
            elif name in kernel.tiles:
                found += self.tile(name, _as_dict(next(metas, None)))
            elif kind.startswith("*"):
                address = (self.slots[name], 8) if changes else self.constant("u64", kernel.values[name].data_ptr())
                found.append(address)
            elif kind not in _FORMATS:
                raise UnsupportedError(f"no rule for a number of type {kind}")
            else:
                found.append(self.number(name, kind) if changes else self.constant(kind, kernel.values[name]))
        return [*found, *[self.constant("u64", 0)] * 2]  # scratch memory, which these kernels do not have

    def memory(self) -> tuple[Any, int]:
        """The table itself with what stays written, and its address, a multiple of a descriptor's size."""
        raw = (ctypes.c_char * (self.size + DESCRIPTOR_BYTES))()
        skip = -ctypes.addressof(raw) % DESCRIPTOR_BYTES
        table = (ctypes.c_char * self.size).from_buffer(raw, skip)
        for (kind, value), place in self.constants.items():
            struct.pack_into("=" + _FORMATS[kind], table, place, value)
        base = ctypes.addressof(table)
        for descriptor, meta in self.descriptors.values():
            descriptor.place += base
            _encode(descriptor, meta, self.values[self.tensors[descriptor.tensor]])
        return table, base

    def packer(self) -> Any:
        """Writes addresses and numbers into the table."""
        formats = (_FORMATS[self.types.get(name, "fp64")] for name in self.numbers)
        return struct.Struct(f"={len(self.tensors) + len(self.slices)}Q" + "".join(formats)).pack_into


class DirectLaunch:
    """Kernels ready to run without Triton. Made from one run of them through Triton: the kernels, what each returned,
    and the values of that run; those of later runs must have the same names, layouts and alignment. Raises
    UnsupportedError where the kernels cannot be launched this way."""

    def __init__(
        self, kernels: Sequence[Kernel], slices: Mapping[str, Slice], compiled: Sequence[Any],
        values: Mapping[str, Any],
    ) -> None:  # fmt: skip
        _require_plain(compiled)
        layout = _Layout(kernels, slices, values)
        parameters = [layout.parameters(*pair) for pair in zip(kernels, compiled, strict=True)]
        for handle, places in zip(compiled, parameters, strict=True):
            _compare(handle, places)
        self.tensors, self.numbers = tuple(layout.tensors), tuple(layout.numbers)
        self.slices = tuple((layout.tensors.index(part.tensor), part.offset) for part in layout.slices.values())
        self.device = values[self.tensors[0]].device.index or 0
        self.current_stream = triton.runtime.driver.active.get_current_stream
        self.lock = threading.Lock()
        self.stream = 0
        self._replace, self._launch = cuda().cuTensorMapReplaceAddress, cuda().cuLaunchKernelEx
        self._pack = layout.packer()
        self.table, base = layout.memory()
        self.descriptors = tuple(descriptor for descriptor, _ in layout.descriptors.values())
        self.configs = []
        self.launches = []
        self.keep = [*compiled, *kernels]  # code, and tensors whose addresses were written once for all runs
        for kernel, handle, places in zip(kernels, compiled, parameters, strict=True):
            pointers = (ctypes.c_void_p * len(places))(*[base + place for place, _ in places])
            config = _Config(kernel.grid, (32 * handle.metadata.num_warps, 1, 1), handle.metadata.shared)
            self.keep.append(pointers)
            self.configs.append(config)
            self.launches.append((ctypes.addressof(config), handle.function, ctypes.addressof(pointers)))

    def run(self, values: Mapping[str, Any]) -> None:
        addresses = [values[name].data_ptr() for name in self.tensors]
        addresses += [addresses[tensor] + offset for tensor, offset in self.slices]
        numbers = [values[name] for name in self.numbers]
        stream = self.current_stream(self.device)
        with self.lock:  # until the last kernel is launched: the driver copies the parameters
            self._pack(self.table, 0, *addresses, *numbers)
            for descriptor in self.descriptors:
                address = addresses[descriptor.tensor]
                if address != descriptor.address:
                    check(self._replace(descriptor.place, address), "describe a tensor")
                    descriptor.address = address
            if stream != self.stream:
                for config in self.configs:
                    config.stream = stream
                self.stream = stream
            for launch in self.launches:
                status = self._launch(*launch, None)
                if status == INVALID_CONTEXT:  # a thread that has not used CUDA yet
                    _enter_context(self.device)
                    status = self._launch(*launch, None)
                if status:
                    check(status, "launch a kernel")


def _require_plain(compiled: Sequence[Any]) -> None:
    """Refuse kernels that cannot be launched here, other devices, and all if the environment says so."""
    if any(handle is None for handle in compiled):
        raise UnsupportedError("kernels that were interpreted, not compiled")
    if os.environ.get("TRAINSHORT_LAUNCH") == "triton":
        raise UnsupportedError("TRAINSHORT_LAUNCH=triton")
    if torch.version.hip is not None:
        raise UnsupportedError("not a CUDA device")
    for handle in compiled:
        about = handle.metadata
        for name, plain in {
            "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0,
            "profile_scratch_size": 0,
        }.items():  # fmt: skip
            if getattr(about, name, plain) != plain:
                raise UnsupportedError(f"a kernel compiled with {name}={getattr(about, name)}")


def _bytes(kind: str) -> int:
    return 4 if kind.endswith("32") else 8


def _as_dict(meta: Any) -> dict[str, Any]:
    if meta is None:
        raise UnsupportedError("a tile copy without a description")
    meta = dict(meta)
    if meta.get("fp4_padded") or meta.get("is_im2col"):
        raise UnsupportedError("a tile copy of an unknown kind")
    return {name: meta[name] for name in ("swizzle", "elem_size", "block_size")}


def _compare(handle: Any, places: Sequence[tuple[int, int]]) -> None:
    """Whether the driver sees the parameters as we do: so many, of these sizes."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    ask = cuda().cuFuncGetParamInfo
    found: list[int] = []
    while not ask(handle.function, len(found), ctypes.byref(offset), ctypes.byref(size)):
        found.append(size.value)
    if found != [size for _, size in places]:
        raise UnsupportedError(f"parameters of {found} bytes where {[size for _, size in places]} were expected")


def _encode(descriptor: _Descriptor, meta: dict[str, Any], tensor: Tensor) -> None:
    size = meta["elem_size"]
    if size != tensor.element_size() or tensor.dtype not in _ELEMENTS:
        raise UnsupportedError(f"a tile copy of {tensor.dtype}")
    shape = (ctypes.c_uint64 * 4)(*reversed(tensor.shape))
    strides = (ctypes.c_uint64 * 3)(*(size * stride for stride in reversed(tensor.stride()[:3])))
    box = (ctypes.c_uint32 * 4)(*reversed(meta["block_size"]))
    steps = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    descriptor.address = tensor.data_ptr()
    check(
        cuda().cuTensorMapEncodeTiled(
            descriptor.place, _ELEMENTS[tensor.dtype], 4, descriptor.address, shape, strides, box, steps,
            0, meta["swizzle"], _PROMOTE_TO_128_BYTES, 0,
        ),
        "describe a tensor",
    )  # fmt: skip


def _enter_context(device: int) -> None:
    context = ctypes.c_void_p()
    check(cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "find a device")
    check(cuda().cuCtxSetCurrent(context), "use a device")
