"""What loading takes: the model in its own dtype, and one tensor of the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.public.folders import BAICHUAN, baichuan_tensors, write_folder

WIDTH, HIDDEN, LAYERS, VOCABULARY = 512, 2048, 6, 4000

LOAD = """
import re, sys
from pathlib import Path
import torch
import trainshort as ts

def memory(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

ts.load(sys.argv[1], dtype=torch.bfloat16)  # everything is imported now
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = memory("VmRSS")
model = ts.load(sys.argv[2], dtype=torch.bfloat16)
print(memory("VmHWM") - before, sum(each.numel() * each.element_size() for each in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("files", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_peak_is_the_model_and_one_tensor(tmp_path: Path, files: int) -> None:
    """The file is float32, and twice as large as the model: read as a whole, it would show."""
    small = write_folder(tmp_path / "small", BAICHUAN, baichuan_tensors())
    shape = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    shape["num_attention_heads"] = 8
    tensors = {}
    for name, tensor in baichuan_tensors().items():
        sizes = [{48: WIDTH, 144: 3 * WIDTH, 40: HIDDEN, 61: VOCABULARY}[size] for size in tensor.shape]
        if "layers.1" not in name:
            for layer in range(LAYERS if "layers.0" in name else 1):
                tensors[name.replace("layers.0", f"layers.{layer}")] = torch.zeros(sizes)
    large = write_folder(tmp_path / "large", BAICHUAN | shape, tensors, files)
    largest = max(tensor.nbytes for tensor in tensors.values())
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(small), str(large)], capture_output=True, text=True, check=True
    )
    peak, model = map(int, done.stdout.split())
    assert model > 50e6
    assert 0.9 * model < peak < model + largest + 16e6, f"{peak / 1e6:.0f} MB for {model / 1e6:.0f} MB"
