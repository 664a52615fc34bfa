"""Launching without Triton's launcher, against a driver made of Python: what each kernel finds in its parameters.

There is no GPU here, so the driver's functions are stand-ins that read the memory they are pointed at.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SIZES = {"*": 8, "i32": 4, "i64": 8, "fp32": 4}


class FakeDriver:
    """Answers like libcuda, and keeps what it was told."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []
        self.replaced: list[int] = []
        self.parameters: dict[int, list[int]] = {}  # of each function: bytes
        self.failures: list[int] = []
        self.contexts = 0

    def cuLaunchKernelEx(self, config: int, function: int, pointers: int, extra: None) -> int:  # noqa: N802
        if self.failures:
            return self.failures.pop(0)
        from trainshort.ops.triton.driver import _Config

        about = _Config.from_address(config)
        sizes = self.parameters[function]
        addresses = (ctypes.c_void_p * len(sizes)).from_address(pointers)
        values = [ctypes.string_at(a, size) for a, size in zip(addresses, sizes, strict=True)]
        self.launched.append(
            {"function": function, "grid": tuple(about.grid), "block": tuple(about.block), "shared": about.shared,
             "stream": about.stream, "values": values, "addresses": list(addresses)}
        )  # fmt: skip
        return 0

    def cuTensorMapEncodeTiled(self, at: int, kind: int, rank: int, address: int, *rest: Any) -> int:  # noqa: N802
        shape, strides, box, _steps, interleave, swizzle, _promotion, fill = rest
        assert at % 64 == 0
        assert (rank, interleave, fill) == (4, 0, 0)
        content = struct.pack("=QIII", address, kind, swizzle, box[1]) + struct.pack("=4Q3Q", *shape, *strides)
        ctypes.memmove(at, content, len(content))
        return 0

    def cuTensorMapReplaceAddress(self, at: int, address: int) -> int:  # noqa: N802
        self.replaced.append(address)
        ctypes.memmove(at, struct.pack("=Q", address), 8)
        return 0

    def cuFuncGetParamInfo(self, function: int, index: int, offset: Any, size: Any) -> int:  # noqa: N802
        if index >= len(self.parameters[function]):
            return 1
        size._obj.value = self.parameters[function][index]
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"an unhappy device"
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.contexts += 1
        return 0


class FakeKernel:
    """Stands in for a jitted kernel: returns what Triton would after compiling it."""

    def __init__(self, driver: FakeDriver, function: int, types: dict[str, str], **metadata: Any) -> None:
        self.calls: list[Any] = []
        about = {"num_warps": 4, "shared": 64, "num_ctas": 1, "launch_pdl": False, "tensordesc_meta": []} | metadata
        self.handle = SimpleNamespace(
            src=SimpleNamespace(signature=types), metadata=SimpleNamespace(**about), function=function
        )
        sizes: list[int] = []
        for kind in types.values():
            if kind.startswith("tensordesc"):
                sizes += [128, *[4] * 4, *[8] * 4]
            elif kind != "constexpr":
                sizes.append(SIZES["*" if kind.startswith("*") else kind])
        driver.parameters[function] = [*sizes, 8, 8]

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.calls.append((grid, arguments, constants))
            return self.handle

        return launch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    from trainshort.ops.triton import driver as module
    from trainshort.ops.triton import program

    fake = FakeDriver()
    fake.stream = 7
    active = SimpleNamespace(get_current_stream=lambda device: fake.stream)
    monkeypatch.setattr(module, "cuda", lambda: fake)
    monkeypatch.setattr(module.triton, "runtime", SimpleNamespace(driver=SimpleNamespace(active=active)))
    monkeypatch.setattr(program, "interpreted", lambda: False)
    monkeypatch.delenv("TRAINSHORT_LAUNCH", raising=False)
    return fake


