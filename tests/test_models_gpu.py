"""The GPU's benchmark of whole models, as far as a CPU and tiny sizes can say: it runs, and keeps what it finds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainshort.data import PrepareConfig
from trainshort.data.prepare import prepare

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark on a CPU that passes for a GPU, without compiling."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for name in ("contenders_models", "measured", "models_gpu"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import models_gpu

    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1)
    monkeypatch.setattr(models_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(models_gpu, "ours", lambda model, length: (model, model.loss))
    return models_gpu


def test_gates_beside_alibi(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_layers": 1, "d_model": 64, "num_heads": 4, "vocab_size": 256}
    for name, value in {"TRAINED": sizes, "TOKENS": 2048, "GATED": 2048}.items():
        monkeypatch.setattr(bench, name, value)
    *_, records = bench.fox()
    assert [(each["position"], each.get("gate_bias")) for each in records] == [
        ("alibi", None),
        ("fox", 0),
        ("fox", 5),
    ]
    shares = [each["share_of_keys"] for each in records]
    assert all(0 < share <= 1 for share in shares)
    assert shares[1] < shares[2], "gates of one half forget faster"


def test_the_share_of_the_matrix_rate(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Some words to read. " * 500)
    data = prepare(PrepareConfig(sources=(str(tmp_path / "text.txt"),), out=str(tmp_path / "data")), progress=False)
    flags = "--num-layers 1 --d-model 64 --num-heads 4 --length 32 --batch-tokens 128 --steps 12"
    ((record,),) = bench.mfu(Path(data), 1e9, flags, warm=4)
    assert record["steps"] == 8
    matrices = 12 * 64**2 + 64 * record["vocab_size"]
    assert record["operations_per_token"] == pytest.approx(6 * matrices + 6 * 32 * 64, rel=0.01)
    assert record["mfu"] == pytest.approx(record["tokens_per_second"] * record["operations_per_token"] / 1e9)


def test_data_that_is_not_there_is_said(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(bench.LeftOutError, match=r"no prepared data in .*/nowhere: write it with trainshort prepare"):
        next(bench.mfu(tmp_path / "nowhere", 1e9))


def test_every_record_is_kept(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a part that fails later on; the parts behind it run, and the exit says what is missing."""

    def one_and_an_error() -> Iterator[list[str]]:
        yield ["first"]
        raise RuntimeError("what went wrong")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "M")
    monkeypatch.setattr(bench, "limits", lambda: {"matrix_rate": 1e9, "bandwidth": 1e9})
    monkeypatch.setattr(bench, "fox", one_and_an_error)
    monkeypatch.setattr(bench, "prefill", lambda: iter([["one"], ["one", "two"]]))
    out, data = tmp_path / "out.json", tmp_path / "nowhere"
    words = ["--parts", "mfu", "fox", "prefill", "--data", str(data), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["models_gpu.py", *words])
    with pytest.raises(SystemExit, match=r"left out: mfu, as there is no prepared data .*; failed: fox"):
        bench.main()
    found = json.loads(out.read_text())
    assert (found["fox"], found["prefill"]) == (["first"], ["one", "two"])
    assert "mfu" not in found
