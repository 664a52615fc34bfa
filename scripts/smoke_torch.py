"""scripts/smoke.py with another torch, in an environment of its own.

    python scripts/smoke_torch.py lowest [--required]        or highest, or a version

pip looks for torch where it is configured to, and may bring gigabytes. Where it finds none that fits this machine,
this says so and ends well, or with --required fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from check_wheel import ROOT, build, copy_tree, run
from constraints_for import constraints, torch_pin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", help="lowest, highest or a version")
    parser.add_argument("--required", action="store_true", help="fail where this torch cannot be installed")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "constraints.txt").write_text(constraints(chosen.torch))
        copy_tree(work / "tree")
        wheel = build(work / "tree", work / "wheel", "wheel")
        venv.create(work / "venv", with_pip=True)
        python = work / "venv" / "bin" / "python"
        problem = install(python, wheel, work / "constraints.txt")
        if problem:
            print(f"{torch_pin(chosen.torch) or 'the newest torch'} cannot be installed here:\n{problem}")
            sys.exit(int(chosen.required))
        run(python, ROOT / "scripts" / "smoke.py", cwd=work)


def install(python: Path, wheel: Path, pins: Path) -> str:
    """What pip has to say where it fails; nothing where it does not."""
    command = [python, "-m", "pip", "install", "--quiet", "--constraint", pins, wheel]
    ran = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = [line for line in ran.stdout.splitlines() if line.strip() and not line.startswith("WARNING")]
    return "\n".join(said) or f"pip ended with status {ran.returncode}" if ran.returncode else ""


if __name__ == "__main__":
    main()
