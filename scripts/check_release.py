"""Do `__version__`, CHANGELOG.md, CITATION.cff and, at a release, its tag say the same? And does the README?

    python scripts/check_release.py [v0.1.0]

To release: move what stands under `## Unreleased` in CHANGELOG.md below a heading such as `## 0.1.0 - 2026-12-24`,
write that date into CITATION.cff as date-released, and push the tag v0.1.0. What README.md shows must have
been measured on the code that is released: benchmarks/stale.json names what was not.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
UNRELEASED = "Unreleased"
SHOWN = {  # what README.md shows of each result: its tables and pictures
    "attention_gpu": ("headline", "docs/speed.svg"),
    "models_gpu": ("headline_models",),
    "demo": ("docs/demo.svg",),
}


@dataclass(frozen=True)
class Entry:
    """A section of the changelog."""

    heading: str
    text: str

    @property
    def version(self) -> Version | None:
        try:
            return Version(self.heading.partition(" - ")[0])
        except InvalidVersion:
            return None

    @property
    def date(self) -> datetime.date | None:
        try:
            return datetime.date.fromisoformat(self.heading.partition(" - ")[2])
        except ValueError:
            return None


def problems(root: Path, tag: str = "") -> list[str]:
    """All that does not agree, in sentences. Without a tag, what is not released yet may go without an entry."""
    version = read_version(root)
    unreleased, *entries = read_changelog(root)
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    found = changelog_problems(unreleased, entries, version)
    if str(citation.get("version")) != version:
        found.append(f"CITATION.cff has version {citation.get('version')}, __version__ is {version}")
    if tag:
        found += release_problems(tag, version, [unreleased, *entries], citation) + stale_problems(root)
    return found


def changelog_problems(unreleased: Entry, entries: list[Entry], version: str) -> list[str]:
    found = []
    if unreleased.heading != UNRELEASED:
        found.append(f"CHANGELOG.md begins with {unreleased.heading!r}, not with {UNRELEASED!r}")
    for entry in entries:
        if entry.version is None or entry.date is None:
            found.append(f"CHANGELOG.md: {entry.heading!r} is not like '0.1.0 - 2026-12-24'")
    versions = [entry.version for entry in entries if entry.version is not None]
    if versions != sorted(set(versions), reverse=True):
        found.append("CHANGELOG.md: versions must stand there once, the newest first")
    if versions and versions[0] > Version(version):
        found.append(f"CHANGELOG.md has {versions[0]}, __version__ is still {version}")
    return found


def release_problems(tag: str, version: str, entries: list[Entry], citation: dict[str, object]) -> list[str]:
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, and __version__ {version} wants v{version}")
    unreleased, *released = entries
    newest = released[0] if released else None
    if newest is None or str(newest.version) != version:
        return [*found, f"CHANGELOG.md has no entry of {version} below {UNRELEASED!r}"]
    if unreleased.text:
        found.append(f"CHANGELOG.md: there are changes under {UNRELEASED!r}; they belong to {version}")
    if not newest.text:
        found.append(f"CHANGELOG.md: the entry of {version} is empty")
    if str(citation.get("date-released")) != str(newest.date):
        found.append(f"CITATION.cff has date-released {citation.get('date-released')}, CHANGELOG.md {newest.date}")
    return found


def stale_problems(root: Path) -> list[str]:
    """A release shows no results of other code on its front page."""
    stale = json.loads((root / "benchmarks" / "stale.json").read_text())
    found = []
    for name in SHOWN.keys() & stale.keys():
        command = f"python benchmarks/{name}.py --out benchmarks/results/{name}.json"
        where = " on a GPU" if name.endswith("gpu") else ""
        found.append(
            f"README.md shows {' and '.join(SHOWN[name])} as of {stale[name]}, and the code has changed since: run "
            f"{command}{where}, take {name} out of benchmarks/stale.json, then run benchmarks/charts.py and tables.py"
        )
    return sorted(found)


def reminders(root: Path) -> list[str]:
    """What is no error, but would be missed."""
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"].get("urls", {})
    if {"repository", "source"} & {name.lower() for name in urls}:
        return []
    return ["pyproject.toml: [project.urls] has no Repository yet, so the package will not say where its code is"]


def read_version(root: Path) -> str:
    """Read, not imported: a release is checked before anything is installed."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "trainshort" / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None, 'trainshort/__init__.py has no line __version__ = "..."'
    return str(Version(found[1]))


def read_changelog(root: Path) -> list[Entry]:
    """One at least: without headings all of it is under an empty one."""
    parts = re.split(r"^## +(.*)$", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [Entry(heading.strip(), text.strip()) for heading, text in pairs] or [Entry("", parts[0].strip())]


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    for reminder in reminders(ROOT) if given else ():
        print(reminder)
    if wrong := problems(ROOT, given):
        sys.exit("\n".join(wrong))
    print(f"version, changelog{', citation and tag' if given else ' and citation'} agree: {read_version(ROOT)}")