def a_program(driver: FakeDriver, **metadata: Any) -> tuple[Any, FakeKernel, FakeKernel]:
    """Two kernels: one of q in tiles, one of parts of a buffer, with a number in common."""
    from trainshort.ops.triton.driver import Launch, Tile
    from trainshort.ops.triton.program import Part, Program

    meta = [{"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}]
    one = FakeKernel(
        driver, 11,
        {"Q": "tensordesc<bf16[1, 1, 64, 64]>", "OUT": "*bf16", "scale": "fp32", "H": "i32", "one": "constexpr",
         "D": "constexpr"}, tensordesc_meta=meta, **metadata,
    )  # fmt: skip
    other = FakeKernel(
        driver,
        22,
        {"FIRST": "*i32", "UNTIL": "*i32", "start": "i32", "scale": "fp32", "big": "i64", "D": "constexpr"},
    )
    launches = [
        Launch(one, (2, 3, 4), (Tile("q", 64), "out", "scale", 16, 1), {"D": 64}),
        Launch(other, (5, 1, 1), ("first", "until", "start", "scale", 2**40), {"D": 64}),
    ]
    parts = {"first": Part("windows", 0, torch.int32), "until": Part("windows", 16, torch.int32)}
    return Program(("q", "out", "windows"), ("start", "scale"), parts, launches, 64), one, other


def tensors() -> tuple[torch.Tensor, ...]:
    q = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
    return q, torch.zeros_like(q), torch.zeros(8, dtype=torch.int32)


def test_the_first_run_is_triton_s_and_the_next_are_not(driver: FakeDriver) -> None:
    program, one, other = a_program(driver)
    program.run(tensors(), (5, 0.5))
    assert (len(one.calls), len(other.calls), driver.launched) == (1, 1, [])
    assert program.why_not_direct == ""
    program.run(tensors(), (5, 0.5))
    assert (len(one.calls), len(other.calls), len(driver.launched)) == (1, 1, 2)


def test_every_parameter_arrives(driver: FakeDriver) -> None:
    program, _, _ = a_program(driver)
    program.run(tensors(), (5, 0.5))
    for start, scale in ((6, 0.25), (-1, 3.5)):
        q, out, windows = tensors()
        driver.launched.clear()
        program.run((q, out, windows), (start, scale))
        first, second = driver.launched
        assert (first["function"], first["grid"], first["block"]) == (11, (2, 3, 4), (128, 1, 1))
        assert (first["shared"], first["stream"]) == (64, 7)
        descriptor, *values = first["values"]
        address, kind, swizzle, rows = struct.unpack_from("=QIII", descriptor)
        assert (address, kind, swizzle, rows) == (q.data_ptr(), 9, 3, 64)
        assert struct.unpack_from("=4Q3Q", descriptor, 20) == (64, 128, 2, 1, 128, 16384, 32768)
        assert first["addresses"][0] % 64 == 0
        assert [struct.unpack("i", value)[0] for value in values[:4]] == [1, 2, 128, 64]
        assert [struct.unpack("q", value)[0] for value in values[4:8]] == list(q.stride())
        rest = struct.unpack("=QfiQQ", b"".join(values[8:]))
        assert rest == (out.data_ptr(), scale, 16, 0, 0)
        assert struct.unpack("=QQifqQQ", b"".join(second["values"])) == (
            windows.data_ptr(), windows.data_ptr() + 16, start, scale, 2**40, 0, 0,
        )  # fmt: skip


def test_a_descriptor_is_written_anew_only_for_another_tensor(driver: FakeDriver) -> None:
    program, _, _ = a_program(driver)
    same, other = tensors(), tensors()
    for given in (same, same, same, other, other, same):
        program.run(given, (0, 1.0))
    assert driver.replaced == [other[0].data_ptr(), same[0].data_ptr()]


def test_streams_are_followed(driver: FakeDriver) -> None:
    program, _, _ = a_program(driver)
    for stream in (7, 7, 9, 0):
        driver.stream = stream
        program.run(tensors(), (0, 1.0))
    assert [launch["stream"] or 0 for launch in driver.launched] == [7, 7, 9, 9, 0, 0]


def test_a_thread_without_a_context_gets_one(driver: FakeDriver) -> None:
    program, _, _ = a_program(driver)
    program.run(tensors(), (0, 1.0))
    driver.failures = [201]
    program.run(tensors(), (0, 1.0))
    assert (driver.contexts, len(driver.launched)) == (1, 2)


def test_a_launch_that_fails_raises(driver: FakeDriver) -> None:
    program, _, _ = a_program(driver)
    program.run(tensors(), (0, 1.0))
    driver.failures = [719]
    with pytest.raises(RuntimeError, match=r"could not launch a kernel: an unhappy device \(719\)"):
        program.run(tensors(), (0, 1.0))
    program.run(tensors(), (0, 1.0))  # the lock was given back
    assert len(driver.launched) == 2


def test_parameters_that_the_driver_sees_otherwise_stay_with_triton(driver: FakeDriver) -> None:
    program, one, _ = a_program(driver)
    driver.parameters[11].append(4)
    for _ in range(3):
        program.run(tensors(), (0, 1.0))
    assert "were expected" in program.why_not_direct
    assert (len(one.calls), driver.launched) == (3, [])


@pytest.mark.parametrize("metadata", [{"launch_pdl": True}, {"num_ctas": 2}, {"global_scratch_size": 128}], ids=str)
def test_kernels_of_another_kind_stay_with_triton(driver: FakeDriver, metadata: dict[str, Any]) -> None:
    program, one, _ = a_program(driver, **metadata)
    program.run(tensors(), (0, 1.0))
    program.run(tensors(), (0, 1.0))
    assert next(iter(metadata)) in program.why_not_direct
    assert (len(one.calls), driver.launched) == (2, [])


def test_the_environment_can_ask_for_triton_s_launcher(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHORT_LAUNCH", "triton")
    program, one, _ = a_program(driver)
    program.run(tensors(), (0, 1.0))
    program.run(tensors(), (0, 1.0))
    assert (len(one.calls), driver.launched) == (2, [])


def test_numbers_of_two_types_stay_with_triton(driver: FakeDriver) -> None:
    program, _, other = a_program(driver)
    other.handle.src.signature["scale"] = "i64"
    program.run(tensors(), (0, 1.0))
    assert "scale is fp32 to one kernel, i64 to another" in program.why_not_direct
