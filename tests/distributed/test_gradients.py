"""Every parameter's gradient is that of one process on all rows, whatever the model has and however it is shared."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launched import run_cases

MODELS: dict[str, dict[str, Any]] = {
    "alibi, learned slopes": {"position_options": {"trainable": True}, "num_heads": 3, "head_dim": 8},
    "fox, gated, norms of heads": {"position": "fox", "gated": True, "activation": "silu", "qk_norm": True},
    "untied, biases, rmsnorm": {"tie_embeddings": False, "head_bias": True, "norm": "rmsnorm", "qkv_bias": True},
    "t5, parallel": {"position": "t5", "parallel_residual": True},
    "kerple, shift, output gate": {"position": "kerple", "kv_shift": True, "output_gate": True, "output_norm": True},
    "learned": {"position": "learned", "max_length": 16, "embedding_norm": True},
}
CASES = [
    *({"kind": kind, "model": model} for model in MODELS.values() for kind in ("ddp", "fsdp")),
    *({"kind": kind, "model": MODELS["alibi, learned slopes"], "half": True} for kind in ("ddp", "fsdp")),
    {"kind": "fsdp", "model": MODELS["fox, gated, norms of heads"], "half": True},
    *({"kind": kind, "model": {}, "compiled": True, "recomputed": True} for kind in ("ddp", "fsdp")),
    *({"kind": "ddp", "model": model, "spans": 2} for model in MODELS.values()),
    *({"kind": kind, "model": {}, "compiled": True, "recomputed": True, "spans": 2} for kind in ("ddp", "fsdp")),
]
LINEAR = ("norm of all", ".qkv.", ".out.", ".up.", ".down.", ".gates.", ".output_gate.", ".shift.")


@pytest.mark.slow
def test_gradients_are_those_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("gradients")
    found = run_cases(2, [{"gradients": case} for case in CASES], folder)
    for case, of_ranks in zip(CASES, found, strict=True):
        for result in of_ranks:
            for name, difference in result["differences"].items():
                # Under autocast a matrix has its gradient rounded to 8 bits in each process, and once by one alone;
                # everything else stays in float32, but follows from activations of 8 bits.
                rounded = case.get("half") and any(part in name for part in LINEAR)
                assert difference < (2.0**-6 if rounded else 2.0**-17), (case, name, difference)
            graphs = 4 if "spans" in case else 1  # for all layers; attention over spans breaks the graph
            assert result["graphs"] == (graphs if case.get("compiled") else 0), case
    assert found[0][0]["differences"] == found[0][1]["differences"], "all ranks have the same gradients"
