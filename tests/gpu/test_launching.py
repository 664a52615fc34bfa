"""The way from a call to the GPU: straight to the driver after the first run, from any thread, on any stream."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import trainshort as ts
from tests.gpu.cases import gpu_case
from tests.ops.dense import Case
from tests.ops.triton.interpreter import kept_by_both
from tests.ops.triton.test_windows import missed

CASES: dict[str, dict] = {
    "causal": {},
    "symmetric": {"causal": False},
    "float32": {"dtype": torch.float32},
    "bucket": {"bias": "bucket"},
    "gates": {"bias": "gates"},
    "times_symmetric": {"bias": "times", "causal": False},
    "everything": {"tolerance": 0.0},
}


def make(name: str, **more) -> Case:
    about = {"queries": 640, "heads": 4, "dim": 64, "dtype": torch.bfloat16, "batch": 2}
    return gpu_case(**about | CASES[name] | more)


@pytest.mark.parametrize("name", CASES)
def test_the_second_run_goes_straight_to_the_driver_and_gives_the_same_bits(name: str) -> None:
    from trainshort.ops.triton.cache import CACHE

    CACHE.clear()
    case = make(name)
    results = [case.run("triton") for _ in range(3)]
    elsewhere = replace(case, q=case.q.clone(), k=case.k.clone(), v=case.v.clone())
    results.append(elsewhere.run("triton"))
    launches = [launch for key, launch in CACHE.items() if key[0] in ("forward", "backward")]
    assert len(launches) >= 2
    assert [(launch.direct is not None, launch.why_not_direct) for launch in launches] == [(True, "")] * len(launches)
    for later in results[1:]:
        for key, tensor in results[0].items():
            assert torch.equal(tensor, later[key]), key


def test_decoding_goes_straight_to_the_driver() -> None:
    from trainshort.ops.triton.cache import CACHE

    CACHE.clear()
    case = make("causal", queries=1, keys=900)
    first, second = (ts.alibi_attention(case.q, case.k, case.v) for _ in range(2))
    assert torch.equal(first, second)
    assert [(key[0], launch.direct is not None) for key, launch in CACHE.items()] == [("decode", True)]


def test_threads_that_never_used_the_gpu() -> None:
    case = make("causal")
    expected = [ts.alibi_attention(case.q, case.k, case.v) for _ in range(2)][1]
    found: list[torch.Tensor] = []

    def work() -> None:
        found.extend(ts.alibi_attention(case.q, case.k, case.v) for _ in range(40))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 160
    assert all(torch.equal(expected, out) for out in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_what_backward_skips_is_within_the_tolerance(causal: bool, dtype: torch.dtype) -> None:
    """Scores as sharp as a trained model's, and as flat as noise."""
    for stretch in (1.0, 4.0):
        case = gpu_case(queries=2048, heads=4, dim=64, dtype=dtype, batch=1, causal=causal)
        case = replace(case, q=case.q * stretch)
        forward, backward = kept_by_both(case)
        for kept, allowed in ((forward, 0.5), (backward, 1.0)):
            share = float(missed(case, kept).max()) / case.may_skip
            assert share <= allowed + 1e-6
        assert float((backward & case.seen).sum()) < float((forward & case.seen).sum())
