"""Does an installed trainshort work? Needs nothing but the installation: no checkout, no tests, no network.

    python smoke.py

With the three base packages alone it tries the library and the commands that need no more, and that the others name
the extra which they need. With the extra `lab` it also tests a model and makes the report, with `hf` it patches one.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

LAB = ("matplotlib", "plotly", "rich", "tokenizers")
# What `import trainshort` may load beside the standard library: nothing, whatever is installed.
LAZY = """
import sys
import torch
before = set(sys.modules)
import trainshort
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names) - {"trainshort"}
assert not new, f"import trainshort loads {sorted(new)}"
"""


def main() -> None:
    import numpy
    import safetensors
    import torch

    import trainshort as ts

    home = Path(ts.__file__).resolve()
    assert "site-packages" in home.parts, f"trainshort comes from {home}, not from an installation"
    assert (home.parent / "py.typed").exists(), "py.typed is missing"
    lab = all(map(installed, LAB))
    subprocess.run([sys.executable, "-c", LAZY], check=True)
    try_attention()
    with tempfile.TemporaryDirectory() as folder:
        try_model(Path(folder) / "model")
        try_commands(Path(folder))
        if lab:
            try_lab(Path(folder))
        elif not any(map(installed, LAB)):
            try_without_lab(Path(folder))
        if installed("transformers"):
            try_hf()
    extras = [extra for extra, there in (("lab", lab), ("hf", installed("transformers"))) if there]
    print(
        f"trainshort {ts.__version__} with {' and '.join(extras) or 'no extra'} works: Python "
        f"{platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}, "
        f"safetensors {safetensors.__version__}"
    )


def try_attention() -> None:
    """Output and gradients of what `auto` takes on this machine's CPU, beside the reference in float64."""
    import torch

    import trainshort as ts

    torch.manual_seed(0)
    inputs = [torch.randn(1, 4, 700, 16) for _ in range(3)]
    found = []
    for dtype, backend in ((torch.float32, "auto"), (torch.float64, "reference")):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in inputs]
        out = ts.alibi_attention(*leaves, backend=backend)
        out.square().sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)
    for name in ts.__all__:
        getattr(ts, name)


def try_model(folder: Path) -> None:
    """A step of training lowers the loss; a model comes back from its folder, and continues tokens as before."""
    import torch

    import trainshort as ts

    torch.manual_seed(0)
    config = ts.ModelConfig(vocab_size=257, d_model=32, num_layers=2, num_heads=4, position="alibi")
    model = ts.LanguageModel(config)
    tokens = torch.randint(0, 257, (2, 65))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    ts.save(model.eval(), folder)
    again = ts.load(folder)
    assert again.tokenizer is None
    longer = [each.generate(tokens[:, :9], max_new_tokens=20, temperature=0.0) for each in (model, again)]
    assert longer[0].shape == (2, 29)
    assert torch.equal(*longer)


def try_commands(folder: Path) -> None:
    """The commands that need no extra, with a model whose tokens are bytes."""
    assert "trainshort --help" in command()
    assert "usage: trainshort" in command("--help")
    assert "trainshort" in command("bench", "--lengths", "64", "--seconds", "0.05")
    (folder / "book.txt").write_text("It was a dark and stormy night. " * 400)
    data, run = folder / "data", folder / "run"
    assert "tokens" in command("prepare", folder / "book.txt", "--out", data)
    sizes = ("--num-layers", 1, "--d-model", 32, "--num-heads", 2, "--length", 32, "--batch-tokens", 256)
    bloom = ("--model", "bloom-560m", "--steps", 4, "--warmup", 1, "--no-compile")
    command("train", "--data", data, "--out", run, *bloom, *sizes)
    shown = command("generate", run, "--prompt", "It was", "--max-new-tokens", 5, "--seed", 0)
    assert shown.startswith("It was"), shown


def try_lab(folder: Path) -> None:
    """From a text to the page: a trained tokenizer, a test at several lengths, the report."""
    data, run = folder / "data", folder / "run"
    command("prepare", folder / "book.txt", "--vocab", 270, "--out", folder / "bpe")
    command("evaluate", run, "--data", data, "--lengths", 32, 64, "--tokens", 256)
    assert json.loads((run / "evaluation.json").read_text())
    command("report", run, "--out", folder / "report")
    assert (folder / "report" / "report.html").stat().st_size > 100_000
    command("convert", run, "--out", folder / "bloom", "--to", "bloom")
    assert (folder / "bloom" / "tokenizer.json").exists()


def try_hf() -> None:
    """A patched BLOOM gives the logits that it gave before."""
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    import trainshort as ts

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)).eval()
    tokens = torch.randint(0, 64, (1, 300))
    with torch.no_grad():
        before, after = model(tokens).logits, ts.patch(model)(tokens).logits
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)


def try_without_lab(folder: Path) -> None:
    """A command that needs more says which extra brings it, and leaves no file."""
    run, out = folder / "run", folder / "out"
    for words in (
        ("prepare", folder / "book.txt", "--vocab", 270, "--out", out),
        ("evaluate", run, "--lengths", 32),
        ("compare", "--out", out),
        ("report", run, "--out", out),
        ("inspect", run, "--out", out),
        ("convert", run, "--out", out, "--to", "bloom"),
    ):
        error = command(*words, fails=True)
        assert "pip install 'trainshort[lab]'" in error, (words, error)
        assert len(error.strip().splitlines()) == 1, error
        assert not out.exists(), words


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def command(*words: object, fails: bool = False) -> str:
    """What `trainshort ...` printed; where it is to fail, its error."""
    program = Path(sys.executable).with_name("trainshort")
    ran = subprocess.run([str(word) for word in (program, *words)], capture_output=True, text=True)
    assert ran.returncode == int(fails), f"{words}: status {ran.returncode}\n{ran.stdout}{ran.stderr}"
    return ran.stderr if fails else ran.stdout


if __name__ == "__main__":
    main()
