"""Position methods from files and installed packages: known when the user says so, and never for another reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainshort as ts
from trainshort.positions import POSITIONS, build_position, import_file, imported, is_known

METHOD = """
import torch
from trainshort.positions import POSITIONS, Position

class Halves(Position):
    label = "Halves & more"

    def __init__(self, shape, *, factor: float = 0.5, times: int = 1):
        super().__init__()
        self.factor, self.times = factor, times

    def embed(self, x, positions):
        return x * self.factor**self.times

POSITIONS["halves"] = Halves
"""


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test imports is not known to the next one."""
    before, modules = dict(POSITIONS), set(sys.modules)
    monkeypatch.setattr(imported, "_files", {})
    monkeypatch.setattr(imported, "_origins", {})
    yield
    POSITIONS.clear()
    POSITIONS.update(before)
    for name in set(sys.modules) - modules:
        if name.startswith(("trainshort_imported_", "offered")):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "method.py"
    path.write_text(METHOD)
    return path


def small(**more: object) -> ts.LanguageModel:
    return ts.LanguageModel(ts.ModelConfig(d_model=16, num_heads=2, num_layers=1, position="halves", **more))


def test_a_file_makes_its_method_known(file: Path) -> None:
    assert import_file(file) == ["halves"]
    assert import_file(file) == ["halves"]  # again is once
    assert small(position_options={"factor": 0.25, "times": 3}).position.factor == 0.25  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="option 'times' must be an int"):
        ts.ModelConfig(position="halves", position_options={"times": 1.5})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has no position method"),
        ("from trainshort.positions import POSITIONS\nPOSITIONS['alibi'] = POSITIONS['t5']", "would replace"),
        ("from trainshort.positions import POSITIONS\nPOSITIONS['mine'] = int", "must be a subclass"),
        ("import nothing_of_that_name", "cannot be imported: ModuleNotFoundError"),
        ("from trainshort.positions import POSITIONS\nPOSITIONS['mine'] = int\n1 / 0", "ZeroDivisionError"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_file_that_is_no_method_changes_nothing(file: Path, text: str, message: str) -> None:
    before = dict(POSITIONS)
    file.write_text(text)
    with pytest.raises((ValueError, RuntimeError), match=message):
        import_file(file)
    assert before == POSITIONS
    file.write_text(METHOD)
    assert import_file(file) == ["halves"]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere.py", "shape"):
        with pytest.raises(FileNotFoundError, match="no such Python file"):
            import_file(path)


def test_options_without_a_type_are_refused_in_words(file: Path) -> None:
    file.write_text(METHOD.replace("times: int = 1", "times=1"))
    import_file(file)
    with pytest.raises(ValueError, match=r"option 'times' must be one of bool, int, float.*the class has none"):
        ts.ModelConfig(position="halves", position_options={"times": 1})


def test_a_saved_model_says_what_to_import(file: Path, tmp_path: Path) -> None:
    import_file(file)
    ts.save(small(), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["position_origin"] == {"file": str(file)}
    assert type(ts.load(tmp_path / "saved").position).__name__ == "Halves"
    del POSITIONS["halves"]
    with pytest.raises(ValueError, match=r"method 'halves' is not known here; it came from the file '.*method.py'"):
        ts.load(tmp_path / "saved")


def test_methods_of_trainshort_have_no_origin(tmp_path: Path) -> None:
    ts.save(ts.LanguageModel(ts.ModelConfig(d_model=16, num_heads=2, num_layers=1)), tmp_path / "saved")
    assert "position_origin" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_a_method_of_a_script_is_remembered_by_its_module(tmp_path: Path) -> None:
    POSITIONS["halves"] = type("Halves", (POSITIONS["none"],), {})
    ts.save(small(), tmp_path / "saved")
    del POSITIONS["halves"]
    with pytest.raises(ValueError, match=f"it came from the Python module '{__name__}'"):
        ts.load(tmp_path / "saved")


@pytest.mark.parametrize("origin", [{}, 7, [], {"file": 3}, {"distribution": "x" * 10_000}, {"file": "a\nb\x1b[31m"}])
def test_whatever_a_folder_says_is_text(file: Path, tmp_path: Path, origin: object) -> None:
    import_file(file)
    ts.save(small(), tmp_path / "saved")
    del POSITIONS["halves"]
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"position_origin": origin}))
    with pytest.raises(ValueError, match="not known here") as caught:
        ts.load(tmp_path / "saved")
    assert len(str(caught.value)) < 1000
    assert "\x1b" not in str(caught.value)


def test_nothing_is_run_because_a_folder_names_it(file: Path, tmp_path: Path) -> None:
    import_file(file)
    ts.save(small(), tmp_path / "saved")
    del POSITIONS["halves"]
    trap, sprung = tmp_path / "saved" / "trap.py", tmp_path / "sprung"
    trap.write_text(f"open({str(sprung)!r}, 'w').close()\n" + METHOD)
    path = tmp_path / "saved" / "config.json"
    for origin in ({"file": str(trap)}, {"module": "trap"}, {"distribution": "trap"}):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"position_origin": origin}))
        with pytest.raises(ValueError, match="not known here"):
            ts.load(tmp_path / "saved")
    assert not sprung.exists()


def offer(folder: Path, name: str, value: str, package: str = "offered") -> None:
    """As a package is installed."""
    info = folder / f"{package}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[trainshort.positions]\n{name} = {value}\n")
    (folder / f"{package}.py").write_text(METHOD.replace('POSITIONS["halves"] = Halves', ""))


def test_an_installed_package_offers_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path, "halves", "offered:Halves")
    assert not is_known("halves")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_known("halves")
    assert "offered" not in sys.modules  # nothing is loaded before it is asked for
    with pytest.raises(ValueError, match=r"one of .*none, halves; got 'halvs'; did you mean 'halves'"):
        ts.ModelConfig(position="halvs")
    ts.save(small(), tmp_path / "saved")
    header = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert header["position_origin"] == {"distribution": "offered 1.5"}
    del POSITIONS["halves"]
    assert type(ts.load(tmp_path / "saved").position).__name__ == "Halves"
    monkeypatch.undo()
    del POSITIONS["halves"]
    with pytest.raises(ValueError, match=r"it came from the package 'offered 1\.5': install that"):
        ts.load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("halves", "offered:METHOD", "cannot be loaded from offered:METHOD: AttributeError"),
        ("halves", "offered:torch", "must be a subclass"),
    ],
)
def test_a_package_that_offers_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    offer(tmp_path, name, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises((ValueError, RuntimeError), match=message):
        small()


def test_no_package_replaces_a_method_of_trainshort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = POSITIONS["alibi"]
    offer(tmp_path, "alibi", "offered:Halves")
    monkeypatch.syspath_prepend(str(tmp_path))
    ts.ModelConfig(position="alibi")
    assert POSITIONS["alibi"] is before
    assert "offered" not in sys.modules


@pytest.mark.parametrize(
    ("word", "meant"),
    [("rope", "rotary"), ("RoPE", "rotary"), ("rotery", "rotary"), ("nope", "none"), ("sin-cos", "sinusoidal"),
     ("T5 bias", "t5"), ("Alibi", "alibi"), ("linear", "alibi"), ("learnt", "learned")],
)  # fmt: skip
def test_other_names_are_understood(word: str, meant: str) -> None:
    shape = ts.ModelConfig().position_shape
    with pytest.raises(ValueError, match=rf"did you mean '{meant}'\?"):
        build_position(word, shape, {})
