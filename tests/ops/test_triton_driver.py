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
        self.arg_names = list(types)
        self.fn = SimpleNamespace(__name__=f"kernel_{function}")
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
        def launch(**arguments: Any) -> Any:
            self.calls.append((grid, arguments))
            return self.handle

        return launch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    from trainshort.ops.triton import driver as module

    fake = FakeDriver()
    fake.stream = 7
    active = SimpleNamespace(get_current_stream=lambda device: fake.stream)
    monkeypatch.setattr(module, "cuda", lambda: fake)
    monkeypatch.setattr(module.triton, "runtime", SimpleNamespace(driver=SimpleNamespace(active=active)))
    monkeypatch.delenv("TRAINSHORT_LAUNCH", raising=False)
    return fake


def a_launch(driver: FakeDriver, **metadata: Any) -> tuple[Any, FakeKernel, FakeKernel]:
    """Two kernels: one of Q in tiles, one of slices of a buffer, with a number in common."""
    from trainshort.ops.triton.driver import Kernel, Slice
    from trainshort.ops.triton.launch import Launch

    meta = [{"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}]
    one = FakeKernel(
        driver, 11,
        {"Q": "tensordesc<bf16[1, 1, 64, 64]>", "OUT": "*bf16", "LINE": "constexpr", "ORDER": "*i32",
         "scale": "fp32", "H": "i32", "one": "constexpr", "D": "constexpr"}, tensordesc_meta=meta, **metadata,
    )  # fmt: skip
    other = FakeKernel(
        driver,
        22,
        {"FIRST": "*i32", "UNTIL": "*i32", "start": "i32", "scale": "fp32", "big": "i64", "D": "constexpr"},
    )
    values = {"H": 16, "one": 1, "D": 64, "big": 2**40, "ORDER": ORDER, "UNTIL": None, "of another kernel": 3}
    kernels = [
        Kernel(one, (2, 3, 4), values, {"num_warps": 4}, {"Q": [1, 1, 64, 64]}),
        Kernel(other, (5, 1, 1), values, {}),
    ]
    slices = {"FIRST": Slice("windows", 0, torch.int32), "UNTIL": Slice("windows", 16, torch.int32)}
    return Launch(kernels, slices), one, other


ORDER = torch.arange(3, dtype=torch.int32)


def run_values(start: int = 0, scale: float = 1.0) -> dict[str, Any]:
    q = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
    windows = torch.arange(8, dtype=torch.int32)
    return {"Q": q, "OUT": torch.zeros_like(q), "windows": windows, "LINE": None, "start": start, "scale": scale}


def test_arguments_are_bound_by_name(driver: FakeDriver) -> None:
    launch, one, other = a_launch(driver)
    given = run_values(5, 0.5)
    launch.run(given)
    (grid, arguments), (_, second) = one.calls[0], other.calls[0]
    assert grid == (2, 3, 4)
    described = arguments.pop("Q")
    assert (described.base is given["Q"], described.block_shape) == (True, [1, 1, 64, 64])
    assert arguments.pop("OUT") is given["OUT"]
    assert arguments.pop("ORDER") is ORDER
    assert arguments == {"LINE": None, "scale": 0.5, "H": 16, "one": 1, "D": 64, "num_warps": 4}
    assert (second.pop("FIRST").tolist(), second.pop("UNTIL").tolist()) == ([0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7])
    assert second == {"start": 5, "scale": 0.5, "big": 2**40, "D": 64}


def test_a_parameter_that_is_not_given_is_an_error(driver: FakeDriver) -> None:
    launch, one, _ = a_launch(driver)
    given = run_values()
    del given["LINE"], given["scale"]
    with pytest.raises(TypeError, match="kernel_11 is not given LINE, scale"):
        launch.run(given)
    assert one.calls == []


def test_every_parameter_of_the_kernels_has_a_value() -> None:
    """Of all the kernels there are, by all the features there are: the mapping names each parameter."""
    from trainshort.ops.bias import BucketBias, LinearBias
    from trainshort.ops.decay import DecayBias
    from trainshort.ops.problem import Problem
    from trainshort.ops.triton import call, config, driver, launch

    q = torch.zeros(2, 3, 640, 64, dtype=torch.bfloat16)
    seen = set()
    for causal in (True, False):
        gates = torch.zeros(2, 3, 640)
        decay = DecayBias(gates) if causal else DecayBias(gates, future=gates)
        for bias in (None, LinearBias(torch.ones(3)), BucketBias(torch.zeros(32, 3)), decay):
            problem = Problem(q=q, k=q, v=q, bias=bias, causal=causal, scale=1.0, tolerance=0.01)
            described = call.describe(problem)
            about = config.config_for(described.features, q, q, q)
            forward = about.forward_kernels(q, True)
            backward = about.backward_kernels(q, q, q, q, q, bias is not None)
            run = dict.fromkeys((
                "Q", "K", "V", "OUT", "LSE", "DO", "DLSE", "DELTA", "DQ", "DK", "DV", "DSLOPES", "DFUTURES",
                "DTABLE", "FALLS", "RESTS", "FALLS_AHEAD", "TERMS", "TERMS_AHEAD", "ROW_SUMS", "ROW_SUMS_AHEAD",
                "COLUMN_SUMS", "COLUMN_SUMS_AHEAD",
            ))  # fmt: skip
            for kernel in (*forward, *backward):
                plain = kernel._replace(tiles={})
                slices = dict.fromkeys(about.slices, q)
                arguments = launch.bind(plain, {**run, **slices, **described.values})
                assert list(arguments) == list(kernel.function.arg_names)
                assert isinstance(kernel, driver.Kernel)
                seen.add(kernel.function.fn.__name__)
    assert seen == {
        "falls_kernel", "sample_kernel", "bounds_kernel", "largest_kernel", "forward_kernel", "order_kernel",
        "query_kernel", "key_kernel",
    }  # fmt: skip


def test_the_first_run_is_triton_s_and_the_next_are_not(driver: FakeDriver) -> None:
    launch, one, other = a_launch(driver)
    launch.run(run_values(5, 0.5))
    assert (len(one.calls), len(other.calls), driver.launched) == (1, 1, [])
    assert launch.why_not_direct == ""
    launch.run(run_values(5, 0.5))
    assert (len(one.calls), len(other.calls), len(driver.launched)) == (1, 1, 2)


def test_every_parameter_arrives(driver: FakeDriver) -> None:
    launch, _, _ = a_launch(driver)
    launch.run(run_values(5, 0.5))
    for start, scale in ((6, 0.25), (-1, 3.5)):
        given = run_values(start, scale)
        q, out, windows = given["Q"], given["OUT"], given["windows"]
        driver.launched.clear()
        launch.run(given)
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
        rest = struct.unpack("=QQfiQQ", b"".join(values[8:]))
        assert rest == (out.data_ptr(), ORDER.data_ptr(), scale, 16, 0, 0)
        assert struct.unpack("=QQifqQQ", b"".join(second["values"])) == (
            windows.data_ptr(), windows.data_ptr() + 16, start, scale, 2**40, 0, 0,
        )  # fmt: skip


def test_a_descriptor_is_written_anew_only_for_another_tensor(driver: FakeDriver) -> None:
    launch, _, _ = a_launch(driver)
    same, other = run_values(), run_values()
    for given in (same, same, same, other, other, same):
        launch.run(given)
    assert driver.replaced == [other["Q"].data_ptr(), same["Q"].data_ptr()]


def test_streams_are_followed(driver: FakeDriver) -> None:
    launch, _, _ = a_launch(driver)
    for stream in (7, 7, 9, 0):
        driver.stream = stream
        launch.run(run_values())
    assert [launched["stream"] or 0 for launched in driver.launched] == [7, 7, 9, 9, 0, 0]


def test_a_thread_without_a_context_gets_one(driver: FakeDriver) -> None:
    launch, _, _ = a_launch(driver)
    launch.run(run_values())
    driver.failures = [201]
    launch.run(run_values())
    assert (driver.contexts, len(driver.launched)) == (1, 2)


def test_a_launch_that_fails_raises(driver: FakeDriver) -> None:
    launch, _, _ = a_launch(driver)
    launch.run(run_values())
    driver.failures = [719]
    with pytest.raises(RuntimeError, match=r"could not launch a kernel: an unhappy device \(719\)"):
        launch.run(run_values())
    launch.run(run_values())  # the lock was given back
    assert len(driver.launched) == 2


def test_parameters_that_the_driver_sees_otherwise_stay_with_triton(driver: FakeDriver) -> None:
    launch, one, _ = a_launch(driver)
    driver.parameters[11].append(4)
    for _ in range(3):
        launch.run(run_values())
    assert "were expected" in launch.why_not_direct
    assert (len(one.calls), driver.launched) == (3, [])


@pytest.mark.parametrize("metadata", [{"launch_pdl": True}, {"num_ctas": 2}, {"global_scratch_size": 128}], ids=str)
def test_kernels_of_another_kind_stay_with_triton(driver: FakeDriver, metadata: dict[str, Any]) -> None:
    launch, one, _ = a_launch(driver, **metadata)
    launch.run(run_values())
    launch.run(run_values())
    assert next(iter(metadata)) in launch.why_not_direct
    assert (len(one.calls), driver.launched) == (2, [])


def test_the_environment_can_ask_for_triton_s_launcher(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHORT_LAUNCH", "triton")
    launch, one, _ = a_launch(driver)
    launch.run(run_values())
    launch.run(run_values())
    assert (len(one.calls), driver.launched) == (2, [])


def test_numbers_of_two_types_stay_with_triton(driver: FakeDriver) -> None:
    launch, _, other = a_launch(driver)
    other.handle.src.signature["scale"] = "i64"
    launch.run(run_values())
    assert "scale is fp32 to one kernel, i64 to another" in launch.why_not_direct


def test_a_number_that_changes_and_was_compiled_in_stays_with_triton(driver: FakeDriver) -> None:
    """Triton compiles an int of 1 in, unless it is told not to."""
    launch, _, other = a_launch(driver)
    other.handle.src.signature["start"] = "constexpr"
    launch.run(run_values(1))
    assert "start changes from run to run" in launch.why_not_direct


def test_kernels_that_were_interpreted_stay_with_triton(driver: FakeDriver) -> None:
    launch, one, _ = a_launch(driver)
    one.handle = None
    launch.run(run_values())
    launch.run(run_values())
    assert "interpreted" in launch.why_not_direct
    assert (len(one.calls), driver.launched) == (2, [])
