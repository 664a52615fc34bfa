"""One call shared by several threads: the same numbers, nothing left changed, errors come through, forks survive."""

from __future__ import annotations

import ctypes
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.ops.cases import left_padding, random_case
from tests.ops.dense import Case
from tests.ops.test_windows_used import problem_of
from trainshort.ops import splits, threads

pytestmark = pytest.mark.skipif(threads._library() is None, reason="torch's OpenMP library was not found")


@pytest.fixture(params=[2, 3])
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Several threads, and no problem too small or too uneven to be split."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(splits, "LEAST_WORK", 1)
    monkeypatch.setattr(splits, "UNEVEN", 1e9)
    yield request.param
    torch.set_num_threads(before)


STEEP = torch.tensor([0.9, 0.3, 0.02, 0.01])
FEATURES: dict[str, dict] = {
    "causal": {"queries": 300},
    "windows": {"batch": 1, "queries": 700, "slopes": STEEP},
    "windows_of_rows": {"queries": 600, "slopes": torch.stack((STEEP, STEEP.flip(0)))},
    "symmetric": {"queries": 600, "slopes": STEEP, "causal": False},
    "left_right": {"queries": 400, "slopes": STEEP, "future": STEEP.flip(0), "causal": False},
    "one_sided": {"queries": 400, "slopes": STEEP, "causal": False, "sees": ("past", "future", "past", "future")},
    "grouped": {"kv_heads": 2, "queries": 500, "slopes": STEEP},
    "padded": {"queries": 300, "slopes": STEEP, "key_padding_mask": left_padding(300, 200, length=300)},
    "packed": {"batch": 1, "queries": 700, "slopes": STEEP, "cu_seqlens": torch.tensor([0, 100, 650, 700])},
    "query_start": {"queries": 130, "keys": 600, "slopes": STEEP, "query_start": torch.tensor([300, 450])},
    "key_norms": {"queries": 130, "keys": 600, "slopes": STEEP, "key_norms": torch.full((2, 4), 9.0)},
    "bucket": {"bias": "bucket", "queries": 300},
    "no_bias": {"bias": "none", "queries": 300},
    "half": {"dtype": torch.bfloat16, "queries": 300},
    "many_rows": {"batch": 7, "queries": 300},
}


def results(case: Case) -> dict[str, Tensor]:
    """Output, gradients with those of the bias, and gradients of q, k and v alone, which have a path of their own."""
    found = case.run("blocked")
    leaves = [tensor.detach().requires_grad_() for tensor in (case.q, case.k, case.v)]
    out = replace(case, q=leaves[0], k=leaves[1], v=leaves[2]).attend("blocked")
    alone = torch.autograd.grad(out, leaves, case.upstream())
    return found | dict(zip(("dq", "dk", "dv"), alone, strict=True))


