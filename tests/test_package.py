"""What a release rests on: versions that agree, workflows that call targets which exist, supported versions."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import trainshort

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", [*WORKFLOWS, *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir())], ids=str)
def test_files_for_github_are_yaml(path: Path) -> None:
    assert isinstance(load_yaml(path), dict)


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in load_yaml(path)["jobs"].items():
            yield f"{path.name}: {name}", job


def commands_of(job: dict[str, Any]) -> Iterator[str]:
    """The lines that a job runs, for every combination of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for values in itertools.product(*matrix.values()):
        for step in job["steps"]:
            line = step.get("run", "")
            for name, value in zip(matrix, values, strict=True):
                line = line.replace(f"${{{{ matrix.{name} }}}}", value)
            yield from filter(None, line.splitlines())


def test_workflows_call_targets_of_the_makefile_and_nothing_else() -> None:
    targets = set(re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = {name for line in targets for name in line.split()}
    called = set()
    for name, job in jobs():
        for line in commands_of(job):
            found = re.fullmatch(r"make ([a-z-]+)((?: [A-Z]+=\S+)*)", line)
            assert found is not None, f"{name} runs {line!r}, which is no target of the Makefile"
            assert found[1] in targets, f"{name} calls make {found[1]}, which is not in the Makefile"
            called.add(found[1])
    assert {"check", "test", "test-all", "smoke-lowest", "smoke-highest", "check-release", "dist"} <= called


def test_the_matrix_has_every_python_and_both_ends_of_torch() -> None:
    supported = [each.split()[-1] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert PROJECT["requires-python"] == f">={supported[0]}"
    matrices = [job["strategy"]["matrix"] for _, job in jobs() if "strategy" in job]
    assert len(matrices) == 2
    for matrix in matrices:
        assert matrix == {"python": supported, "torch": ["lowest", "highest"]}


def test_a_release_is_published_without_a_password_and_after_its_checks() -> None:
    release = load_yaml(ROOT / ".github" / "workflows" / "release.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    publish = release["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"]
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    lines = list(commands_of(release["jobs"]["build"]))
    assert lines[0] == 'make check-release TAG="$GITHUB_REF_NAME"'
    assert lines[-1] == "make dist"


def test_hooks_before_a_commit_run_what_is_installed() -> None:
    (repository,) = load_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/")


def test_every_target_that_makes_no_file_is_declared_so() -> None:
    text = (ROOT / "Makefile").read_text()
    declared = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())  # type: ignore[index]
    rules = re.findall(r"^([a-z][a-z -]*):(?!=)", text, re.MULTILINE)
    assert {name for rule in rules for name in rule.split()} == declared


def test_the_pins_name_every_direct_dependency() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    every = itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    wanted = {re.split(r"[>=<;\[ ]", each)[0] for each in every} - {"trainshort"}
    assert wanted <= pinned, f"constraints.txt does not pin {sorted(wanted - pinned)}"


def test_constraints_for_another_torch() -> None:
    constraints = script("constraints_for").constraints
    lowest, highest = constraints("lowest").splitlines(), constraints("highest").splitlines()
    (promised,) = (each.removeprefix("torch>=") for each in PROJECT["dependencies"] if each.startswith("torch"))
    assert f"torch=={promised}.*" in lowest
    assert not [line for line in highest if line.startswith(("setuptools", "torch=", "triton"))]
    assert "torch==2.12.1" in constraints("2.12.1").splitlines()
    assert "numpy<2.4" in lowest
    assert [line for line in highest if line.startswith("numpy==")]
    with pytest.raises(SystemExit, match="lowest, highest or a version"):
        constraints("latest")


def test_environments_for_another_torch_get_a_setuptools_that_reads_the_project() -> None:
    """They have no pin of it, and Python 3.11 brings one that is too old."""
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert f"'{wanted}'" in (ROOT / "Makefile").read_text()


# check_release


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository at its release of 0.1.0."""
    (tmp_path / "trainshort").mkdir()
    (tmp_path / "trainshort" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.1.0 - 2026-12-24\n\n- All of it.\n")
    (tmp_path / "CITATION.cff").write_text("version: 0.1.0\ndate-released: 2026-12-24\n")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "stale.json").write_text('{"rivals": "a26d5e3"}')
    return tmp_path


def test_this_repository_agrees_with_itself() -> None:
    assert script("check_release").problems(ROOT) == []
    assert script("check_release").read_version(ROOT) == trainshort.__version__


def test_a_release_that_agrees(tree: Path) -> None:
    problems = script("check_release").problems
    assert problems(tree) == []
    assert problems(tree, "v0.1.0") == []


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("trainshort/__init__.py", "0.1.0", "0.2.0", "the tag is v0.1.0, and __version__ 0.2.0 wants v0.2.0"),
        ("trainshort/__init__.py", "0.1.0", "0.0.9", "CHANGELOG.md has 0.1.0, __version__ is still 0.0.9"),
        ("CHANGELOG.md", "## 0.1.0 - 2026-12-24\n\n", "", "has no entry of 0.1.0 below 'Unreleased'"),
        ("CHANGELOG.md", "2026-12-24", "2026-12-32", "'0.1.0 - 2026-12-32' is not like '0.1.0 - 2026-12-24'"),
        ("CHANGELOG.md", "0.1.0 - 2026-12-24", "0.1.0", "'0.1.0' is not like '0.1.0 - 2026-12-24'"),
        ("CHANGELOG.md", "Unreleased\n", "Unreleased\n\n- More.\n", "there are changes under 'Unreleased'"),
        ("CHANGELOG.md", "- All of it.", "", "the entry of 0.1.0 is empty"),
        ("CHANGELOG.md", "## Unreleased\n\n", "", "begins with '0.1.0 - 2026-12-24', not with 'Unreleased'"),
        ("CHANGELOG.md", "of it.\n", "of it.\n\n## 0.1.0 - 2026-12-01\n", "versions must stand there once"),
        ("CHANGELOG.md", "#", "", "begins with ''"),
        ("CITATION.cff", "0.1.0", "0.0.1", "CITATION.cff has version 0.0.1, __version__ is 0.1.0"),
        ("CITATION.cff", "2026-12-24", "2026-12-23", "date-released 2026-12-23, CHANGELOG.md 2026-12-24"),
        ("CITATION.cff", "date-released: 2026-12-24", "", "date-released None"),
        ("benchmarks/stale.json", "rivals", "demo", "README.md shows docs/demo.svg as of a26d5e3"),
        ("benchmarks/stale.json", "rivals", "attention_gpu", "--out benchmarks/results/attention_gpu.json on a GPU"),
    ],
)
def test_a_release_that_does_not(tree: Path, file: str, old: str, new: str, message: str) -> None:
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new))
    assert message in "\n".join(script("check_release").problems(tree, "v0.1.0"))


def test_stale_results_hinder_a_release_alone(tree: Path) -> None:
    """And the table of what the README shows is that of the README."""
    (tree / "benchmarks" / "stale.json").write_text('{"demo": "a26d5e3"}')
    check_release = script("check_release")
    assert check_release.problems(tree) == []
    text = (ROOT / "README.md").read_text()
    measured = {*re.findall(r"<!-- table: (\w+) -->", text), *re.findall(r"\]\((docs/\w+\.svg)\)", text)}
    assert measured == {each for shown in check_release.SHOWN.values() for each in shown}
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in check_release.SHOWN)


def test_a_repository_that_is_not_named_is_said(tree: Path) -> None:
    reminders = script("check_release").reminders
    (tree / "pyproject.toml").write_text("[project]\nurls = {Paper = 'https://arxiv.org/abs/2108.12409'}\n")
    assert "has no Repository yet" in reminders(tree)[0]
    (tree / "pyproject.toml").write_text("[project.urls]\nRepository = 'https://example.org'\n")
    assert reminders(tree) == []


# check_wheel


def test_what_differs_between_wheels_is_named() -> None:
    differing = script("check_wheel").differing
    assert differing({"a": b"1", "b": b"2"}, {"a": b"1", "b": b"2"}) == []
    assert differing({"a": b"1", "b": b"2"}, {"b": b"3", "c": b"4"}) == ["a", "b", "c"]


def test_a_wheel_is_built_from_the_files_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tools have left beside them stays out, whether git is there to say so or not."""
    check_wheel = script("check_wheel")
    root = tmp_path / "root"
    for name in ("trainshort/data/a.py", "README.md", "build/lib/old.py", "data/tokens.bin", ".venv/x", "runs/y"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text")
    shutil.copy(ROOT / ".gitignore", root)
    monkeypatch.setattr(check_wheel, "ROOT", root)
    check_wheel.copy_tree(tmp_path / "without-git")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    check_wheel.copy_tree(tmp_path / "with-git")
    for copied in ("without-git", "with-git"):
        assert check_wheel.files_below(tmp_path / copied) == {".gitignore", "README.md", "trainshort/data/a.py"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("README.md", ".ci/run", "trainshort/__init__.py", "trainshort/report/assets/page.css"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(name)
    return tmp_path / "tree"


def packed(path: Path, names: Iterable[str]) -> Path:
    """A wheel of files that hold their names."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in (*names, "trainshort-0.1.0.dist-info/licenses/LICENSE"):
            archive.writestr(name, name)
    return path


def test_a_wheel_that_lacks_a_file_or_has_one_too_many(repository: Path, tmp_path: Path) -> None:
    check = script("check_wheel").check_wheel
    whole = ["trainshort/__init__.py", "trainshort/report/assets/page.css"]
    check(repository, packed(tmp_path / "whole.whl", whole))
    for wrong, name in ((whole[:1], "page.css"), ([*whole, "tests/test_x.py"], "tests/test_x.py")):
        with pytest.raises(AssertionError, match=f"differ in .*{re.escape(name)}"):
            check(repository, packed(tmp_path / "wrong.whl", wrong))


def test_an_sdist_that_lacks_a_file_or_has_one_too_many(repository: Path, tmp_path: Path) -> None:
    check = script("check_wheel").check_sdist

    def sdist(*left_out: str) -> Path:
        with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
            for path in repository.rglob("*"):
                name = path.relative_to(repository).as_posix()
                if path.is_file() and name not in left_out:
                    archive.add(path, f"trainshort-0.1.0/{name}")
        return tmp_path / "x.tar.gz"

    check(repository, sdist(".ci/run"))
    with pytest.raises(AssertionError, match=r"lacks \['README\.md'\]"):
        check(repository, sdist("README.md"))
    whole = sdist()
    (repository / "README.md").unlink()
    with pytest.raises(AssertionError, match=r"not in the repository: \['README\.md'\]"):
        check(repository, whole)
