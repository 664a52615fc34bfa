"""The kernels on the GPU with hostile inputs, all layouts, windows on and off, decoding, and garbage out of sight."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import trainshort as ts
from tests.gpu.cases import gpu_case, on_gpu
from tests.models.small import language_model, random_tokens
from tests.ops import hostile
from tests.ops.cases import left_padding
from tests.ops.dense import Case, dense
from tests.ops.test_decoding import KINDS as NORMS
from tests.ops.test_decoding import assert_output_within_budget, with_norms
from tests.ops.triton.rounding import KernelJudge

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OUT_OF_RANGE = {  # what float16 cannot hold, or dense attention in 16 bits cannot compute
    torch.float16: {"huge_range", "tiny_range", "aligned_keys", "outlier_key", "tiny_norms"},
    torch.bfloat16: {"huge_range", "tiny_range"},
    torch.float32: set(),
}
HOSTILE = [(name, dtype) for dtype in DTYPES for name in hostile.FINITE if name not in OUT_OF_RANGE[dtype]]


def check(case: Case) -> None:
    KernelJudge(case).check(case.run("triton"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hostile_inputs(dtype: torch.dtype) -> None:
    """The shared set at 1,100 keys, causal and symmetric; windows are used."""
    failures = []
    for name in (name for name, given in HOSTILE if given == dtype):
        for causal in (True, False):
            case = on_gpu(Case(**hostile.FINITE[name](1100, dtype), causal=causal))
            try:
                check(case)
            except AssertionError as error:
                failures.append(f"{name}, {'causal' if causal else 'symmetric'}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_windows_are_sound(causal: bool, dtype: torch.dtype) -> None:
    """No query skips more softmax mass than the tolerance; asked twice, because kernels are remembered."""
    for name in (name for name, given in HOSTILE if given == dtype):
        for tolerance in (2.0**-14, 0.1):
            case = on_gpu(Case(**hostile.FINITE[name](1100, dtype), causal=causal, tolerance=tolerance))
            for _ in range(2):
                kept = case.kept(64)
                skipped = float(dense(case)[1].masked_fill(kept, 0.0).sum(-1).max())
                assert skipped <= tolerance * (1.0 + 1e-9), (name, tolerance)


def test_windows_skip_something() -> None:
    case = gpu_case(queries=4096, heads=2, batch=1, dim=64, dtype=torch.bfloat16, slopes=torch.tensor([0.9, 0.2]))
    assert float(case.kept(64).double().mean()) < 0.15


@pytest.mark.parametrize("name", hostile.NON_FINITE)
def test_what_is_not_finite_is_visited(name: str) -> None:
    arguments = hostile.NON_FINITE[name](1100)
    tensor, row, head, position = arguments.pop("poisoned")
    case = on_gpu(Case(**arguments))
    whole = (case.kept(64) | ~case.seen)[row, head]
    assert bool(whole[position].all())
    assert tensor == "q" or bool(whole[position:].all())
    with torch.no_grad():
        out = case.attend("triton")
    assert bool(torch.isfinite(out[1 - row]).all())
    if "nan" in name:
        assert bool(torch.isnan(out[row, head, position]).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_everything_and_windows(causal: bool, dtype: torch.dtype) -> None:
    """tolerance=0 and the default agree with dense attention, each within its own budget."""
    case = gpu_case(queries=1800, batch=1, heads=4, dim=64, dtype=dtype, causal=causal)
    for tolerance in (0.0, None):
        check(replace(case, tolerance=tolerance))


LEAKY: dict[str, dict] = {
    "left_padding": {"queries": 700, "key_padding_mask": left_padding(700, 261, length=700)},
    "left_padding_symmetric": {"queries": 700, "causal": False, "key_padding_mask": left_padding(700, 0, length=700)},
    "end_of_a_cache": {"queries": 200, "keys": 900, "query_start": 450},
    "end_of_a_cache_by_row": {"queries": 200, "keys": 900, "query_start": torch.tensor([450, 7])},
}


@pytest.mark.parametrize("feature", LEAKY)
def test_garbage_where_nobody_looks(feature: str) -> None:
    case = gpu_case(**LEAKY[feature], dim=64, dtype=torch.bfloat16, heads=4)
    hole = ~case.seen.any(2).any(1)[:, None, :, None]
    assert bool(hole.any())
    clean = replace(case, k=case.k.masked_fill(hole, 0.0), v=case.v.masked_fill(hole, 0.0)).run("triton")
    for garbage in (math.nan, math.inf):
        dirty = replace(case, k=case.k.masked_fill(hole, garbage), v=case.v.masked_fill(hole, garbage)).run("triton")
        for name, tensor in clean.items():
            assert bool(torch.isfinite(dirty[name]).all()), (name, garbage)
            torch.testing.assert_close(dirty[name], tensor)


ODD: dict[str, dict] = {
    "six_heads_three_key_heads": {"queries": 300, "heads": 6, "kv_heads": 3, "dim": 64},
    "twelve_heads_four_key_heads": {"queries": 300, "heads": 12, "kv_heads": 4, "dim": 64},
    "one_head_wide": {"queries": 300, "heads": 1, "dim": 192},
    "widest": {"queries": 500, "heads": 2, "dim": 256},
    "one_dimension": {"queries": 300, "dim": 1},
    "narrow": {"queries": 300, "dim": 24},
    "one_query": {"queries": 1, "keys": 900, "dim": 64},
    "one_key": {"queries": 200, "keys": 1, "dim": 64},
    "tiny": {"queries": 3, "dim": 8},
}


@pytest.mark.parametrize("feature", ODD)
def test_odd_sizes(feature: str) -> None:
    check(gpu_case(**ODD[feature], dtype=torch.bfloat16))


def test_future_slopes_by_row_after_plain_ones() -> None:
    """What is remembered of a first call must not be used for another kind of slopes."""
    plain = gpu_case(queries=500, dim=64, causal=False, future=torch.tensor([0.9, 0.1, 0.02]))
    by_row = replace(plain, future=torch.tensor([[0.9, 0.1, 0.02], [0.01, 0.8, 0.3]], device="cuda"))
    for case in (plain, by_row, plain, by_row):
        check(case)


def test_layouts_in_turn() -> None:
    """The same shapes with other strides and alignments: remembered kernels must not be mixed up."""
    case = gpu_case(queries=500, heads=4, dim=64, dtype=torch.bfloat16)
    transposed = {n: getattr(case, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    shifted = {n: torch.nn.functional.pad(getattr(case, n), (3, 2))[..., 3:-2] for n in "qkv"}
    expanded = {n: getattr(case, n)[:1].expand(2, -1, -1, -1) for n in "qkv"}
    for layout in (transposed, shifted, expanded, {}, {"q": transposed["q"]}, shifted, transposed):
        check(replace(case, **layout))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", ["plain", "padded", "grouped", "queries", "start_by_row"])
def test_decoding(feature: str, dtype: torch.dtype) -> None:
    features = {
        "plain": {},
        "padded": {"key_padding_mask": left_padding(3000, 700, length=3000)},
        "grouped": {"heads": 8, "kv_heads": 2},
        "queries": {"queries": 5},
        "start_by_row": {"query_start": torch.tensor([2999, 1200])},
    }[feature]
    case = gpu_case(**{"queries": 1, "keys": 3000, "heads": 4, "dim": 64, "dtype": dtype} | features)
    for kind in NORMS:
        assert_output_within_budget(with_norms(case, kind), "triton")


def test_step_by_step_is_all_at_once() -> None:
    """A growing cache inside preallocated memory full of NaN: the rows of one causal call."""
    whole = gpu_case(queries=200, heads=4, dim=64, batch=2)
    room = {n: torch.full((2, 4, 512, 64), math.nan, device="cuda") for n in "kv"}
    rows = []
    with torch.no_grad():
        for step in range(200):
            for n in "kv":
                room[n][:, :, step] = getattr(whole, n)[:, :, step]
            norms = whole.k[:, :, : step + 1].norm(dim=-1).amax(-1)
            q = whole.q[:, :, step : step + 1]
            start = torch.full((2,), step, device="cuda") if step % 2 else step
            rows.append(ts.alibi_attention(q, room["k"], room["v"], query_start=start, key_norms=norms))
    error = (torch.cat(rows, dim=2) - whole.attend("triton")).double()
    allowed = 2.0 * KernelJudge(whole).allowed["out"]
    assert bool((error.flatten(2).norm(dim=-1) <= allowed).all())


REFUSED = """
import torch
import trainshort as ts
x = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
norms = torch.full((1, 2, 4), {norm}, device="cuda")
ts.alibi_attention(x[:, :, -{queries}:], x, x, key_norms=norms)
torch.cuda.synchronize()
print("computed")
"""


@pytest.mark.parametrize("queries", [1, 512])
@pytest.mark.parametrize(("norm", "refused"), [("-1.0", True), ("float('nan')", False), ("0.0", False)])
def test_negative_norms_fail_on_the_device(norm: str, refused: bool, queries: int) -> None:
    """In a process of its own: after a failed assertion a CUDA context is of no use."""
    code = REFUSED.format(norm=norm, queries=queries)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ("computed" in result.stdout) is not refused, result.stderr


def test_norms_of_a_cache_are_not_looked_at_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are our own, and looking takes the host as long as a step."""
    model = language_model(dtype=torch.bfloat16).cuda()
    cache = model.make_cache(1)  # grows below: its new norms are our own, too
    looked_at = []
    monkeypatch.setattr(torch, "_assert_async", lambda good, message: looked_at.append(message))
    tokens = random_tokens(1, 300).cuda()
    with torch.no_grad():
        for part in tokens.split([250, *[1] * 20, 30], dim=1):
            model(part, cache=cache)
    assert not [message for message in looked_at if "key_norms" in message]
    q, k = torch.randn(1, 2, 1, 64, device="cuda"), torch.randn(1, 2, 300, 64, device="cuda")
    for norms in (k.norm(dim=-1).amax(-1), k.norm(dim=-1)):
        looked_at.clear()
        for _ in range(3):
            ts.alibi_attention(q, k, k, key_norms=norms)
        assert len([message for message in looked_at if "key_norms" in message]) == 1, "once for the same norms"
        norms.mul_(2.0)
        ts.alibi_attention(q, k, k, key_norms=norms)
        assert len([message for message in looked_at if "key_norms" in message]) == 2, "again when they have changed"
