"""The table of names: what it builds, and what it says to a name or an option that it does not know."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import trainshort
from trainshort.positions import POSITIONS, Position, Shape, build_position

SHAPE = Shape(d_model=16, num_heads=2, head_dim=8, max_length=32)
SCALING = {"scaling", "factor", "trained_length"}
OPTIONS = {
    "alibi": {"slopes", "biased_heads", "trainable", "scale", "one_sided", "rotary", "rotary_base"} | SCALING,
    "fox": {"gate_bias", "rotary", "rotary_base"},
    "sinusoidal": {"base"},
    "learned": set(),
    "rotary": {"base"} | SCALING,
    "t5": {"buckets", "max_distance"},
    "kerple": {"kind"},
    "none": set(),
}


def test_the_names() -> None:
    assert set(POSITIONS) == set(OPTIONS)


@pytest.mark.parametrize("name", POSITIONS)
def test_every_name_builds_a_position(name: str) -> None:
    position = build_position(name, SHAPE, {})
    assert isinstance(position, POSITIONS[name])
    assert isinstance(position, Position)


@pytest.mark.parametrize("name", POSITIONS)
def test_one_class_a_file(name: str) -> None:
    path = Path(inspect.getfile(POSITIONS[name]))
    assert path.stem == name
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes] == [POSITIONS[name].__name__]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("alibbi", "alibi"),
        ("rotry", "rotary"),
        ("sinusodial", "sinusoidal"),
        ("T5", "t5"),
        ("ALiBi", "alibi"),
        ("lerned", "learned"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"got '{wrong}'; did you mean '{near}'\?") as error:
        build_position(wrong, SHAPE, {})
    for name in POSITIONS:
        assert name in str(error.value)


@pytest.mark.parametrize("wrong", ["", "xyzzy", 7])
def test_a_name_like_no_other_lists_them_all(wrong: object) -> None:
    with pytest.raises(ValueError, match="position must be one of") as error:
        build_position(wrong, SHAPE, {})  # pyright: ignore[reportArgumentType]
    assert "did you mean" not in str(error.value)
    assert repr(wrong) in str(error.value)


@pytest.mark.parametrize("name", POSITIONS)
def test_an_unknown_option_is_named_with_those_that_exist(name: str) -> None:
    with pytest.raises(ValueError, match=rf"position '{name}' has no option 'wavelength'") as error:
        build_position(name, SHAPE, {"wavelength": 3})
    for option in OPTIONS[name]:
        assert option in str(error.value)
    if not OPTIONS[name]:
        assert "takes none" in str(error.value)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("option", ["shape", "self"])
def test_what_the_model_passes_itself_is_no_option(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"has no option '{option}'"):
        build_position(name, SHAPE, {option: SHAPE})


@pytest.mark.parametrize("base", [0.0, -1.0])
@pytest.mark.parametrize("name", ["rotary", "sinusoidal"])
def test_a_base_that_is_not_positive_is_refused_when_built(name: str, base: float) -> None:
    with pytest.raises(ValueError, match="base"):
        build_position(name, SHAPE, {"base": base})


# Nothing outside positions/ knows which method is used


# "none" is a word with other uses, such as reduction="none".
METHODS = {*POSITIONS, *(method.__name__ for method in POSITIONS.values())} - {"none"}
QUESTIONS = {"isinstance", "issubclass", "startswith", "endswith"}


def decisions_by_name(source: str) -> list[str]:
    """Comparisons, matches, isinstance checks and imports that single out one position method."""
    found = []
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node]
        elif isinstance(node, ast.match_case):
            parts = [node.pattern]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) in QUESTIONS:
            parts = list(node.args)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainshort.positions."):
            found += [f"line {node.lineno}: import {alias.name}" for alias in node.names if alias.name in METHODS]
        for part in parts:
            for leaf in ast.walk(part):
                name = (
                    leaf.value if isinstance(leaf, ast.Constant) else getattr(leaf, "id", getattr(leaf, "attr", None))
                )
                if name in METHODS:
                    found.append(f"line {getattr(leaf, 'lineno', '?')}: {name}")
    return found


def test_no_model_asks_which_method_it_has() -> None:
    folder = Path(trainshort.__file__).parent / "models"
    # Readers of public checkpoints ask what others' configs say, where a value may be called alibi.
    public = set((folder / "checkpoints").glob("*.py")) - {folder / "checkpoints" / "native.py"}
    files = sorted(set(folder.rglob("*.py")) - public)
    assert len(files) > 5
    wrong = {str(path.relative_to(folder)): decisions_by_name(path.read_text()) for path in files}
    assert not {name: lines for name, lines in wrong.items() if lines}


@pytest.mark.parametrize(
    "source",
    [
        "if config.position == 'alibi': pass",
        "x = 1 if 'rotary' != name else 2",
        "if name in ('t5', 'other'): pass",
        "if isinstance(self.position, Learned): pass",
        "if isinstance(self.position, positions.Alibi): pass",
        "match name:\n    case 'sinusoidal':\n        pass",
        "if name.startswith('alibi'): pass",
        "from trainshort.positions.alibi import Alibi",
    ],
)
def test_such_a_question_would_be_found(source: str) -> None:
    assert decisions_by_name(source)


@pytest.mark.parametrize(
    "source",
    [
        "position: str = 'alibi'",
        "Config(position='rotary')",
        "'''like alibi'''",
        "from trainshort.positions import Position",
    ],
)
def test_names_as_values_are_fine(source: str) -> None:
    assert not decisions_by_name(source)
