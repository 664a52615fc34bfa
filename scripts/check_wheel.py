"""Build the wheel and import it in a clean environment, so that nothing it needs is left out of it.

The environment borrows the dependencies of the one that runs this script (downloading torch again would prove
nothing about our wheel), but not the checkout: trainshort must come from the wheel.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import pathlib, sys
import trainshort as ts
home = pathlib.Path(ts.__file__).resolve()
assert "site-packages" in home.parts, f"imported from {home}, not from the wheel"
assert (home.parent / "py.typed").exists(), "py.typed is missing from the wheel"
heavy = {"transformers", "datasets", "lm_eval", "triton"} & set(sys.modules)
assert not heavy, f"import trainshort pulled in {heavy}"
import torch
x = torch.randn(1, 4, 10, 8)
assert ts.alibi_attention(x, x, x).shape == x.shape
for name in ts.__all__:
    getattr(ts, name)
print("wheel:", ts.__version__, "imported from a clean environment")
"""


def run(*command: str | Path, cwd: Path) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", work, ROOT, cwd=work)
        (wheel,) = work.glob("*.whl")
        venv.create(work / "clean", with_pip=False)
        purelib = next((work / "clean").glob("lib/python*/site-packages"))
        run(
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            purelib,
            wheel,
            cwd=work,
        )
        # Dependencies by path; a checkout installed in editable mode is not on that path.
        (purelib / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(work / "clean" / "bin" / "python", "-c", PROBE, cwd=work)


if __name__ == "__main__":
    main()
