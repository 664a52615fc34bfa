"""Long texts: memory grows with the length, not with its square."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, sys
import numpy as np, torch
import trainshort as ts
from trainshort.evaluation.config import EvaluateConfig
from trainshort.evaluation.evaluate import evaluate
torch.set_num_threads(1)
tokens = np.random.default_rng(0).integers(0, 257, 65537).astype(np.uint16)
model = ts.LanguageModel(ts.ModelConfig(vocab_size=257, d_model=128, num_layers=4, num_heads=8, position=sys.argv[1]))
(record,) = evaluate(model, tokens, EvaluateConfig(lengths=(int(sys.argv[2]),), tokens=int(sys.argv[2])))
print(json.dumps({name: record[name] for name in ("scored_tokens", "peak_memory_bytes")}))
"""


def measured(position: str, length: int) -> dict[str, int]:
    """In a process of its own, whose memory is all that is counted."""
    command = [sys.executable, "-c", CODE, position, str(length)]
    found: dict[str, int] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["scored_tokens"] == length
    return found


@pytest.mark.slow
@pytest.mark.parametrize("position", ["alibi", "sinusoidal"])
def test_65536_tokens_of_a_small_model_fit_into_2_gigabytes(position: str) -> None:
    assert measured(position, 65536)["peak_memory_bytes"] < 2 * 2**30
