"""Build the sdist and the wheel, look into both, and try the wheel in clean environments.

    python scripts/check_wheel.py [--out dist]       --out: keep the files that were checked there

What is checked: the sdist has every file of the repository and builds the same wheel; the wheel has the package
whole and nothing else; its metadata is valid and asks for three packages; and scripts/smoke.py passes in an
environment that has just what the wheel asks for, and in those with its extra `lab` or `hf` besides. They borrow the
installed packages of the one that runs this script (downloading torch again would prove nothing about our wheel):
exactly those that the wheel's metadata names, and what these need in turn.
"""

from __future__ import annotations

import argparse
import email.parser
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path, PurePosixPath

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
BASE = {"numpy", "safetensors", "torch"}
EXTRAS = {"all", "datasets", "dev", "hf", "lab", "lm-eval", "parquet", "tensorboard"}
NOT_COPIED = {".git", ".hypothesis", "build", "data", "dist", "report", "runs"}  # at the top: made, not written
NOT_IN_SDIST = ".ci/"  # how the machines of this repository call the Makefile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for the files that were checked")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sdist, wheel = build_both(work)
        check_sdist(work / "tree", sdist)
        check_wheel(work / "tree", wheel)
        check_metadata(wheel)
        for extra in ("", "lab", "hf"):
            python = environment(work / f"clean-{extra}", wheel, extra)
            run(python, ROOT / "scripts" / "smoke.py", cwd=work)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            print("checked:", *(shutil.copy(file, out) for file in (sdist, wheel)))


def run(*command: str | Path, cwd: Path) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def build_both(work: Path) -> tuple[Path, Path]:
    """From a copy of the repository, where nothing that an earlier build left can get in."""
    copy_tree(work / "tree")
    sdist = build(work / "tree", work / "sdist", "sdist")
    wheel = build(work / "tree", work / "wheel", "wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    again = build(unpacked, work / "again", "wheel")
    differ = differing(contents(wheel), contents(again))
    assert not differ, f"the sdist builds another wheel than the repository: {differ}"
    return sdist, wheel


def copy_tree(to: Path) -> None:
    """The files of the repository: what git knows or would add; without git, all that is not made by tools."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():  # not deleted since
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, to / name)
        return

    def ignored(folder: str, names: list[str]) -> set[str]:
        made = {name for name in names if name == "__pycache__" or name.endswith((".egg-info", "_cache"))}
        top = {name for name in names if name in NOT_COPIED or name.startswith(".venv")}
        return made | (top if Path(folder) == ROOT else set())

    shutil.copytree(ROOT, to, ignore=ignored)


def build(tree: Path, out: Path, kind: str) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, tree]
    ran = subprocess.run([str(part) for part in command], cwd=tree.parent, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"the {kind} cannot be built:\n{ran.stdout}{ran.stderr}")
    (built,) = out.iterdir()
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def check_sdist(tree: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    written = {name for name in files_below(tree) if not re.search(r"(^|/)(build/|[^/]+\.egg-info/)", name)}
    missing = sorted(name for name in written - found if not name.startswith(NOT_IN_SDIST))
    assert not missing, f"the sdist lacks {missing}: see MANIFEST.in"
    made = {name for name in found - written if not re.match(r"PKG-INFO$|setup\.cfg$|trainshort\.egg-info/", name)}
    assert not made, f"the sdist has files that are not in the repository: {sorted(made)}"


def check_wheel(tree: Path, wheel: Path) -> None:
    """The package as it is in the repository, byte for byte, with its licence, and nothing else."""
    found = contents(wheel)
    about = {name for name in found if PurePosixPath(name).parts[0].endswith(".dist-info")}
    package = {f"trainshort/{name}": tree / "trainshort" / name for name in files_below(tree / "trainshort")}
    written = {name: path.read_bytes() for name, path in package.items()}
    differ = differing(written, {name: found[name] for name in found.keys() - about})
    assert not differ, f"wheel and repository differ in {differ}: see package-data in pyproject.toml"
    assert any(name.endswith("licenses/LICENSE") for name in about), "the wheel has no licence"


def check_metadata(wheel: Path) -> None:
    found = contents(wheel)
    (raw,) = (content for name, content in found.items() if name.endswith(".dist-info/METADATA"))
    about = Metadata.from_email(raw, validate=True)
    version = re.search(r'^__version__ = "(.*)"$', found["trainshort/__init__.py"].decode(), re.MULTILINE)
    assert version is not None
    assert (about.name, str(about.version)) == ("trainshort", version[1])
    wanted = {canonicalize_name(each.name) for each in about.requires_dist or () if each.marker is None}
    assert wanted == BASE, f"pip install trainshort brings {sorted(wanted)}, not {sorted(BASE)}"
    extras = set(map(canonicalize_name, about.provides_extra or ()))
    assert extras == EXTRAS, f"the extras are {sorted(extras)}, not {sorted(EXTRAS)}"
    assert about.license_expression == "Apache-2.0"
    assert about.description_content_type == "text/markdown"
    for name in ("author", "classifiers", "description", "keywords", "project_urls", "requires_python", "summary"):
        assert getattr(about, name) or email.parser.BytesParser().parsebytes(raw).get(name), f"no {name}"


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    """A new environment with the wheel and what it needs; the path of its python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in needed_packages(wheel, extra):
        borrow(name, packages)
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel),
        cwd=folder,
    )
    return python


def needed_packages(wheel: Path, extra: str) -> set[str]:
    """Of all that the wheel asks for, and what that asks for, the names of the installed distributions."""
    (raw,) = (content for name, content in contents(wheel).items() if name.endswith(".dist-info/METADATA"))
    requires = email.parser.BytesParser().parsebytes(raw).get_all("Requires-Dist", [])
    left, found = wanted_of(requires, {extra}), set[str]()
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        installed = metadata.distribution(name)
        assert requirement.specifier.contains(installed.version, prereleases=True), f"{requirement} is not installed"
        if name not in found:
            found.add(name)
            left += wanted_of(installed.requires or [], {"", *requirement.extras})
    return found


def wanted_of(requires: list[str], extras: set[str]) -> list[Requirement]:
    every = [Requirement(line) for line in requires]
    return [each for each in every if each.marker is None or any(each.marker.evaluate({"extra": x}) for x in extras)]


def borrow(name: str, packages: Path) -> None:
    """Link what a distribution has installed at the top of its site-packages."""
    installed = metadata.distribution(name)
    tops = {PurePosixPath(file).parts[0] for file in installed.files or ()} - {"..", "__pycache__"}
    for top in tops:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(installed.locate_file(top))).resolve())


if __name__ == "__main__":
    main()
