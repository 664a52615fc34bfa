"""Context parallelism over real processes that talk by gloo: one spawn of each size does all its checks, as starting
processes takes longer than computing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import trainshort as ts
from tests.distributed.context_cases import LENGTH, make, slices
from tests.distributed.processes import run_ranks
from trainshort.ops.context.parallel import simulate


def spans_for(size: int) -> list[int]:
    """Uneven ones, among four ranks an empty one."""
    return [500, LENGTH - 500] if size == 2 else [300, 0, 250, LENGTH - 550]


def attend(name: str, tolerance: float) -> dict[str, Any]:
    """How far this rank is from one process, and from the simulation, whose bits and counts it must have."""
    torch.manual_seed(0)  # all ranks know the whole sequence
    case, rank = make(name), dist.get_rank()
    parts = slices(spans_for(dist.get_world_size()))
    own = parts[rank]
    expected = case.whole()
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, case.inputs, grad)
    masks = None if case.mask is None else [case.mask[:, part] for part in parts]
    given = {"causal": case.causal, "tolerance": tolerance, "cu_seqlens": case.cu_seqlens}
    outs, sent = simulate(
        [(case.q[:, :, part], case.k[:, :, part], case.v[:, :, part]) for part in parts],
        bias=[case.bias(part) for part in parts], key_padding_mask=masks, **given,
    )  # fmt: skip
    simulated = torch.autograd.grad(torch.cat(outs, dim=2), case.inputs, grad)
    leaves = [tensor.detach()[:, :, own].requires_grad_() for tensor in (case.q, case.k, case.v)]
    with ts.context_parallel(init_device_mesh("cpu", (dist.get_world_size(),))) as parallel:
        mask = None if masks is None else masks[rank]
        out = ts.attention(*leaves, bias=case.bias(own), key_padding_mask=mask, **given)
        found = list(torch.autograd.grad(out, leaves + case.learned, grad[:, :, own]))
        total = parallel.total()
    for gradient in found[3:]:
        dist.all_reduce(gradient)  # of what ranks share, the sum is that of one process
    parted = [expected[:, :, own], *(gradient[:, :, own] for gradient in wanted[:3]), *wanted[3:]]
    pairs = [(one.detach(), other) for one, other in zip([out, *found], parted, strict=True) if one.numel()]
    same = [torch.equal(one, other[:, :, own]) for one, other in zip(found[:3], simulated[:3], strict=True)]
    return {
        "error": max(float((one - other.detach()).abs().max()) for one, other in pairs),
        "bits": torch.equal(out, outs[rank]) and all(same),
        "counts": parallel.sent.numbers() == sent[rank].numbers(),
        "total": total.numbers() == sum(sent[1:], start=sent[0]).numbers(),
    }


MODELS = [
    {"position": "alibi"},
    {"position": "fox", "kv_shift": True, "qk_norm": True},
    {"position": "rotary"},
    {"position": "sinusoidal"},
    {"position": "t5", "num_kv_heads": 2},
    {"position": "learned", "max_length": 400},
]


def train(options: dict[str, Any]) -> tuple[float, float]:
    """How far the loss of a model and its gradients, summed over ranks, are from those of one process."""
    torch.manual_seed(1)
    model = ts.LanguageModel(ts.ModelConfig(num_layers=2, d_model=64, num_heads=4, vocab_size=50, **options)).double()
    tokens = torch.randint(50, (2, 401))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 300:] = -100
    mask = torch.ones(2, 400, dtype=torch.bool)
    mask[0, :140] = False
    targets[0, :140] = -100
    loss = model.loss(inputs, targets, key_padding_mask=mask)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    cuts = [130, 270] if dist.get_world_size() == 2 else [130, 0, 170, 100]
    own = slices(cuts)[dist.get_rank()]
    with ts.context_parallel(dist.group.WORLD):
        part = model.loss(inputs[:, own], targets[:, own], key_padding_mask=mask[:, own])
        found = torch.autograd.grad(part, list(model.parameters()))
    for gradient in found:
        dist.all_reduce(gradient)
    worst = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
    return float((part - loss).detach().abs()), worst


def check(names: list[str], models: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {name: attend(name, 1e-9) for name in names}
    torch.manual_seed(0)
    found["models"] = [train(options) for options in models]
    return found


def assert_good(found: dict[str, Any]) -> None:
    for distance, gradient in found.pop("models"):
        assert distance < 1e-9
        assert gradient < 1e-9
    for name, one in found.items():
        assert one["error"] < 1e-6, name
        assert one["bits"], name
        assert one["counts"], name
        assert one["total"], name


def test_two_processes(tmp_path: Path) -> None:
    for found in run_ranks(tmp_path, 2, check, ["slopes"], MODELS[:1]):
        assert isinstance(found, dict), found
        assert_good(found)


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    names = [
        "slopes", "slopes and future, both sides", "grouped gates", "gates, both sides", "times",
        "slopes with padding, both sides", "slopes in documents", "buckets", "slopes and a long key",
    ]  # fmt: skip
    for found in run_ranks(tmp_path, 4, check, names, MODELS):
        assert isinstance(found, dict), found
        assert_good(found)


def fail(kind: str) -> None:
    odd = dist.get_rank() == 1
    q = torch.randn(1, 4, 20, 16, dtype=torch.float64 if kind == "dtype" and odd else torch.float32)
    k = q[:, :3] if kind == "shape" and odd else q
    slopes = -torch.ones(4) if kind == "slopes" and odd else None
    with ts.context_parallel(group=dist.group.WORLD) as parallel:
        if kind == "lookup" and odd:
            parallel.checked(lambda: {}["gone"])
        if kind == "rows":
            model = ts.LanguageModel(ts.ModelConfig(num_layers=1, d_model=16, num_heads=2, vocab_size=20))
            model(torch.ones(2 if odd else 1, 8, dtype=torch.int64))
        backend: Any = "none" if kind == "backend" and odd else "auto"
        if kind == "device" and odd:
            q = k = q.to("meta")
        scale = 10**400 if kind == "scale" and odd else None
        ts.alibi_attention(q, k, k, slopes=slopes, scale=scale, backend=backend)


# Each: what ranks 0 and 1 are told.
REFUSED = "rank 1 of the context refused its part"
FAILURES = {
    "dtype": ["dtype is torch.float32 on rank 0 and torch.float64 on rank 1"] * 2,
    "shape": [REFUSED, "multiple of the number of key heads"],
    "slopes": [REFUSED, "slopes must be"],
    "backend": [REFUSED, "backend must be one of"],
    "scale": [REFUSED, "int too large to convert to float"],
    "device": [REFUSED, "meta"],
    "lookup": [REFUSED, "gone"],
    "rows": ["rank 0 has 1 rows without a key_padding_mask, rank 1 has 2 rows"] * 2,
}


def fail_often() -> list[str]:
    messages = []
    for kind in FAILURES:
        try:
            fail(kind)
        except Exception as error:
            messages.append(str(error))
    return messages


@pytest.mark.slow
def test_every_rank_learns_what_is_wrong_on_one(tmp_path: Path) -> None:
    for rank, messages in enumerate(run_ranks(tmp_path, 2, fail_often)):
        for message, expected in zip(messages, FAILURES.values(), strict=True):
            assert expected[rank] in message


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match="a DeviceMesh or a process group, got int"), ts.context_parallel(3):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="a DeviceMesh or a process group, got NoneType"), ts.context_parallel():
        pass


def test_gradients_of_gradients_are_refused() -> None:
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    (out,), _ = simulate([(q, q, q)], bias=ts.LinearBias(ts.alibi_slopes(2)))
    with pytest.raises(RuntimeError, match="no double backward: leave create_graph out"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_pooling_is_for_whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = ts.Encoder(ts.ModelConfig(num_layers=1, d_model=16, num_heads=2, vocab_size=20, causal=False))
    monkeypatch.setattr("trainshort.ops.context.state.current", object())
    with pytest.raises(ValueError, match="averages whole texts"):
        encoder.pool(torch.ones(1, 4, dtype=torch.int64))


def evaluate_windows() -> tuple[list[float], list[float], int]:
    """Losses that ranks share, and those of this process alone."""
    from trainshort.evaluation.config import EvaluateConfig
    from trainshort.evaluation.evaluate import evaluate

    torch.manual_seed(0)
    model = ts.LanguageModel(ts.ModelConfig(num_layers=2, d_model=64, num_heads=4, vocab_size=50)).double()
    tokens = torch.randint(50, (3001,)).numpy()
    config = EvaluateConfig(lengths=(100, 1500), mode="sliding", chunk=512, device="cpu")
    alone = [record["nll_sum"] for record in evaluate(model, tokens, config)]
    with ts.context_parallel(dist.group.WORLD):
        records = evaluate(model, tokens, config)
    return [record["nll_sum"] for record in records], alone, records[0]["ranks"]


@pytest.mark.slow
def test_evaluation_shares_windows(tmp_path: Path) -> None:
    for found in run_ranks(tmp_path, 2, evaluate_windows):
        assert len(found) == 3, found
        shared, alone, ranks = found
        assert shared == pytest.approx(alone, rel=1e-12)
        assert ranks == 2
