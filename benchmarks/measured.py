"""Which sources each result measured, and a hash of their code: is a result of the code as it is today?

python benchmarks/measured.py                    # each result, and what has changed since it was measured
python benchmarks/measured.py --hash models_cpu  # the hash that a result measured now would carry

A benchmark stores `sources_hash(name)` in its result. Comments, formatting and docstrings don't count. A result whose
sources have changed since is measured again, or named in stale.json with the commit that it measured: tables and
charts then say so. A test fails where stale.json and the sources disagree, in either direction.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STALE = ROOT / "benchmarks" / "stale.json"

OPS = "trainshort/ops/*.py"
ON_CPU = (OPS, "trainshort/ops/blocked/*.py")
ON_GPU = (OPS, "trainshort/ops/triton/*.py")
MODELS = ("trainshort/positions/*.py", "trainshort/models/*.py")
PUBLIC = (*MODELS, "trainshort/models/checkpoints/*.py", "trainshort/integrations/transformers*.py")
RUNS = (*MODELS, "trainshort/data/*.py", "trainshort/training/*.py")

MEASURED = {  # by the name of the result's file, without its ending
    "attention_cpu": ON_CPU,
    "attention_gpu": ON_GPU,
    "bounded": (*ON_CPU, *ON_GPU, *MODELS),
    "context_parallel": (*ON_CPU, "trainshort/ops/context/*.py"),
    "context_parallel_gpu": (*ON_CPU, *ON_GPU, "trainshort/ops/context/*.py"),
    "decay_cpu": ON_CPU,
    "decay_gpu": ON_GPU,
    "demo": (*ON_CPU, *RUNS, "trainshort/evaluation/*.py", "trainshort/experiments/*.py"),
    "distributed": (*ON_CPU, *ON_GPU, *RUNS),
    "distributed_gpu": (*ON_CPU, *ON_GPU, *RUNS),
    "evaluation_cpu": (*ON_CPU, *MODELS, "trainshort/evaluation/*.py"),
    "models_cpu": (*ON_CPU, *MODELS),
    "models_gpu": (*ON_GPU, *MODELS),
    "public_cpu": (*ON_CPU, *PUBLIC),
    "public_gpu": (*ON_GPU, *PUBLIC),
    "rivals": ON_GPU,
    "test_gpu": (*ON_GPU, *MODELS),
}


def sources_hash(name: str) -> str:
    """Of the code that a result of this name measures, as it lies here."""
    paths = {path for pattern in MEASURED[name] for path in ROOT.glob(pattern)}
    together = hashlib.sha256()
    for path in sorted(path.relative_to(ROOT).as_posix() for path in paths):
        together.update(f"{path} {code_hash((ROOT / path).read_text())}\n".encode())
    return together.hexdigest()[:16]


@cache
def code_hash(text: str) -> str:
    """Of Python source, without its comments, formatting and docstrings; the same under every version of Python."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _docstring(node):
            del node.body[0]
    return hashlib.sha256(_described(tree).encode()).hexdigest()


def _docstring(node: Any) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def _described(value: Any) -> str:
    """A syntax tree as text, the same in every version of Python, which ast.dump is not (empty fields)."""
    if isinstance(value, ast.AST):
        fields = ((name, getattr(value, name, None)) for name in value._fields)
        shown = (f"{name}={_described(each)}" for name, each in fields if each is not None and each != [])
        return f"{type(value).__name__}({','.join(shown)})"
    if isinstance(value, list):
        return f"[{','.join(_described(each) for each in value)}]"
    return repr(value)


def results() -> list[str]:
    """The names of the committed results."""
    return sorted(path.stem for path in RESULTS.iterdir() if path.suffix in (".json", ".txt"))


def about(name: str) -> dict[str, str]:
    """What a result says of itself: `commit` and `sources` at least."""
    if (RESULTS / f"{name}.json").exists():
        found: dict[str, str] = json.loads((RESULTS / f"{name}.json").read_text())["about"]
        return found
    first = (RESULTS / f"{name}.txt").read_text().splitlines()[0]  # "...; commit 7ce6eb2; sources 0123..."
    return dict(re.findall(r"\b(commit|sources) (\S+?)(?:;|$)", first))


def stale() -> dict[str, str]:
    """Results of older code by name, with the commit that they measured."""
    listed: dict[str, str] = json.loads(STALE.read_text())
    return listed


def version(name: str) -> str:
    """What tables and charts say of the code that a result measured."""
    if name in stale():
        return f"measured on an older version of the code (commit {stale()[name]})"
    return f"commit {about(name)['commit']}"


def disagreements() -> list[str]:
    """What is wrong between the results, their sources and stale.json; empty where all is well."""
    wrong = [f"{name} is in stale.json, but there is no such result" for name in stale() if name not in results()]
    for name in results():
        said = about(name)
        changed = said.get("sources") != sources_hash(name)
        if changed and name not in stale():
            wrong.append(
                f"{name}: its sources have changed since it was measured (git diff --stat {said['commit']} -- "
                f"{' '.join(MEASURED[name])}). Measure it again, or add it to benchmarks/stale.json with its commit"
            )
        if name in stale() and stale()[name] != said["commit"]:
            wrong.append(f"{name} measured {said['commit']}, and stale.json says {stale()[name]}")
        if name in stale() and not changed:
            wrong.append(f"{name} is of the code as it is: take it out of benchmarks/stale.json")
    return wrong


def main() -> None:
    if sys.argv[1:2] == ["--hash"]:
        print(sources_hash(sys.argv[2]))
        return
    for name in results():
        fresh = about(name).get("sources") == sources_hash(name)
        print(f"{name:<20} {about(name)['commit']}  {'fresh' if fresh else 'older than the code'}")
    if disagreements():
        sys.exit("\n".join(disagreements()))


if __name__ == "__main__":
    main()
