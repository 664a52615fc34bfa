"""What runs on a GPU, on one that is not there: nothing mixes devices, and nothing waits for the device, which a CUDA
graph could not capture. Steps of decoding, the loss, and attention forward and backward.

torch's fake tensors say that they are on a GPU and have no contents: where two devices meet they raise, and where the
host asks for a number too. Kernels are not launched; that their tensors are on the GPU is looked at.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

import trainshort as ts
from tests.models.small import STEPPING_POSITIONS, small_config
from trainshort.models import linear, loss
from trainshort.models.bounded import BoundedCache
from trainshort.models.sampling import Sampling
from trainshort.models.stepping import Step
from trainshort.ops import INTERPRETED, tracing
from trainshort.ops.problem import Problem
from trainshort.ops.triton import run
from trainshort.ops.values import check_values
from trainshort.positions import POSITIONS, Position

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: see tests/gpu"),
    pytest.mark.skipif(INTERPRETED, reason="the interpreter computes, and here is nothing to compute with"),
]


CUDA, META = 1, 14  # of torch's types of devices


@contextmanager
def device_guard() -> Iterator[None]:
    """torch without CUDA has nothing to make a GPU current with: it is lent what does nothing, of the meta device."""
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
        guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    except (OSError, StopIteration, ValueError):
        pytest.skip("this torch keeps its device guards elsewhere")
    before = guards[CUDA]
    guards[CUDA] = guards[META]
    try:
        yield
    finally:
        guards[CUDA] = before


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of kernels that would have been launched, on a GPU that is made of fake tensors."""
    from triton.runtime.jit import JITFunction

    from trainshort.ops.triton import config, launch, tuning
    from trainshort.ops.triton.cache import CACHE

    found: list[str] = []

    def look(kernel: Any, grid: Any) -> Any:
        def instead(**values: Any) -> None:
            for name, value in values.items():
                assert not isinstance(value, Tensor) or value.is_cuda, f"{kernel.fn.__name__}: {name} is no GPU's"
            found.append(kernel.fn.__name__)

        return instead

    def not_direct(*arguments: Any) -> None:
        raise launch.UnsupportedError("nothing was compiled")

    monkeypatch.setattr(JITFunction, "__getitem__", look)
    monkeypatch.setattr(launch, "DirectLaunch", not_direct)
    for module in (config, tuning):
        monkeypatch.setattr(module, "is_hopper", lambda device: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: 0, raising=False)
    monkeypatch.setattr(linear, "_is_plain", lambda layer: True)  # fake weights have a type of their own
    # Everybody has imported the function itself. Fake tensors are to be taken for some that are computed right now.
    monkeypatch.setattr(tracing.is_eager, "__code__", (lambda *tensors: True).__code__)

    def forget() -> None:
        CACHE.clear()
        tuning.tiles_for.cache_clear()
        config._numbers.cache_clear()

    forget()
    with device_guard(), FakeTensorMode(), torch.no_grad():
        yield found
    forget()


def steps(position: str, padded: bool = False, **changes: Any) -> None:
    """A prompt, then three steps as a graph replays them."""
    with torch.device("cuda"):
        model = ts.LanguageModel(small_config(position=position, **changes)).eval()
        tokens = torch.zeros(2, 20, dtype=torch.int64)
        mask = torch.ones(2, 20, dtype=torch.bool)
    cache = model.make_cache(2, 64)
    assert cache.why_not_stepping() is None
    model(tokens, cache=cache, key_padding_mask=mask if padded else None, last_only=True)
    cache.begin_steps()
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": None, "stop_tokens": [3]}
    step = Step(model, cache, Sampling(tokens, **options), tokens[:, -1])
    for _ in range(3):
        step.run()
    assert step.token.is_cuda
    assert cache.length == 23


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("position", STEPPING_POSITIONS)
def test_a_step_stays_on_the_device(launched: list[str], position: str, padded: bool) -> None:
    steps(position, padded)
    assert launched.count("append_kernel") >= 6, "two layers, three steps"
    assert "few_rows_kernel" in launched
    assert launched.count("rotate_kernel") == (2 if position == "rotary" else 0), "the prompt's: steps turn in append"


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_step_of_a_bounded_cache_stays_on_the_device(launched: list[str], kv_heads: int) -> None:
    """Between two looks at certificates; the looks themselves wait."""
    with torch.device("cuda"):
        model = ts.LanguageModel(small_config(num_heads=4, num_kv_heads=kv_heads)).eval()
        tokens = torch.zeros(2, 1, dtype=torch.int64)
    cache = model.make_cache(2, bounded=True)
    assert isinstance(cache, BoundedCache)
    assert cache.why_not_stepping() is None
    cache.slopes = model.position.slopes.double()  # which it looks at once, and waits for
    cache.begin_steps()
    cache.reserve(8)
    options: dict[str, Any] = {"temperature": 0.0, "top_k": None, "top_p": None, "seed": None, "stop_tokens": []}
    step = Step(model, cache, Sampling(tokens, **options), tokens[:, -1])
    for _ in range(3):
        step.run()
    assert cache.failure_flag().is_cuda
    assert sum("split_kernel" in name for name in launched) == 6


