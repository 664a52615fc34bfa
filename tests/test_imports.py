"""Imports go one way, and `import trainshort` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trainshort
from trainshort.common.extras import EXTRAS

PACKAGE = Path(trainshort.__file__).parent
LAYERS = [
    "common",
    "ops",
    "positions",
    "models",
    "data",
    "training",
    "evaluation",
    "integrations",
    "experiments",
    "report",
    "cli",
]
# Layers that stand before one and yet are none of its business.
BESIDE = {
    "ops": {"common"},
    "training": {"evaluation"},
    "data": {"ops", "positions", "models"},
    "integrations": {"data", "training"},
    "report": {"integrations", "ops", "positions", "models", "training", "evaluation", "experiments"},
}


def imports(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            found.add(node.module or "")
            if node.module == "trainshort":
                found |= {f"trainshort.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def imported_layers(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("trainshort.")}


def test_no_layer_imports_a_later_one() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        layer = path.relative_to(PACKAGE).parts[0]
        if layer in ("__init__.py", "__main__.py"):
            continue
        assert layer in LAYERS, f"{path} stands in no layer"
        allowed = set(LAYERS[: LAYERS.index(layer) + 1]) - BESIDE.get(layer, set())
        wrong += [f"{path.name} imports {name}" for name in imported_layers(path) & set(LAYERS) - allowed]
    assert not wrong


def test_common_imports_nothing_of_trainshort_and_hardly_anything_heavy() -> None:
    files = sorted((PACKAGE / "common").rglob("*.py"))
    assert len(files) > 5
    for path in files:
        found = imports(path)
        ours = {name for name in found if name.split(".")[0] == "trainshort"}
        assert not {name for name in ours if not name.startswith("trainshort.common.")}, path
        if path.name != "devices.py":
            assert "torch" not in {name.split(".")[0] for name in found}, path


def test_backends_do_not_import_each_other() -> None:
    for name in ("reference", "sdpa"):
        tree = ast.parse((PACKAGE / "ops" / f"{name}.py").read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        others = {f"trainshort.ops.{other}" for other in ("reference", "sdpa", "blocked", "operators")}
        assert not modules & (others - {f"trainshort.ops.{name}"})


def test_every_file_says_what_it_is_about() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_import_is_lazy() -> None:
    """So it costs a millisecond beside torch's own import: of this package one file is read, and no other package."""
    loaded = run_python("import trainshort, sys; print(*sys.modules)").split()
    assert [name for name in loaded if name.startswith("trainshort")] == ["trainshort"]
    assert not {"torch", "numpy", "safetensors", *EXTRAS} & set(loaded)


def test_first_use_loads_no_extras() -> None:
    heavy = run_python(
        "import sys, torch, trainshort as ts\n"
        "before = set(sys.modules)\n"
        "x = torch.randn(1, 2, 5, 8)\n"
        "ts.alibi_attention(x, x, x)\n"
        # torch's own compiler loads triton where it is installed: what counts is whether we do
        "extras = {'transformers', 'datasets', 'matplotlib', 'rich', 'trainshort.ops.triton.launch'}\n"
        "print(sorted(extras & (set(sys.modules) - before)))"
    )
    assert heavy == "[]"


@pytest.mark.parametrize("name", trainshort.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(trainshort, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'alibi'"):
        trainshort.alibi  # noqa: B018


def test_dir_shows_public_names_alone() -> None:
    assert dir(trainshort) == sorted(trainshort.__all__)
    shown = run_python("import trainshort as ts; ts.load; import trainshort.report; print(*dir(ts))").split()
    assert shown == sorted(trainshort.__all__)
