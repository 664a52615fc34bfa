"""The public names mean the same thing in whatever order they are first used: they load lazily."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "first",
    [
        "ts.attention",
        pytest.param("ts.alibi_slopes(2)", marks=pytest.mark.slow),
        pytest.param("__import__('trainshort.ops.blocked.run')", marks=pytest.mark.slow),
    ],
)
def test_attention_is_the_function(first: str) -> None:
    """`trainshort.attention` is a function, whatever was imported before."""
    lines = [
        "import torch, trainshort as ts",
        first,
        "q = torch.zeros(1, 2, 3, 4)",
        "assert ts.attention(q, q, q).shape == q.shape",
        "assert ts.alibi_attention(q, q, q).shape == q.shape",
        "from trainshort.ops import attention",
        "import trainshort.ops.windows",
        "assert ts.attention(q, q, q).shape == q.shape",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