@pytest.mark.parametrize("feature", FEATURES)
def test_shares_give_the_same_numbers(feature: str, several: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(**{"heads": 4} | FEATURES[feature])
    with threads.one_thread():
        alone = results(case)
    shared_by: list[int] = []
    run = threads.run

    def counted(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        shared_by.append(len(items))
        return run(function, items)

    monkeypatch.setattr(threads, "run", counted)
    shared = results(case)
    assert len(shared_by) >= 4, "two forward and two backward passes"
    assert min(shared_by) > 1
    again = results(case)
    for name, value in alone.items():
        assert torch.equal(again[name], shared[name]), f"{name} is not deterministic"
        # The library of matrix products may round otherwise inside a parallel region: some last digits.
        difference = (value - shared[name]).abs().max() / value.abs().max()
        assert difference <= 8 * torch.finfo(value.dtype).eps, name


def test_a_share_that_is_not_finite_stays_alone(several: int) -> None:
    """NaN in a query of one head sends its share another way, and no other head sees it."""
    case = random_case(heads=4, queries=300)
    q = case.q.clone()
    q[0, 1, 200] = math.nan
    broken = replace(case, q=q)
    out = broken.attend("blocked")
    with threads.one_thread():
        whole = broken.attend("blocked")  # all of it went the other way
    assert torch.allclose(out, whole, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert out[0, 1, 200].isnan().all()
    assert out.isnan().sum() == case.q.shape[3]


def test_a_default_device_changes_nothing(several: int) -> None:
    case = random_case(heads=4, queries=700, slopes=STEEP, batch=1)
    expected = case.attend("blocked")
    with torch.device("meta"):
        assert torch.equal(case.attend("blocked"), expected)


def test_inference_mode_and_other_threads(several: int) -> None:
    case = random_case(heads=4, queries=300)
    expected = case.attend("blocked")
    with torch.inference_mode():
        assert torch.equal(case.attend("blocked"), expected)
    found: list[Tensor] = []
    caller = threading.Thread(target=lambda: found.append(case.attend("blocked")))
    caller.start()
    caller.join()
    assert torch.equal(found[0], expected)


def test_run_splits_nothing_inside_and_leaves_nothing_behind(several: int) -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))

    def look(item: int) -> tuple[int, bool, bool, bool]:
        return item, threads.is_inside(), bool(library.omp_in_parallel()), torch.is_grad_enabled()

    assert threads.run(look, range(9)) == [(item, True, True, False) for item in range(9)]
    assert not threads.is_inside()
    assert torch.is_grad_enabled()
    assert numbers_of_threads() == (several, several)


def test_what_a_share_raises_is_raised(several: int) -> None:
    def fail(item: int) -> int:
        if item == 3:
            raise ValueError("the third")
        return item

    with pytest.raises(ValueError, match="the third"):
        threads.run(fail, range(8))
    assert not threads.is_inside()
    assert threads.run(lambda item: item * 2, range(4)) == [0, 2, 4, 6]


def test_one_thread_is_for_this_thread_only(several: int) -> None:
    with threads.one_thread():
        assert numbers_of_threads() == (1, several)
        with threads.one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert numbers_of_threads() == (several, several)
    with pytest.raises(KeyError), threads.one_thread():
        raise KeyError
    assert numbers_of_threads() == (several, several)


def numbers_of_threads() -> tuple[int, int]:
    """Torch's number of threads here, and in a thread that is new."""
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return torch.get_num_threads(), fresh[0]


def test_little_work_is_not_split(several: int) -> None:
    """A decoding step of a small model runs in one thread; its prompt, and what the caller does between, do not."""
    model = ts.LanguageModel(ts.ModelConfig(vocab_size=32, d_model=32, num_layers=1, num_heads=4))
    seen: list[int] = []
    between: list[int] = []
    model.head.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    model.generate(
        torch.zeros((1, 5), dtype=torch.long),
        max_new_tokens=3,
        temperature=0.0,
        on_token=lambda _: between.append(torch.get_num_threads()),
    )
    assert seen == [several, 1, 1]
    assert between == [several] * 3


def test_uneven_or_small_problems_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available", lambda: 4)
    problem = problem_of(random_case(batch=1, heads=4, queries=64))
    even = torch.full((1, 4), 2.0**30)
    assert len(splits.split_problem(problem, even)) == 4
    assert len(splits.split_problem(problem, even * 2.0**-10)) == 1
    even[0, 2] = 2.0**34
    assert len(splits.split_problem(problem, even)) == 1


class StoppedError(Exception):
    """What the signal handler of the next test raises."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_no_signal_is_lost(several: int) -> None:
    """A handler may raise at any time, also while the callback that OpenMP runs is being entered or left."""

    def stop(number: int, frame: object) -> None:
        raise StoppedError

    q, k, v = (torch.randn(2, 8, 256, 32) for _ in range(3))
    ts.alibi_attention(q, k, v)  # the first call imports parts of torch, which swallow what is raised meanwhile
    before = signal.signal(signal.SIGALRM, stop)
    lost = 0
    try:
        for trial in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.0003 * trial)
                end = time.monotonic() + 2.0
                while time.monotonic() < end:
                    ts.alibi_attention(q, k, v)
                lost += 1
            except StoppedError:
                pass
            assert not threads.is_inside()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert lost == 0