FAKE_ADDMM = pytest.mark.xfail(
    torch.__version__.startswith(("2.11.", "2.12.")), raises=TypeError, strict=False,
    reason="fake tensors of this torch do not know the out_dtype of addmm",
)  # fmt: skip


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, marks=FAKE_ADDMM), torch.float32, torch.float64], ids=str
)
def test_the_loss_stays_on_the_device(launched: list[str], dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        hidden, weight, bias = (torch.zeros(shape, dtype=dtype) for shape in ((300, 32), (97, 32), (97,)))
        targets = torch.zeros(300, dtype=torch.int64)
    wanted = [True, True, True]
    total, *gradients = loss._sum(hidden, weight, bias, targets, -100, wanted)
    losses, lse = loss._rows(hidden, weight, bias, targets, -100)
    later = loss._rows_backward(losses, lse, hidden, weight, bias, targets, -100, wanted)
    for reduction in loss.REDUCTIONS:
        assert ts.linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction).is_cuda
    assert all(each.is_cuda for each in (total, *gradients, losses, *later))
    assert ("losses_kernel" in launched) == (dtype != torch.float64)


PROBLEMS: dict[str, dict[str, Any]] = {
    "slopes": {},
    "gates": {"bias": lambda: ts.DecayBias(torch.zeros(2, 4, 640))},
    "gates_both_ways": {
        "bias": lambda: ts.DecayBias(torch.zeros(2, 4, 640), future=torch.zeros(2, 4, 640)), "causal": False,
    },
    "times": {"bias": lambda: ts.DecayBias.at(torch.zeros(640), ts.alibi_slopes(4, "cuda"))},
    "bucket": {"bias": lambda: ts.BucketBias(torch.zeros(32, 4))},
    "none": {"bias": lambda: None},
    "padded": {"key_padding_mask": lambda: torch.ones(2, 640, dtype=torch.bool)},
    "packed": {"cu_seqlens": lambda: torch.zeros(3, dtype=torch.int32), "batch": 1},
    "starts": {"query_start": lambda: torch.zeros(2, dtype=torch.int64)},
    "dropout": {"dropout": 0.2, "seed": lambda: torch.zeros((), dtype=torch.int64)},
    "float32": {"dtype": torch.float32},
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_attention_stays_on_the_device(launched: list[str], name: str) -> None:
    """The host's part of the kernels, forward and backward, with all that can be asked of them."""
    with torch.device("cuda"):
        given = {key: make() if callable(make) else make for key, make in PROBLEMS[name].items()}
        shape = (given.pop("batch", 2), 4, 640, 64)
        q, k, v = (torch.zeros(shape, dtype=given.get("dtype", torch.bfloat16)) for _ in range(3))
        bias = given.pop("bias", ts.LinearBias(ts.alibi_slopes(4, "cuda")))
    given.pop("dtype", None)
    problem = Problem(
        q=q, k=k, v=v, bias=bias, causal=given.pop("causal", True), scale=0.125, tolerance=1e-4, **given
    )
    check_values(problem)
    for windows in (False, True):
        problem = replace(problem, wants_windows=windows)
        out, lse, found = run.forward(problem)
        grads = run.backward(problem, torch.zeros_like(out), lse, out, lse, found, bias is not None)
        assert all(each.is_cuda for each in (out, lse, found, *grads[:3], *grads[3].values()))
    assert "forward_kernel" in launched
    assert "key_kernel" in launched


class Waits(Position):
    """Asks the device for a number."""

    def __init__(self, shape: Any) -> None:
        super().__init__()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + float(positions.sum().item() >= 0)


class Mixes(Waits):
    """Adds what is on the host."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + torch.ones(x.shape[-1], device="cpu")


def test_these_tests_notice_waiting(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POSITIONS, "waits", Waits)
    with pytest.raises(DataDependentOutputException):
        steps("waits")


def test_these_tests_notice_two_devices(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POSITIONS, "mixes", Mixes)
    with pytest.raises(RuntimeError, match=r"two (different )?devices"):
        steps("mixes")
